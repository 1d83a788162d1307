"""The families: numbers, independence of how rows are batched, what they refuse, what they ask experts for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_kit import TOKENS, Changed, load
from tiny_folders import EXPERTS, HEADS, TINIES, Tiny, write

from strata_core.compute.base import Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.experts import ResidentExperts
from strata_core.testing.runner import ModelRunner, Rows
from strata_core.testing.shadow import ShadowBackend

GOLDEN = Path(__file__).parents[1] / "golden" / "families.npz"
BY_NAME = {tiny.name: tiny for tiny in TINIES}
#: One of each family.
FAMILIES = [tiny for tiny in TINIES if tiny.name == tiny.family]
MIXTURES = [tiny for tiny in FAMILIES if tiny.name in ("qwen3_moe", "gpt_oss", "deepseek_v3")]
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3": "gemma3",
    "gpt_oss": "gpt-oss", "deepseek_v3": "deepseek2",
}  # fmt: skip

each = pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
each_mixture = pytest.mark.parametrize("tiny", MIXTURES, ids=lambda tiny: tiny.name)


def runner(path: Path, backend: Backend | None = None, **fields: Any) -> ModelRunner:
    backend = backend or NumpyBackend()
    return ModelRunner(load(path, backend), backend, **{"sequences": 4, "length": 128, "page_tokens": 8, **fields})


@pytest.mark.parametrize("tiny", TINIES, ids=lambda tiny: tiny.name)
def test_logits_are_those_that_transformers_gave(tmp_path: Path, tiny: Tiny) -> None:
    with np.load(GOLDEN) as golden:
        expected = golden[tiny.name]
    found = runner(write(tiny, tmp_path)).logits(TOKENS)[-1]
    assert np.abs(found - expected).max() <= 1e-4


@each
def test_full_chunked_stepwise_and_batched_rows_agree(tmp_path: Path, tiny: Tiny) -> None:
    run = runner(write(tiny, tmp_path))
    full = run.logits(TOKENS)
    limit = 1e-5 * np.abs(full).max()
    for sequence, chunk in enumerate((1, 7, 32), 1):
        for start in range(0, len(TOKENS), chunk):
            part = TOKENS[start : start + chunk]
            logits = run.step([Rows(sequence, start, part)], range(len(part)))
            assert np.abs(logits - full[start : start + len(part)]).max() <= limit
    run.step([Rows(1, 0, TOKENS[:40]), Rows(3, 0, TOKENS[:60])], [])
    parts = [Rows(0, 0, TOKENS[:33]), Rows(1, 40, TOKENS[40:41]), Rows(2, 0, TOKENS[:1]), Rows(3, 60, TOKENS[60:])]
    assert np.abs(run.step(parts, [32, 33, 34, 64]) - full[[32, 40, 0, 89]]).max() <= limit


@each
def test_a_backend_apart_from_the_host_computes_the_same(tmp_path: Path, tiny: Tiny) -> None:
    """No family looks into an array, or uses one again that an operation may have overwritten."""
    path = write(tiny, tmp_path)
    expected = runner(path).logits(TOKENS)
    assert np.array_equal(runner(path, ShadowBackend(seed=2)).logits(TOKENS), expected)


@each
def test_every_key_and_value_type_runs(tmp_path: Path, tiny: Tiny) -> None:
    path = write(tiny, tmp_path)
    expected = runner(path).logits(TOKENS)[-1]
    for kv_type in ("f16", "bf16", "int8"):
        found = runner(path, kv_type=kv_type).logits(TOKENS)[-1]
        assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()


@each
def test_a_key_that_the_family_does_not_know_is_refused_by_name(tmp_path: Path, tiny: Tiny) -> None:
    path, architecture = write(tiny, tmp_path), ARCHITECTURES[tiny.family]
    for name in ("attention.clamp_kqv", "logit_scale", "rope.scaling.alpha"):
        key = f"{architecture}.{name}"
        with pytest.raises(UnsupportedModel, match=key) as caught:
            load(Changed(path, {key: 0.5}), NumpyBackend())
        assert caught.value.param == key
    neutral = {f"{architecture}.attention.clamp_kqv": 0.0, f"{architecture}.logit_scale": 1.0}
    load(Changed(path, neutral), NumpyBackend())


@each
def test_a_missing_key_or_tensor_is_named(tmp_path: Path, tiny: Tiny) -> None:
    path, architecture = write(tiny, tmp_path), ARCHITECTURES[tiny.family]
    keys = ["block_count", "context_length", "embedding_length", "attention.head_count", "feed_forward_length"]
    if tiny in MIXTURES:
        keys[-1] = "expert_used_count"
    if tiny.windowed:
        keys.append("attention.sliding_window")
    for key in (f"{architecture}.{name}" for name in keys):
        with pytest.raises(ModelFileError, match=key) as caught:
            load(Changed(path, {key: None}), NumpyBackend())
        assert caught.value.param == key
    for name in ("blk.1.attn_norm.weight", "blk.2.attn_output.weight", "output_norm.weight"):
        with pytest.raises(ModelFileError, match=name):
            load(Changed(path, without=(name,)), NumpyBackend())


@each
def test_identity_follows_what_changes_keys_and_values(tmp_path: Path, tiny: Tiny) -> None:
    path, architecture = write(tiny, tmp_path), ARCHITECTURES[tiny.family]
    plain = load(path, NumpyBackend()).identity()
    assert load(path, NumpyBackend()).identity() == plain
    changes: dict[str, object] = {"rope.freq_base": 5e4, "attention.layer_norm_rms_epsilon": 1e-3}
    if tiny in MIXTURES:
        changes["expert_used_count"] = 4
    if tiny.windowed:
        changes["attention.sliding_window"] = 5
    for name, value in changes.items():
        assert load(Changed(path, {f"{architecture}.{name}": value}), NumpyBackend()).identity() != plain
    longer = load(Changed(path, {f"{architecture}.context_length": 99}), NumpyBackend())
    assert longer.identity() == plain and longer.geometry.context == 99


@pytest.mark.parametrize("name, full, window", [("gemma3", 1, 2), ("gpt_oss", 1, 2)])
def test_layers_with_a_window_have_pages_of_their_own(tmp_path: Path, name: str, full: int, window: int) -> None:
    layouts = load(write(BY_NAME[name], tmp_path), NumpyBackend()).layouts("f16", 16)
    assert [(layout.kind, len(layout.layers)) for layout in layouts] == [("full", full), ("window", window)]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_nothing_before_a_window_is_read_by_its_layers(tmp_path: Path, name: str) -> None:
    """Another beginning changes only what the full layers saw of it: with windows everywhere, nothing."""
    path, architecture = write(BY_NAME[name], tmp_path), ARCHITECTURES[name]
    everywhere = Changed(path, {f"{architecture}.attention.sliding_window_pattern": 0})
    other = np.concatenate([TOKENS[:20][::-1], TOKENS[20:]])
    for source, same in ((everywhere, True), (Changed(path), False)):
        backend = NumpyBackend()
        run = ModelRunner(load(source, backend), backend, sequences=2, length=128, page_tokens=8)
        # Three layers, each of which sees at most twelve positions back, reach 36 positions back.
        difference = np.abs(run.logits(TOKENS)[-30:] - run.logits(other)[-30:]).max()
        assert (difference < 1e-5) == same


def test_a_pattern_may_name_each_layer(tmp_path: Path) -> None:
    path = write(BY_NAME["gemma3"], tmp_path)
    expected = runner(path).logits(TOKENS)
    key, backend = "gemma3.attention.sliding_window_pattern", NumpyBackend()
    named = load(Changed(path, {key: np.array([True, True, False])}), backend)
    assert np.array_equal(ModelRunner(named, backend, length=128, page_tokens=8).logits(TOKENS), expected)
    with pytest.raises(ModelFileError, match=key):
        load(Changed(path, {key: np.array([True, False])}), NumpyBackend())


def test_attention_scores_of_gemma_are_capped_where_the_file_says_so(tmp_path: Path) -> None:
    path = write(BY_NAME["gemma3"], tmp_path)
    backend = NumpyBackend()
    capped = load(Changed(path, {"gemma3.attn_logit_softcapping": 0.5}), backend)
    found = ModelRunner(capped, backend, length=128, page_tokens=8).logits(TOKENS)
    assert np.abs(found - runner(path).logits(TOKENS)).max() > 1e-2


def test_latent_attention_keeps_one_row_for_all_heads(tmp_path: Path) -> None:
    tiny = BY_NAME["deepseek_v3"]
    (layout,) = load(write(tiny, tmp_path), NumpyBackend()).layouts("f16", 16)
    width = tiny.config["kv_lora_rank"] + tiny.config["qk_rope_head_dim"]
    assert [(p.name, p.heads, p.width) for p in layout.layers[0]] == [("k", 1, width)]


def test_ways_of_choosing_experts_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = write(BY_NAME["deepseek_v3"], tmp_path)
    for changes in ({"expert_gating_func": 9}, {"expert_gating_func": 1}, {"expert_group_count": 3}):
        with pytest.raises(UnsupportedModel, match=r"deepseek2\.expert_"):
            load(Changed(path, {f"deepseek2.{name}": value for name, value in changes.items()}), NumpyBackend())


@each_mixture
def test_more_experts_for_a_row_than_there_are_is_an_error(tmp_path: Path, tiny: Tiny) -> None:
    key = f"{ARCHITECTURES[tiny.family]}.expert_used_count"
    with pytest.raises(ModelFileError, match=key):
        load(Changed(write(tiny, tmp_path), {key: EXPERTS + 1}), NumpyBackend())


@each_mixture
def test_experts_are_fetched_before_they_are_used(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, object, Any]] = []

    class Watching(NumpyBackend):
        def mixture(self, x: Any, ids: Any, weights: Any, experts: Any, spec: Any) -> Any:
            events.append(("use", id(experts), ids))
            return super().mixture(x, ids, weights, experts, spec)

    fetch = ResidentExperts.fetch

    def watch(self: ResidentExperts, layer: int, ids: np.ndarray) -> Any:
        handle = fetch(self, layer, ids)
        events.append(("fetch", id(handle), ids))
        return handle

    monkeypatch.setattr(ResidentExperts, "fetch", watch)
    runner(write(tiny, tmp_path), Watching()).logits(TOKENS[:9])
    layers = tiny.config["num_hidden_layers"] - tiny.config.get("first_k_dense_replace", 0)
    assert [kind for kind, _, _ in events] == ["fetch", "use"] * layers
    for (_, fetched, ids), (_, used, same) in zip(events[::2], events[1::2], strict=True):
        assert fetched == used and np.array_equal(ids, same)


def test_sinks_take_from_what_is_attended(tmp_path: Path) -> None:
    path, backend = write(BY_NAME["gpt_oss"], tmp_path), NumpyBackend()
    source = Changed(path)
    raised = source.tensors["blk.1.attn_sinks.weight"].dequantise() + np.float32(3)
    assert raised.shape == (HEADS,)
    source.tensors["blk.1.attn_sinks.weight"] = _with(source.tensors["blk.1.attn_sinks.weight"], raised)
    found = ModelRunner(load(source, backend), backend, length=128, page_tokens=8).logits(TOKENS)
    assert np.abs(found - runner(path).logits(TOKENS)).max() > 1e-2


def _with(tensor: Any, values: np.ndarray) -> Any:
    return type(tensor)(tensor.name, tensor.shape, "F32", values.astype("<f4").view(np.uint8))
