"""The built-in backend: numpy, which runs everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.compute.base import BackendFactory


@hookimpl
def strata_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register the reference backend, which any other usable backend outranks."""
    from strata_core.compute.reference.factory import FACTORY

    register(FACTORY)
