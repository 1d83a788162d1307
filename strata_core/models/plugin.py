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
    from strata_core.models import (
        deepseek_v3,
        gemma3,
        gpt_oss,
        llama,
        qwen2,
        qwen3,
        qwen3_5,
        qwen3_5_moe,
        qwen3_moe,
        qwen3_next,
        qwen4_exp,
    )

    hybrid = qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp
    for family in (llama, qwen2, qwen3, qwen3_moe, gemma3, gpt_oss, deepseek_v3, *hybrid):
        register(family.FAMILY)
