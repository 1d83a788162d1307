"""From settings to a running engine: model file, backend, memory plan, pools, levels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from strata_core.compute.base import Backend, BackendOptions
from strata_core.compute.reference.pages import NumpyPageStore
from strata_core.conversations.checkpoints import CheckpointRules
from strata_core.conversations.identity import Identity
from strata_core.conversations.keeper import Keeper
from strata_core.conversations.matching import MatchRules
from strata_core.conversations.options import KeeperOptions, park_target
from strata_core.engine.core import CoreOptions
from strata_core.engine.engine import Engine, Parts
from strata_core.engine.plan import MemoryPlan, plan_memory
from strata_core.engine.trace import TraceRecorder
from strata_core.engine.trace_header import trace_header
from strata_core.errors import SettingsError, StrataError
from strata_core.events import EventDispatcher
from strata_core.memory.base import Arena
from strata_core.models.base import Model, ModelOptions
from strata_core.models.load import load_model
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool, chunk_pages_for
from strata_core.store.base import Archive, Level, LevelContext, Store
from strata_core.tokens.template import ChatTemplate
from strata_core.tokens.tokenizer import Tokenizer
from strata_core.tokens.turns import turn_opener_ids
from strata_core.weights.catalogue import resolve
from strata_core.weights.shards import open_model
from strata_core.weights.source import WeightSource

if TYPE_CHECKING:
    from strata_core.plugins import Plugins
    from strata_core.settings.core import Settings

log = logging.getLogger("strata.engine")

Progress = Callable[[str, float], None]


@attrs.define
class _Undo:
    """What has been opened so far, to be closed in reverse: on failure here, else when the engine closes."""

    actions: list[Callable[[], None]] = attrs.field(factory=list)

    def run(self) -> None:
        while self.actions:
            self.actions.pop()()


def open_engine(settings: Settings, plugins: Plugins, progress: Progress) -> Engine:
    """See :meth:`strata_core.engine.engine.Engine.open`."""
    parts, options = assemble(settings, plugins, progress)
    return Engine(parts, options, queue=settings.queue)


def assemble(settings: Settings, plugins: Plugins, progress: Progress) -> tuple[Parts, CoreOptions]:
    """Everything an engine is made of, opened and planned. The caller calls ``Parts.close`` in the end.

    :raises StrataError: the model, backend or memory is not to be had; nothing stays open.
    """
    undo = _Undo()
    try:
        return _assemble(settings, plugins, progress, undo)
    except BaseException:
        undo.run()
        raise


def _assemble(
    settings: Settings, plugins: Plugins, progress: Progress, undo: _Undo
) -> tuple[Parts, CoreOptions]:
    progress("opening the model", 0.0)
    path = resolve(settings.model)
    source = open_model(path)
    undo.actions.append(source.close)
    tokenizer = Tokenizer.from_metadata(source.metadata)
    template = ChatTemplate.from_metadata(source.metadata, tokenizer, settings.chat_template_file)
    memory = plugins.choose_memory()
    arena = memory.arena(settings.large_pages)  # type: ignore[arg-type]  # the settings table allows its words only
    backend: Backend = plugins.choose_backend(settings.backend).create(BackendOptions(settings.threads))
    undo.actions.append(backend.close)
    families = plugins.families().values()
    model = load_model(source, backend, families, _model_options(settings), lambda f: progress("loading weights", f))
    undo.actions.append(model.close)
    if settings.mtp and model.further is None:
        log.warning("mtp: %s has no layer that predicts further tokens; replies go on without its guesses", path.name)
    progress("planning memory", 1.0)
    kv_type = _kv_type(settings.kv, backend)
    layouts, state_layout = model.layouts(kv_type, settings.page_tokens), model.state_layout()
    available = memory.probe().available
    plan = plan_memory(
        settings,
        block_bytes=sum(layout.nbytes for layout in layouts),
        model_context=model.geometry.context,
        available=available if backend.host_memory else backend.free_bytes(),
        host_available=available,
        host_memory=backend.host_memory,
        state_bytes=0 if state_layout is None else state_layout.nbytes,
    )
    for line in plan.notes:
        log.info("%s", line)
    pools = [_pool(layout, backend, arena, plan.device_pages, undo) for layout in layouts]
    state_pool = None if state_layout is None else _pool(
        state_layout, backend, arena, plan.state_pages, undo, exchanged=settings.parallel
    )
    identity = _identity(source, model, tokenizer, kv_type, settings.page_tokens)
    host_pools, host_state_pool = None, None
    if not backend.host_memory:  # for parked copies of a device's pages
        host_pools = tuple(_host_pool(layout, arena, plan.host_pages, undo) for layout in layouts)
        if state_layout is not None:
            host_state_pool = _host_pool(state_layout, arena, plan.host_state_pages, undo)
    context = LevelContext(
        settings=settings,
        identity=identity,
        page_tokens=settings.page_tokens,
        page_bytes=sum(layout.nbytes for layout in layouts),
        ram_budget=plan.ram_budget,
        pools=tuple(pools),
        host_pools=host_pools,
        state_pool=state_pool,
        host_state_pool=host_state_pool,
    )
    stores = _stores(plugins, context) if settings.conversation_cache else []
    levels = [store for store in stores if isinstance(store, Level)]
    cascade = [level for level in levels if not level.for_roots]
    dispatcher = EventDispatcher(plugins.observe)
    undo.actions.append(dispatcher.close)
    keeper_options = _keeper_options(settings, cascade, plan)
    keeper = Keeper(
        identity,
        pools,
        levels,
        keeper_options,
        openers=turn_opener_ids(template, tokenizer),
        copies=host_pools is not None,
        max_context=plan.max_context,
        spell=lambda token: None if tokenizer.is_control(token) else tokenizer.token_bytes(token),
        available=lambda: memory.probe().available,
        admit=plugins.admit,
        emit=dispatcher.emit,
        state_pool=state_pool,
        archive=next((store for store in stores if isinstance(store, Archive)), None),
    )
    mtp = settings.mtp if model.further is not None else 0
    core_options = CoreOptions(
        settings.parallel, plan.max_context, settings.batch_agenda, settings.lookup, mtp, backend
    )
    facts: dict[str, object] = {
        "backend": backend.name,
        "kv": kv_type,
        "page_tokens": settings.page_tokens,
        "page_bytes": context.page_bytes,
        "state_bytes": None if state_layout is None else state_layout.nbytes,
        "ram_budget": plan.ram_budget,
        "architecture": model.geometry.architecture,
        "identity": identity.digest.hex(),
        "model_path": str(path),
    }
    trace = None
    if settings.record_trace is not None:
        header = trace_header(facts, core_options, keeper_options, cascade, available)
        trace = TraceRecorder(settings.record_trace, header)
        undo.actions.append(trace.close)
    parts = Parts(
        name=settings.alias[0] if settings.alias else _model_name(path),
        aliases=settings.alias[1:],
        model=model,
        tokenizer=tokenizer,
        template=template,
        keeper=keeper,
        weights_bytes=backend.weight_bytes(),
        facts=facts,
        trace=trace,
        emit=dispatcher.emit,
        close=undo.run,
    )
    return parts, core_options


def _model_options(settings: Settings) -> ModelOptions:
    return ModelOptions(
        rope_scaling=None if settings.rope_scaling == "model" else settings.rope_scaling,
        rope_freq_base=settings.rope_freq_base or None,
        rope_scale=settings.rope_scale or None,
        ple_io=settings.ple_io,
        ple_cache_bytes=settings.ple_cache_mib << 20,
        further=settings.mtp > 0,
    )


def _kv_type(wanted: str, backend: Backend) -> str:
    if wanted == "auto":
        return backend.kv_types[0]
    if wanted not in backend.kv_types:
        raise SettingsError(
            f"backend {backend.name!r} has no K/V type {wanted!r}; it has {', '.join(backend.kv_types)}", param="kv"
        )
    return wanted


def _pool(
    layout: PageLayout, backend: Backend, arena: Arena, pages: int, undo: _Undo, exchanged: int = 1
) -> PagePool:
    store = backend.page_store(layout, chunk_pages_for(layout), arena)
    undo.actions.append(store.close)
    return PagePool(store, pages, exchanged)


def _host_pool(layout: PageLayout, arena: Arena, pages: int, undo: _Undo) -> PagePool:
    store = NumpyPageStore(layout, chunk_pages_for(layout), arena)
    undo.actions.append(store.close)
    return PagePool(store, pages)


def _identity(source: WeightSource, model: Model, tokenizer: Tokenizer, kv_type: str, page_tokens: int) -> Identity:
    return Identity.of(
        {
            "weights": source.fingerprint(),
            "tokenizer": tokenizer.fingerprint(),
            "kv": kv_type,
            "page_tokens": page_tokens,
            **model.identity(),
        }
    )


def _stores(plugins: Plugins, context: LevelContext) -> list[Store]:
    """Make the configured levels, and the archive.

    :raises StrataError: one was asked for and cannot be had (its directory is in use, say). A plugin that breaks down
        instead of saying so is left out.
    """
    stores: list[Store] = []
    for name, factory in plugins.levels().items():
        try:
            store = factory.create(context)
        except StrataError:
            for made in stores:
                made.close()
            raise
        except Exception:
            log.exception("level %s could not be made and is left out", name)
            continue
        if store is not None:
            stores.append(store)
    return stores


def _keeper_options(settings: Settings, levels: Sequence[Level], plan: MemoryPlan) -> KeeperOptions:
    target = park_target(
        "disk" if settings.conversation_cache_disk_only else settings.conversation_cache_park,
        below=any(level.rank > 0 for level in levels),
        mirrors=settings.conversation_cache_spill_on == "park" or settings.conversation_cache_disk_only,
        snapshots_fit=plan.snapshots_fit,
    )
    return KeeperOptions(
        enabled=settings.conversation_cache,
        parking_floor=settings.conversation_cache_min_free_mib << 20,
        transient_floor=settings.conversation_cache_park_min_free_mib << 20,
        target=target,
        mirror=settings.conversation_cache_spill_on == "park",
        throttle_s=settings.conversation_cache_spill_park_throttle_s,
        divergence=settings.conversation_cache_spill_divergence_tokens,
        weigh_restores=settings.restore_when == "auto",
        roots=(settings.system_prompt_cache_slots or None) if settings.system_prompt_cache else 0,
        root_bytes=settings.system_prompt_cache_mib << 20,
        checkpoints=CheckpointRules(settings.prompt_cache, settings.prompt_cache_every, settings.prompt_cache_root),
        root_key=settings.system_prompt_cache_key,
        rules=MatchRules(settings.conversation_cache_similarity, settings.conversation_cache_n_min),
    )


def _model_name(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.stem
