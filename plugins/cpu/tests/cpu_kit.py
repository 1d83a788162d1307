"""Makes backends for the tests of the cpu plugin."""

from __future__ import annotations

import ctypes

from strata_cpu import library
from strata_cpu.backend import CpuBackend


def native() -> ctypes.CDLL:
    return library.load(library.library_path())


def instruction_sets() -> list[str]:
    """Those that can be run here, best first; none where the library was not built."""
    return library.instruction_sets(native()) if library.library_path().exists() else []


def make(threads: int = 2, isa: str | None = None) -> CpuBackend:
    return CpuBackend(native(), threads, isa or instruction_sets()[0])
