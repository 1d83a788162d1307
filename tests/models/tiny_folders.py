"""Tiny random models as Hugging Face folders, written without torch: what both loaders read, ours and theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from safetensors.numpy import save_file

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, EXPERT_FFN = 96, 32, 4, 2, 16, 48, 8, 32

Shapes = dict[str, tuple[int, ...]]

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@attrs.frozen
class Tiny:
    """A family's smallest model with everything that makes the family.

    :ivar family: a name that ``strata_register_families`` registers.
    :ivar config: of ``config.json``.
    :ivar windowed: it has layers that attend a window, shorter than the tests' prompts.
    """

    name: str
    family: str
    config: dict[str, Any]
    windowed: bool = False


def _tiny(name: str, family: str, model_type: str, windowed: bool = False, **config: Any) -> Tiny:
    return Tiny(name, family, {**_COMMON, "model_type": model_type, **config}, windowed)


_DEEPSEEK = dict(
    intermediate_size=FFN, moe_intermediate_size=EXPERT_FFN, n_routed_experts=EXPERTS, n_shared_experts=2,
    num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
    kv_lora_rank=24, q_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    num_key_value_heads=HEADS, num_nextn_predict_layers=0,
)  # fmt: skip
_GEMMA = dict(
    intermediate_size=FFN, head_dim=HEAD_DIM, hidden_activation="gelu_pytorch_tanh", sliding_window=13,
    query_pre_attn_scalar=24, tie_word_embeddings=True,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)  # fmt: skip
_MOE = dict(
    intermediate_size=FFN, head_dim=HEAD_DIM, num_experts=EXPERTS, num_experts_per_tok=2,
    moe_intermediate_size=EXPERT_FFN, norm_topk_prob=True,
)  # fmt: skip
_OSS = dict(
    intermediate_size=EXPERT_FFN, head_dim=HEAD_DIM, num_local_experts=EXPERTS, num_experts_per_tok=2,
    sliding_window=11, rope_parameters={**_YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
)  # fmt: skip

TINIES = (
    _tiny("llama", "llama", "llama", intermediate_size=FFN, head_dim=HEAD_DIM),
    _tiny("qwen2", "qwen2", "qwen2", intermediate_size=FFN),
    _tiny("qwen2-tied-yarn", "qwen2", "qwen2", intermediate_size=FFN, tie_word_embeddings=True, rope_parameters=_YARN),
    _tiny("qwen3", "qwen3", "qwen3", intermediate_size=FFN, head_dim=HEAD_DIM),
    _tiny("qwen3_moe", "qwen3_moe", "qwen3_moe", **_MOE),
    _tiny("qwen3_moe-unnormalised", "qwen3_moe", "qwen3_moe", **{**_MOE, "norm_topk_prob": False}),
    _tiny("gemma3", "gemma3", "gemma3_text", True, **_GEMMA, final_logit_softcapping=4.0),
    _tiny(
        "gemma3-long", "gemma3", "gemma3_text", True, **_GEMMA,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        },
    ),
    _tiny("gpt_oss", "gpt_oss", "gpt_oss", True, **_OSS),
    _tiny("deepseek_v3", "deepseek_v3", "deepseek_v3", **_DEEPSEEK),
    _tiny(
        "deepseek_v3-yarn", "deepseek_v3", "deepseek_v3",
        **_DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    _tiny(
        "deepseek_v3-yarn-of-two", "deepseek_v3", "deepseek_v3",
        **_DEEPSEEK | {"norm_topk_prob": False},
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
)  # fmt: skip


def write(tiny: Tiny, path: Path, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors``; equal arguments give equal numbers."""
    random = np.random.default_rng(seed)
    tensors = {name: _numbers(random, name, shape, tiny.family) for name, shape in shapes(tiny.config).items()}
    path.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [_CLASSES[tiny.config["model_type"]]], "dtype": "float32", **tiny.config}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip


