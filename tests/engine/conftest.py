"""A tiny model, and engines on every backend that the contract is proven with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver

from strata_core.engine.core import EngineCore
from strata_core.engine.opening import assemble
from strata_core.engine.requests import RequestRecord
from strata_core.events import Event
from strata_core.plugins import Plugins
from strata_core.settings.core import Settings
from strata_core.testing.tiny import tiny_llama
from strata_core.testing.tiny_families import tiny_family
from strata_core.testing.tiny_hybrid import tiny_hybrid, tiny_sparse


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_llama(path, seed=7, layers=2, width=64, heads=4, kv_heads=2, context=512)
    return path


@pytest.fixture(scope="session")
def tiny_hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-hybrid.gguf"
    return tiny_hybrid(path, seed=7, layers=3, interval=2, architecture="qwen35")


@pytest.fixture(scope="session")
def tiny_models(tiny_model: Path, tiny_hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One for each way in which conversations of models differ: in their pages, and in where they can be resumed."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": tiny_model,
        "window": tiny_family(folder / "window.gguf", architecture="gemma3", seed=7),
        "hybrid": tiny_hybrid_model,
        "sparse": tiny_sparse(folder / "sparse.gguf", seed=7),
    }


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    return Plugins.load(environ={}, requested=["shadow_plugin"])


@pytest.fixture(params=["numpy", "shadow"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(tiny_model: Path, plugins: Plugins, backend: str) -> Iterator[Callable[..., Driver]]:
    """Makes drivers; all settings may be overridden. Floors are 0, so that the machine's memory decides nothing."""
    made: list[Driver] = []

    def make(**overrides: Any) -> Driver:
        made.append(make_one(**overrides))
        return made[-1]

    def make_one(**overrides: Any) -> Driver:
        values: dict[str, Any] = dict(
            model=str(tiny_model), backend=backend, kv="f32", page_tokens=8, parallel=2, conversation_cache_mib=64,
            conversation_cache_min_free_mib=0, conversation_cache_park_min_free_mib=0, large_pages="off",
        )  # fmt: skip
        settings = Settings(**(values | overrides))
        parts, options = assemble(settings, plugins, lambda what, fraction: None)
        events: list[Event] = []
        records: list[RequestRecord] = []
        core = EngineCore(
            parts.model, parts.tokenizer, parts.keeper, options, emit=events.append, ended=records.append
        )
        return Driver(core, parts, events, records)

    make.undriven = make_one  # type: ignore[attr-defined]  # for machines that close what they make

    yield make
    for one in made:
        one.close()
