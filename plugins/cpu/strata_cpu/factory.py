"""How the backend is found and made."""

from __future__ import annotations

import logging
import os
from functools import cache

import psutil

from strata_core.compute.base import Backend, BackendFactory, BackendOptions, Probe
from strata_core.errors import BackendError

logger = logging.getLogger(__name__)


def _probe() -> Probe:
    from strata_cpu import library

    try:
        isa = library.chosen_instruction_set(library.load(library.library_path()))
    except BackendError as error:
        _warn(str(error))
        return Probe(False, str(error))
    return Probe(True, f"native kernels for {isa}, {threads_for(0)} threads")


@cache
def _warn(reason: str) -> None:
    """Once for each reason: a slow server is not to be a riddle."""
    logger.warning("backend cpu cannot be used, so models run on a slower one: %s", reason)


def threads_for(wanted: int) -> int:
    """Threads to use: as many as asked for, or one for each physical core that this process may run on."""
    if wanted:
        return wanted
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _create(options: BackendOptions) -> Backend:
    from strata_cpu import library
    from strata_cpu.backend import CpuBackend

    native = library.load(library.library_path())
    return CpuBackend(native, threads_for(options.threads), library.chosen_instruction_set(native))


FACTORY = BackendFactory(name="cpu", priority=10, probe=_probe, create=_create)
"""What the plugin registers: above the reference, below any GPU."""
