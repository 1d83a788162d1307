"""Numbers of the engine and the server as Prometheus metrics.

``strata:*`` names are Strata's own. The ``vllm:*`` names are those that vLLM's dashboards query; they are filled from
the same numbers. What the engine does not measure (None) has no sample: absent, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from strata_core.errors import StrataError
from strata_core.server.holder import EngineHolder

if TYPE_CHECKING:
    from strata_core.engine.stats import LevelInfo

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920)


@attrs.frozen
class _Source:
    """A metric that is one attribute of the engine's statistics.

    :ivar label: for attributes that are a dict: the name of the label that its keys are values of.
    """

    attribute: str
    name: str
    help: str
    label: str | None = None
    gauge: bool = False


SOURCES = (
    _Source("requests_total", "strata:requests", "Requests that have ended, by status.", "status"),
    _Source("requests_cancelled", "strata:requests_cancelled", "Requests that their client cancelled or left."),
    _Source("queued", "strata:requests_queued", "Requests that wait for a slot.", gauge=True),
    _Source("running", "strata:requests_running", "Requests that have a slot.", gauge=True),
    _Source("prompt_tokens_total", "strata:prompt_tokens", "Tokens of all prompts, read or not."),
    _Source("read_tokens_total", "strata:read_tokens", "Prompt tokens that were computed."),
    _Source("generated_tokens_total", "strata:generated_tokens", "Tokens generated."),
    _Source("drafted_tokens_total", "strata:drafted_tokens", "Tokens guessed ahead, by kind.", "kind"),
    _Source("accepted_tokens_total", "strata:accepted_tokens", "Guessed tokens that were right, by kind.", "kind"),
    _Source("reused_tokens_total", "strata:reused_tokens", "Prompt tokens not computed again, by source.", "source"),
    _Source("reread_tokens_total", "strata:reread_tokens", "Tokens computed again, by reason.", "reason"),
    _Source("parked", "strata:parked_conversations", "Conversations parked in RAM.", gauge=True),
    _Source("parked_bytes", "strata:parked_bytes", "Bytes that parked conversations hold.", gauge=True),
    _Source("park_budget", "strata:park_budget_bytes", "Bytes that parked conversations may hold.", gauge=True),
    _Source("evictions", "strata:evictions", "Parked conversations given up for the budget."),
    _Source("discards", "strata:discards", "Conversations that could not be kept when they left their slot."),
    _Source("demotions", "strata:demotions", "Conversations moved to the next level."),
    _Source("superseded", "strata:superseded", "Stored copies that a newer one of the same conversation replaced."),
    _Source("compacted", "strata:compacted", "Stored copies whose history their client has rewritten."),
    _Source("archived", "strata:archived", "Superseded and rewritten copies that went to the archive."),
    _Source("archive_failures", "strata:archive_failures", "Copies that the archive could not keep."),
    _Source("disk_evictions", "strata:disk_evictions", "Conversations that the last level deleted for its budget."),
    _Source("age_evictions", "strata:age_evictions", "Stored conversations that the last level deleted for their age."),
    _Source("spilled", "strata:spilled", "Conversations written below RAM."),
    _Source("spilled_tokens", "strata:spilled_tokens", "Tokens of conversations written below RAM."),
    _Source("spilled_bytes", "strata:spilled_bytes", "Bytes written below RAM."),
    _Source("spill_failures", "strata:spill_failures", "Writes below RAM that a level could not complete."),
    _Source("restore_failures", "strata:restore_failures", "Restores that a level could not complete."),
    _Source("pool_pages_used", "strata:pool_pages_used", "Pages of the pool in use.", gauge=True),
    _Source("pool_pages_total", "strata:pool_pages", "Pages of the pool.", gauge=True),
    _Source("pool_bytes", "strata:pool_bytes", "Bytes of the pool.", gauge=True),
    _Source("weights_bytes", "strata:weights_bytes", "Bytes of the model's weights.", gauge=True),
    _Source("steps_total", "strata:steps", "Steps of the engine."),
    _Source("step_rows_total", "strata:step_rows", "Rows computed, prompt and decode together."),
    _Source("step_failures", "strata:step_failures", "Steps that the backend failed to execute."),
    _Source("read_seconds", "strata:read_seconds", "Time spent computing prompts."),
    _Source("generate_seconds", "strata:generate_seconds", "Time spent generating."),
    _Source("engine_seconds", "strata:engine_seconds", "Time that the engine's thread was busy."),
    _Source("model_counts", "strata:model_counts", "Reads of tables on disk, by what is counted.", "count"),
    _Source("running", "vllm:num_requests_running", "Requests that have a slot.", gauge=True),
    _Source("queued", "vllm:num_requests_waiting", "Requests that wait for a slot.", gauge=True),
    _Source("prompt_tokens_total", "vllm:prompt_tokens", "Tokens of all prompts."),
    _Source("generated_tokens_total", "vllm:generation_tokens", "Tokens generated."),
    _Source("prompt_tokens_total", "vllm:prefix_cache_queries", "Prompt tokens looked up."),
)
"""One line per metric; counters get ``_total`` appended when they are shown."""


class Latencies:
    """Histograms of what clients wait for, measured here because it includes the queue and the HTTP side."""

    def __init__(self, registry: CollectorRegistry):
        self._first: Histogram = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            ["model_name"],
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._whole: Histogram = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its last token.",
            ["model_name"],
            buckets=_WHOLE_S,
            registry=registry,
        )

    def first_token(self, model: str, seconds: float) -> None:
        self._first.labels(model).observe(seconds)

    def finished(self, model: str, seconds: float) -> None:
        self._whole.labels(model).observe(seconds)


class EngineCollector:
    """Asks the engine for its statistics when a scraper asks for metrics; nothing while it is loading."""

    def __init__(self, holder: EngineHolder):
        self._holder = holder

    def collect(self) -> Iterator[Metric]:
        try:
            engine = self._holder.engine()
        except StrataError:
            return
        stats = engine.stats()
        for source in SOURCES:
            value = getattr(stats, source.attribute)
            if value is not None:
                yield _family(source, value, engine.name)
        reused = stats.reused_tokens_total
        if reused is not None:
            hits = _Source("reused_tokens_total", "vllm:prefix_cache_hits", "Prompt tokens not computed again.")
            yield _family(hits, sum(reused.values()), engine.name)
        yield from _levels(stats.levels)
        if stats.pool_pages_used is not None and stats.pool_pages_total:
            usage = _Source("", "vllm:kv_cache_usage_perc", "Share of the page pool in use, 0 to 1.", gauge=True)
            yield _family(usage, stats.pool_pages_used / stats.pool_pages_total, engine.name)


def _levels(levels: Sequence[LevelInfo]) -> Iterator[Metric]:
    """Fill and bounds of every level; a level without a bound has no sample for it."""
    for attribute, name, help_ in (
        ("bytes", "strata:level_bytes", "Bytes that a level holds."),
        ("max_bytes", "strata:level_budget_bytes", "Bytes that a level may hold."),
        ("entries", "strata:level_conversations", "Conversations that a level holds."),
        ("max_entries", "strata:level_max_conversations", "Conversations that a level may hold."),
    ):
        values = {level.name: getattr(level, attribute) for level in levels}
        known = {level: value for level, value in values.items() if value is not None}
        if known:
            yield _family(_Source("", name, help_, "level", gauge=True), known, "")


def _family(source: _Source, value: Any, model: str) -> Metric:
    kind = GaugeMetricFamily if source.gauge else CounterMetricFamily
    # Dashboards for vLLM select by model_name.
    fixed = {"model_name": model} if source.name.startswith("vllm:") else {}
    labels = [*fixed, *([source.label] if source.label else [])]
    family: Metric = kind(source.name, source.help, labels=labels)
    values: Mapping[str, float] = value if isinstance(value, Mapping) else {"": value}
    for key, number in values.items():
        family.add_metric([*fixed.values(), *([key] if source.label else [])], number)  # type: ignore[attr-defined]
    return family
