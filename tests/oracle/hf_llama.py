"""Our weights in a ``transformers`` model: what the reference backend is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from strata_core.weights.gguf import GGUFFile

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(source: GGUFFile, **overrides: Any) -> LlamaForCausalLM:
    """The file's model in float32, with the file's weights as we dequantise them.

    :param overrides: fields of ``LlamaConfig``, such as ``rope_parameters``; scaling in the file is not read here.
    """
    keys = source.metadata
    heads, width = int(keys["llama.attention.head_count"]), int(keys["llama.embedding_length"])  # type: ignore[call-overload]
    kv_heads = int(keys.get("llama.attention.head_count_kv", heads))  # type: ignore[call-overload]
    base = float(keys.get("llama.rope.freq_base", 10000.0))  # type: ignore[arg-type]
    tied = "output.weight" not in source.tensors
    fields = {
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": keys["llama.feed_forward_length"],
        "num_hidden_layers": keys["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": keys.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": keys["llama.context_length"],
        "rms_norm_eps": keys["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "tie_word_embeddings": tied,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})).eval()
    state = {}
    for name, tensor in source.tensors.items():
        values = torch.from_numpy(tensor.dequantise())
        if name == "token_embd.weight":
            state["model.embed_tokens.weight"] = values
            if tied:
                state["lm_head.weight"] = values
        elif name == "output.weight":
            state["lm_head.weight"] = values
        elif name == "output_norm.weight":
            state["model.norm.weight"] = values
        elif name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            if part in ("attn_q", "attn_k"):
                values = _halves(values, heads if part == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{_NAMES[part]}.{kind}"] = values
    model.load_state_dict(state)
    return model


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from the order of neighbouring pairs to that of two halves."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def logits(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits ``(len(tokens), vocab)``."""
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    return found


def greedy(model: LlamaForCausalLM, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` likeliest next tokens, one after the other, and how far each is ahead of the second in logits."""
    ids, cache = torch.from_numpy(prompt.astype(np.int64))[None], DynamicCache(config=model.config)
    tokens, gaps = [], []
    with torch.no_grad():
        for _ in range(count):
            best = model(ids, cache=cache, use_cache=True).logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = torch.tensor([tokens[-1:]])
    return np.array(tokens, np.int32), np.array(gaps, np.float32)
