"""The built-in model families."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.models.base import Family


@hookimpl
def strata_register_families(register: Callable[[Family], None]) -> None:
    """Register every built-in family."""
    from strata_core.models import llama, qwen3_5, qwen3_5_moe, qwen3_next

    for family in (llama, qwen3_next, qwen3_5, qwen3_5_moe):
        register(family.FAMILY)
