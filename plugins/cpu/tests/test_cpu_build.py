"""Building the kernels, and what happens where that cannot be done."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from strata_cpu import factory, library

from strata_core.compute.base import BackendFactory
from strata_core.errors import BackendError, PluginError
from strata_core.plugins import Plugins

PLUGIN = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compile_kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", PLUGIN / "compile_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile_kernels: ModuleType) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the build had left only its note."""
    note = tmp_path / "not_built.txt"
    note.write_text("there is no C compiler\n", "utf-8")
    monkeypatch.setattr(library, "NOT_BUILT", note)
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "native.so"))
    factory._warn.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_build_asks_for_one_and_then_says_so(compile_kernels: ModuleType, tmp_path: Path) -> None:
    assert compile_kernels.requirements(["setuptools"]) == ["setuptools", "ziglang"]
    with pytest.raises(compile_kernels.NotBuilt, match="no C compiler"):
        compile_kernels.build(tmp_path / "native.so")


def test_with_a_compiler_nothing_is_fetched(compile_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -m64")
    assert compile_kernels.compiler() == ["gcc", "-m64"]
    assert compile_kernels.requirements(["setuptools"]) == ["setuptools"]


def test_the_compiler_in_the_ziglang_package_is_used_where_there_is_no_other(
    compile_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "ziglang")
    assert compile_kernels.compiler() == [sys.executable, "-m", "ziglang", "cc"]


@pytest.mark.parametrize(
    ("command", "message"), [("false", "failed with exit code 1"), ("/no/such/cc", "does not start")]
)
def test_a_compiler_that_fails_is_named_with_its_reason(
    compile_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, message: str
) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(compile_kernels.NotBuilt, match=message):
        compile_kernels.build(tmp_path / "native.so")
    assert not (tmp_path / "native.so").exists()


def test_where_the_library_cannot_be_made_the_package_holds_a_note_instead(
    compile_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compile_kernels, "HERE", tmp_path)
    (tmp_path / "strata_cpu").mkdir()
    (tmp_path / "strata_cpu" / "native.so").write_bytes(b"of an earlier version")
    monkeypatch.setenv("CC", "false")
    compile_kernels.build_into_package()
    assert [path.name for path in (tmp_path / "strata_cpu").iterdir()] == ["not_built.txt"]
    assert "false failed" in (tmp_path / "strata_cpu" / "not_built.txt").read_text("utf-8")


@pytest.mark.usefixtures("not_built")
def test_without_its_kernels_the_reference_is_used_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            plugins = Plugins.load(requested=["strata_cpu.plugin"])
            chosen: BackendFactory = plugins.choose_backend("auto")
            assert chosen.name == "numpy"
    warnings = [record.getMessage() for record in caplog.records if record.name == factory.logger.name]
    assert len(warnings) == 1
    assert "there is no C compiler" in warnings[0]
    with pytest.raises(PluginError, match="there is no C compiler"):
        plugins.choose_backend("cpu")


def test_a_file_that_is_no_library_is_a_reason_and_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "native.so").write_bytes(b"\x7fELF nonsense")
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "native.so"))
    factory._warn.cache_clear()
    found = factory.FACTORY.probe()
    assert not found.usable
    assert "do not load" in found.detail


def test_an_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    with pytest.raises(BackendError, match=r"STRATA_CPU_ISA=mmx, but this machine runs .*portable"):
        library.chosen_instruction_set(library.load(library.library_path()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_pass_under_the_address_and_undefined_behaviour_sanitizers(
    compile_kernels: ModuleType, tmp_path: Path
) -> None:
    compiler = compile_kernels.compiler()
    asan = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = Path(asan.stdout.strip())
    if not runtime.is_absolute():
        pytest.skip(f"{compiler[0]} has no address sanitizer")
    compile_kernels.build(tmp_path / "native.so", sanitize=True)
    environment = {
        **os.environ,
        library.LIBRARY_VARIABLE: str(tmp_path / "native.so"),
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "PYTHONMALLOC": "malloc",  # so that arrays have red zones around them
    }
    files = [str(Path(__file__).with_name(f"test_cpu_{name}.py")) for name in ("products", "attention", "conformance")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, cwd=PLUGIN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-fsanitize=thread",), ("-fsanitize=thread", "-U__linux__"),
                                     ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")])  # fmt: skip
def test_threads_hand_over_what_they_wrote(
    compile_kernels: ModuleType, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Without ``__linux__``, threads sleep as they do where there is no futex."""
    compiler, program = compile_kernels.compiler(), tmp_path / "driver"
    runtime = "libtsan.so" if "thread" in options[0] else "libasan.so"
    found = subprocess.run([*compiler, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler[0]} has no {runtime}")
    sources = [str(Path(__file__).with_name("team_driver.c")), str(PLUGIN / "src" / "team.c")]
    command = [*compiler, "-std=gnu11", "-O1", "-g", *options, f"-I{PLUGIN / 'src'}", *sources, "-o", str(program)]
    subprocess.run([*command, "-lpthread"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "16 threads"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_for_aarch64_compute_what_portable_ones_do_under_emulation(
    compile_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cross, emulator = "aarch64-linux-gnu-gcc", shutil.which("qemu-aarch64")
    if shutil.which(cross) is None or emulator is None:
        pytest.skip(f"{cross} or qemu-aarch64 is not installed")
    monkeypatch.setenv("CC", cross)
    compile_kernels.build(tmp_path / "native.so", machine="aarch64")
    program = tmp_path / "compare"
    source = Path(__file__).with_name("compare_kernels.c")
    options = ["-std=gnu11", "-O1", f"-I{PLUGIN / 'src'}", f"-Wl,-rpath,{tmp_path}"]
    parts = [str(source), str(tmp_path / "native.so"), "-lm"]
    subprocess.run([cross, *options, *parts, "-o", str(program)], check=True)
    done = subprocess.run(
        [emulator, "-L", "/usr/aarch64-linux-gnu", str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "against" in line] == [
        "neondot against portable",
        "neon against portable",
    ]
