"""Compiles the kernels.

    python compile_kernels.py TARGET.so [--sanitize]     for development and tests; pip does it through build_native.py

The system's C compiler is used (``CC``, else ``cc``, ``gcc``, ``clang``); where there is none, pip is told to fetch the
compiler in the PyPI package ``ziglang`` for the build. Where that does not work either, the package is installed
without the library and with a note of the reason, and Strata runs on its reference backend.

``src/kernels.c`` is compiled once for each instruction set of the machine, everything else once.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("attending.c", "decoder.c", "engine.c", "pack.c", "phases.c", "recurrent.c", "scoring.c", "team.c")

_COMMON = ["-std=gnu11", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
#: Searching whole functions for what is computed twice takes half of gcc's time, and makes nothing faster in loops of
#: vectors that are written out.
_QUICK = ["-fno-gcse", "-fno-gcse-after-reload"]
#: Contracting a product and a sum is for the kernels to decide: else the same row could get other bits in another tile.
_EXACT = ["-ffp-contract=off", "-fno-math-errno"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
#: Known to gcc 11 and clang 12 and later; older ones leave these kernels out.
_AMX = ["-mamx-tile", "-mamx-int8"]
#: Vectors wider than the machine's are passed in memory, and only within this library.
_PORTABLE = ["-O2", "-Wno-psabi"]
_X86: Mapping[str, Sequence[str]] = {
    "PORTABLE": _PORTABLE,
    "AVX2": _AVX2,
    "AVX512": _AVX512,
    "AVX512VNNI": [*_AVX512, "-mavx512vnni"],
    "AMX": [*_AVX512, "-mavx512vnni", *_AMX],
}
_ARM: Mapping[str, Sequence[str]] = {"PORTABLE": _PORTABLE, "NEON": [], "NEONDOT": ["-march=armv8.2-a+dotprod"]}
#: Flags of every instruction set that has kernels, by machine.
INSTRUCTION_SETS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "x86_64": _X86,
    "amd64": _X86,
    "aarch64": _ARM,
    "arm64": _ARM,
}
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g"]


class NotBuilt(Exception):
    """The library could not be made; the message is one line."""


def compiler() -> list[str] | None:
    """The C compiler's command, or None where there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def build(
    target: Path, *, machine: str = platform.machine(), sanitize: bool = False, emulate: Path | None = None
) -> None:
    """Compile and link the library.

    :param machine: whose instruction sets to compile for; others than this one's need a cross compiler in ``CC``.
    :param emulate: a header that replaces the instructions of AVX512-VNNI and AMX, to test what uses them elsewhere.
    :raises NotBuilt: no compiler, or it failed.
    """
    command = compiler()
    if command is None:
        raise NotBuilt("there is no C compiler (install gcc or clang, or the PyPI package ziglang, and install again)")
    flags = [*_COMMON, *_EXACT, *(_SANITIZE if sanitize else ())]
    if emulate is not None:
        flags += ["-DSTRATA_EMULATED", "-include", str(emulate)]
    if _accepts(command, _QUICK):
        flags += _QUICK
    sets = dict(INSTRUCTION_SETS.get(machine.lower(), {"PORTABLE": _PORTABLE}))
    if "AMX" in sets and not _accepts(command, _AMX):
        del sets["AMX"]
        flags.append("-DSTRATA_WITHOUT_AMX")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(source, [], Path(folder) / f"{source}.o") for source in SOURCES]
        for isa, options in sets.items():
            jobs.append(("kernels.c", [*options, f"-DSTRATA_ISA_{isa}"], Path(folder) / f"{isa}.o"))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for running in [
                pool.submit(_run, [*command, *flags, *options, "-c", str(HERE / "src" / source), "-o", str(to)])
                for source, options, to in jobs
            ]:
                running.result()
        objects = [str(to) for _, _, to in jobs]
        linked = Path(folder) / "native.so"
        _run([*command, *flags, "-shared", "-o", str(linked), *objects, "-lm", "-lpthread"])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(linked, target)  # at once: a library that is mapped somewhere is replaced, not overwritten


def _accepts(command: Sequence[str], options: Sequence[str]) -> bool:
    """Whether the compiler knows these options."""
    probe = [*command, *options, "-x", "c", "-fsyntax-only", os.devnull]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotBuilt(f"the compiler {command[0]} does not start: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NotBuilt(f"{command[0]} failed with exit code {done.returncode}: {first}")


def build_into_package() -> None:
    """Put the library, or the reason why there is none, where the package looks for it."""
    package = HERE / "strata_cpu"
    note = package / "not_built.txt"
    try:
        build(package / "native.so")
        note.unlink(missing_ok=True)
    except NotBuilt as error:
        (package / "native.so").unlink(missing_ok=True)
        note.write_text(f"{error}\n", "utf-8")
        print(f"strata-engine-cpu is installed without its kernels: {error}", file=sys.stderr)


def requirements(found: list[str]) -> list[str]:
    """What pip is to install for a build, given what setuptools asks for."""
    return found if compiler() else [*found, "ziglang"]


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]), sanitize="--sanitize" in sys.argv[2:])
    except NotBuilt as failure:
        sys.exit(str(failure))
