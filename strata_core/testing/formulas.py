"""What backends are compared with: the contract's formulas, written as plainly as possible in float64.

Nothing here is shared with the reference backend, which is compared with these like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, ExpertSpec, Indexer, Rotation, Router

Doubles = NDArray[np.float64]


def rms_norm(x: NDArray[Any], weight: NDArray[Any], eps: float) -> Doubles:
    groups = np.asarray(x, np.float64).reshape(-1, len(weight))
    normed = groups / np.sqrt((groups**2).mean(axis=1, keepdims=True) + eps) * weight
    return np.asarray(normed, np.float64).reshape(x.shape)


def activation(name: str, x: NDArray[Any]) -> Doubles:
    x = np.asarray(x, np.float64)
    if name in ("silu", "sigmoid"):
        sigmoid = 0.5 * (1 + np.tanh(x / 2))  # without an exp that overflows
        return np.asarray(x * sigmoid if name == "silu" else sigmoid)
    if name == "softplus":
        return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
    if name == "relu":
        return np.asarray(np.where(x > 0, x, 0.0))
    if name == "tanh":
        return np.asarray(np.tanh(x))
    if name == "signed_root":
        return np.asarray(np.sign(x) * np.sqrt(np.maximum(np.abs(x), 1e-6)))
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def rope(x: NDArray[Any], positions: NDArray[Any], rotation: Rotation, heads: int) -> Doubles:
    """One pair at a time."""
    rows, width = x.shape
    out = np.asarray(x, np.float64).reshape(rows, heads, width // heads).copy()
    for pair, frequency in enumerate(rotation.inverse_frequencies):
        i, j = (2 * pair, 2 * pair + 1) if rotation.interleaved else (pair, pair + rotation.rotated // 2)
        angle = (positions.astype(np.float32) * np.float32(frequency)).astype(np.float64)[:, None]
        a, b = out[:, :, i].copy(), out[:, :, j].copy()
        out[:, :, i] = rotation.magnitude * (a * np.cos(angle) - b * np.sin(angle))
        out[:, :, j] = rotation.magnitude * (a * np.sin(angle) + b * np.cos(angle))
    return np.asarray(out.reshape(rows, width))


def through(kv_type: str, rows: NDArray[np.float32]) -> Doubles:
    """Rows ``(..., width)`` after being stored in a K/V type."""
    if kv_type == "f16":
        return np.asarray(rows.astype(np.float16), np.float64)
    if kv_type == "bf16":
        low = rows.view(np.uint32) & np.uint32(0xFFFF0000)  # toward zero
        down = low.view(np.float32).astype(np.float64)
        up = (low + np.uint32(0x10000)).view(np.float32).astype(np.float64)  # away from zero
        exact = rows.astype(np.float64)
        nearer_up, tie = np.abs(up - exact) < np.abs(exact - down), np.abs(up - exact) == np.abs(exact - down)
        odd = (low >> 16) % 2 == 1
        return np.asarray(np.where(nearer_up | (tie & odd), up, down))
    if kv_type == "int8":
        scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
        return np.asarray(np.round(rows / np.where(scale > 0, scale, 1)) * scale, np.float64)
    return np.asarray(rows, np.float64)


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    start: int,
    spec: AttentionSpec,
    sinks: NDArray[Any] | None = None,
) -> Doubles:
    """Attention of one sequence, one row and one head at a time.

    :param q: ``(rows, heads, head_dim)`` at positions ``start ..``.
    :param k: ``(positions, kv_heads, head_dim)``; :param v: ``(positions, kv_heads, value_dim)``; all from position 0.
    :param sinks: ``(heads,)`` or None.
    :returns: ``(rows, heads * value_dim)``.
    """
    out = np.zeros((len(q), spec.heads, spec.value_dim))
    for row in range(len(q)):
        position = start + row
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.heads):
            shared = head // (spec.heads // spec.kv_heads)
            scores = spec.scale * (k[first : position + 1, shared] @ q[row, head].astype(np.float64))
            if spec.softcap is not None:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            rest = -np.inf if sinks is None else float(sinks[head])
            highest = max(scores.max(), rest)
            weights = np.exp(scores - highest)
            out[row, head] = weights @ v[first : position + 1, shared] / (weights.sum() + np.exp(rest - highest))
    return out.reshape(len(q), -1)


def l2_norm(x: NDArray[Any], width: int, eps: float) -> Doubles:
    groups = np.asarray(x, np.float64).reshape(-1, width)
    return np.asarray(groups / np.sqrt((groups**2).sum(axis=1, keepdims=True) + eps)).reshape(x.shape)


def route(logits: Doubles, router: Router, correction: NDArray[Any] | None) -> Doubles:
    """The weight of every expert for every row, 0 for those that are not chosen: ``(rows, experts)``.

    :param logits: of the router, its bias included; :param correction: its numbers.
    """
    out = np.zeros_like(logits)
    for row, values in enumerate(logits):
        exponentials = np.exp(values - values.max())
        scores = values
        if router.scoring == "sigmoid":
            scores = activation("sigmoid", values)
        elif router.scoring == "softmax":
            scores = exponentials / exponentials.sum()
        ranked = list(scores if correction is None else scores + correction)
        size = len(values) // router.groups
        if router.groups > 1:
            best = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(router.groups)]
            taking_part = sorted(range(router.groups), key=lambda g: -best[g])[: router.top_groups]
            ranked = [score if i // size in taking_part else -np.inf for i, score in enumerate(ranked)]
        chosen = sorted(range(len(values)), key=lambda i: -ranked[i])[: router.top]  # stable: the lower id first
        weights = exponentials[chosen] if router.scoring == "softmax_top" else scores[chosen]
        if router.normalise or router.scoring == "softmax_top":
            weights = weights / weights.sum()
        out[row, chosen] = weights * router.scale
    return out


def expert(gate: Doubles, up: Doubles, spec: ExpertSpec) -> Doubles:
    """What stands between an expert's two products."""
    if spec.activation != "swiglu_oai":
        return activation(spec.activation, gate) * up
    gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
    return np.asarray(gate * activation("sigmoid", 1.702 * gate) * (up + 1))


