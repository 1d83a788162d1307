"""``start.py``: what it decides before it acts."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "start.py"


@pytest.fixture
def start() -> ModuleType:
    spec = importlib.util.spec_from_file_location("start", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plugin(table: str) -> str:
    return f'[project]\nname = "strata-engine-x"\n\n{table}\n\n[tool.other]\nplatforms = ["none"]\n'


LINUX = {"system": "linux", "machine": "x86_64", "present": {"/dev/kfd", "nvidia-smi"}.__contains__}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("", True),
        ("[tool.strata]", True),
        ('[tool.strata]\nplatforms = ["linux", "win32"]', True),
        ('[tool.strata]\nplatforms = ["win32"]', False),
        ("[tool.strata] # where\n# not here:\nplatforms = ['darwin'] # only", False),
        ('[tool.strata]\nmachines = [\n  "AMD64",\n  "x86_64",  # Linux\n]', True),
        ('[tool.strata]\nmachines = ["aarch64"]\nplatforms = ["linux"]', False),
        ('[tool.strata]\nrequires = ["/dev/kfd", "/opt/rocm"]', True),
        ('[tool.strata]\nrequires = ["nvidia-smi"]', True),
        ('[tool.strata]\nrequires = ["/dev/none", "rocminfo"]', False),
    ],
)
def test_plugins_are_installed_where_their_table_says(start: ModuleType, table: str, expected: bool) -> None:
    assert start.fits(plugin(table), **LINUX) is expected


@pytest.mark.parametrize(
    "table",
    ['platform = ["a"]', 'platforms = "linux"', "platforms = [1]", "platforms = [linux]", "platforms", 'x.y = ["a"]'],
)
def test_tables_that_cannot_be_understood_are_errors(start: ModuleType, table: str) -> None:
    with pytest.raises(start.Failed, match=r"\[tool\.strata\] table"):
        start.fits(plugin(f"[tool.strata]\n{table}"), **LINUX)


@pytest.mark.parametrize(
    ("command", "rest", "expected"),
    [
        ("serve", [], True),
        ("serve", ["--port", "8001"], True),
        ("serve", ["--model", "x.gguf"], False),
        ("serve", ["--model=x.gguf"], False),
        ("serve", ["--model-alias", "x"], True),
        ("serve", ["--help"], False),
        ("test", ["-k", "pool"], True),
        ("test", ["-m", "not model"], True),
        ("chat", [], False),
        ("models", ["list"], False),
    ],
)
def test_the_default_model_is_fetched_for_what_uses_it(
    start: ModuleType, monkeypatch: pytest.MonkeyPatch, command: str, rest: list[str], expected: bool
) -> None:
    monkeypatch.delenv("STRATA_MODEL", raising=False)
    assert start.needs_default_model(command, rest) is expected


def test_a_model_in_the_environment_is_another_model(start: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_MODEL", "x.gguf")
    assert not start.needs_default_model("serve", [])


@pytest.fixture
def installs(start: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A checkout with one plugin for this machine and one for another; the pip commands that would be run."""
    (tmp_path / "pyproject.toml").write_text("[project]")
    for name, table in (("here", ""), ("elsewhere", '[tool.strata]\nplatforms = ["none"]')):
        (tmp_path / "plugins" / name).mkdir(parents=True)
        (tmp_path / "plugins" / name / "pyproject.toml").write_text(plugin(table))
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(start, "ROOT", tmp_path)
    monkeypatch.setattr(start, "VENV", tmp_path / ".venv")
    commands: list[list[str]] = []
    monkeypatch.setattr(start, "run", lambda command: commands.append(command[command.index("--editable") :]))
    return commands


def test_core_and_the_plugins_of_this_machine_are_installed_once(
    start: ModuleType, installs: list[list[str]], tmp_path: Path
) -> None:
    start.install(testing=False)
    start.install(testing=False)
    assert installs == [["--editable", str(tmp_path), "--editable", str(tmp_path / "plugins" / "here")]]
    (tmp_path / "plugins" / "here" / "pyproject.toml").write_text(plugin("# changed"))
    start.install(testing=False)
    assert len(installs) == 2


def test_an_installation_for_tests_also_serves_but_not_the_reverse(
    start: ModuleType, installs: list[list[str]], tmp_path: Path
) -> None:
    start.install(testing=False)
    start.install(testing=True)
    start.install(testing=False)
    start.install(testing=True)
    assert [command[1] for command in installs] == [str(tmp_path), f"{tmp_path}[test]"]


def test_a_failed_installation_is_tried_again(
    start: ModuleType, installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str]) -> None:
        raise start.Failed("no network", 1)

    start.install(testing=False)
    works = start.run
    monkeypatch.setattr(start, "run", fail)
    with pytest.raises(start.Failed):
        start.install(testing=True)
    monkeypatch.setattr(start, "run", works)
    start.install(testing=False)
    assert len(installs) == 2


def test_a_python_without_venv_names_the_package_to_install(start: ModuleType) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    assert version in start.no_venv_message("The virtual environment was not made because ensurepip is not available")
    assert version in start.no_venv_message(f"{sys.executable}: No module named venv")
    assert "No space left" in start.no_venv_message("OSError: No space left on device")


def test_steps_that_fail_or_cannot_start_pass_their_exit_code_on(start: ModuleType, tmp_path: Path) -> None:
    start.run([sys.executable, "-c", ""])
    with pytest.raises(start.Failed) as caught:
        start.run([sys.executable, "-c", "raise SystemExit(5)"])
    assert caught.value.status == 5
    with pytest.raises(start.Failed, match="could not be started"):
        start.run([str(tmp_path / "none")])


def launch(code: str) -> subprocess.Popen[str]:
    """Become another program from a fresh interpreter, as ``start.py`` does at its end."""
    final = [sys.executable, "-c", code]
    script = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import start; sys.exit(start.become({final!r}))"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_the_final_programs_exit_code_is_the_result() -> None:
    with launch("raise SystemExit(42)") as process:
        assert process.wait(30) == 42


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_signals_reach_the_final_program() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    with launch(code) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 7
        assert time.monotonic() - begun < 15


def test_without_a_command_the_usage_is_shown() -> None:
    shown = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "start.py serve" in shown.stdout
    assert subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, check=False).returncode == 0
