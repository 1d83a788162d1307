"""What the ``strata`` entry point names: registers the backend, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.compute.base import BackendFactory


@hookimpl
def strata_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register backend ``cpu``, which outranks the reference wherever its kernels were built."""
    from strata_cpu.factory import FACTORY

    register(FACTORY)