def _numbers(random: np.random.Generator, name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    """Gains make what layers add outweigh what it is added to: a fault anywhere in the context changes the logits."""
    if name.endswith("norm.weight"):
        low, high = (-0.5, 0.5) if family == "gemma3" else (0.5, 1.5)  # gemma's files leave one out
        return random.uniform(low, high, shape).astype(np.float32)
    numbers = random.standard_normal(shape, np.float32)
    if name.endswith(("bias", "sinks")):
        return numbers * np.float32(0.5)
    inputs = shape[-2] if len(shape) == 3 else shape[-1]  # gpt-oss stores (experts, in, out)
    return numbers * np.float32(1.5 / np.sqrt(inputs))


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of a model's tensors, as published models name them."""
    out: Shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCAB, WIDTH)
    for number in range(config["num_hidden_layers"]):
        layer = _norms(config) | _attention(config) | _feed_forward(config, number)
        out |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return out


def _norms(config: Mapping[str, Any]) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (WIDTH,) for name in names}


def _attention(config: Mapping[str, Any]) -> Shapes:
    kind = config["model_type"]
    if kind == "deepseek_v3":
        return _latent_attention(config)
    head_dim = config.get("head_dim", WIDTH // HEADS)
    rows = {"q_proj": HEADS * head_dim, "k_proj": KV_HEADS * head_dim, "v_proj": KV_HEADS * head_dim}
    out: Shapes = {f"self_attn.{name}.weight": (n, WIDTH) for name, n in rows.items()}
    out["self_attn.o_proj.weight"] = (WIDTH, HEADS * head_dim)
    if kind in ("qwen2", "gpt_oss"):
        out |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    if kind == "gpt_oss":
        out |= {"self_attn.o_proj.bias": (WIDTH,), "self_attn.sinks": (HEADS,)}
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        out |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return out


def _latent_attention(config: Mapping[str, Any]) -> Shapes:
    rank, rotated, plain = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value, query = config["v_head_dim"], config["q_lora_rank"]
    queries = HEADS * (plain + rotated)
    out: Shapes = {
        "kv_a_proj_with_mqa": (rank + rotated, WIDTH),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (HEADS * (plain + value), rank),
        "o_proj": (WIDTH, HEADS * value),
    }
    if query is None:
        out["q_proj"] = (queries, WIDTH)
    else:
        out |= {"q_a_proj": (query, WIDTH), "q_a_layernorm": (query,), "q_b_proj": (queries, query)}
    return {f"self_attn.{name}.weight": shape for name, shape in out.items()}


def _feed_forward(config: Mapping[str, Any], number: int) -> Shapes:
    kind = config["model_type"]
    if kind == "gpt_oss":
        return {
            "mlp.router.weight": (EXPERTS, WIDTH),
            "mlp.router.bias": (EXPERTS,),
            "mlp.experts.gate_up_proj": (EXPERTS, WIDTH, 2 * EXPERT_FFN),
            "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * EXPERT_FFN),
            "mlp.experts.down_proj": (EXPERTS, EXPERT_FFN, WIDTH),
            "mlp.experts.down_proj_bias": (EXPERTS, WIDTH),
        }
    if kind not in ("qwen3_moe", "deepseek_v3") or number < config.get("first_k_dense_replace", 0):
        return _gated("mlp", FFN)
    out: Shapes = {"mlp.gate.weight": (EXPERTS, WIDTH)}
    for expert in range(EXPERTS):
        out |= _gated(f"mlp.experts.{expert}", EXPERT_FFN)
    if kind == "deepseek_v3":
        out["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        out |= _gated("mlp.shared_experts", EXPERT_FFN * config["n_shared_experts"])
    return out


def _gated(prefix: str, ffn: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (ffn, WIDTH),
        f"{prefix}.up_proj.weight": (ffn, WIDTH),
        f"{prefix}.down_proj.weight": (WIDTH, ffn),
    }
