"""The built-in model families."""

from __future__ import annotations

from collections.abc import Callable

from strata_core.hookspecs import hookimpl
from strata_core.models import llama
from strata_core.models.base import Family

FAMILIES = (llama.FAMILY,)


@hookimpl
def strata_register_families(register: Callable[[Family], None]) -> None:
    """Register every built-in family."""
    for family in FAMILIES:
        register(family)
