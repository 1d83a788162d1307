"""The first line of a trace: what of the engine a replay must know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from strata_core import __version__
from strata_core.conversations.options import KeeperOptions
from strata_core.engine.core import CoreOptions
from strata_core.store.base import Level


def trace_header(
    facts: Mapping[str, object],
    core: CoreOptions,
    options: KeeperOptions,
    levels: Sequence[Level],
    available: int | None,
) -> dict[str, Any]:
    """See ``docs/simulate.md``.

    :param facts: of the engine; those that describe the model and its pages are taken.
    :param available: bytes of host memory free after the weights, before any page; None where unknown.
    """
    known = {key: facts[key] for key in ("backend", "architecture", "kv", "page_tokens", "page_bytes") if key in facts}
    return {
        "strata": __version__,
        **known,
        "parallel": core.parallel,
        "max_context": core.max_context,
        "agenda": attrs.asdict(core.agenda),
        "available": available,
        "levels": [_level(level) for level in sorted(levels, key=lambda level: level.rank)],
        "options": attrs.asdict(options),
    }


def _level(level: Level) -> dict[str, Any]:
    usage = level.usage()
    return {
        "name": level.name, "rank": level.rank, "max_bytes": usage.max_bytes, "max_entries": usage.max_entries,
    }  # fmt: skip