def causal_conv(x: NDArray[Any], weight: NDArray[Any], dilation: int) -> Doubles:
    """Of one sequence from its beginning, one position and tap at a time: ``(positions, channels)``."""
    out = np.zeros(x.shape)
    kernel = weight.shape[1]
    for position in range(len(x)):
        for tap in range(kernel):
            source = position - (kernel - 1 - tap) * dilation
            if source >= 0:
                out[position] += weight[:, tap].astype(np.float64) * x[source]
    return out


def gated_delta(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], decay: NDArray[Any], beta: NDArray[Any]
) -> tuple[Doubles, Doubles]:
    """Of one sequence from its beginning, one position and value head at a time.

    :param q: ``(positions, key_heads, key_dim)``; :param k: the same.
    :param v: ``(positions, value_heads, value_dim)``.
    :param decay: ``(positions, value_heads)``; :param beta: the same.
    :returns: ``(positions, value_heads * value_dim)``, and the last state ``(value_heads, key_dim, value_dim)``.
    """
    heads, per = v.shape[1], v.shape[1] // k.shape[1]
    state = np.zeros((heads, k.shape[2], v.shape[2]))
    out = np.zeros(v.shape)
    for position in range(len(v)):
        for head in range(heads):
            key, query = (x[position, head // per].astype(np.float64) for x in (k, q))
            s = np.exp(np.float64(decay[position, head])) * state[head]
            state[head] = s + np.outer(key, beta[position, head] * (v[position, head] - key @ s))
            out[position, head] = query @ state[head]
    return out.reshape(len(v), -1), state


def chosen_positions(
    index_q: NDArray[Any], index_k: NDArray[Any], position: int, indexer: Indexer, key_norm: NDArray[Any]
) -> list[int]:
    """What a row of sparse attention attends.

    :param index_q: ``(heads, dim)`` of the row; :param index_k: ``(positions, dim)``.
    """
    size = indexer.block
    blocks = (position + 1) // size
    scores = []
    for block in range(blocks):
        mean = index_k[block * size : (block + 1) * size].astype(np.float64).mean(axis=0, keepdims=True)
        key = rope(rms_norm(mean, key_norm, indexer.eps), np.array([block * size]), indexer.rotation, 1)[0]
        scores.append(np.maximum(index_q.astype(np.float64) @ key, 0).sum() / np.sqrt(indexer.dim))
    best = sorted(range(blocks), key=lambda block: (-scores[block], block))[: indexer.top]
    inside = [block * size + i for block in sorted(best) for i in range(size)]
    return inside + list(range(blocks * size, position + 1))
