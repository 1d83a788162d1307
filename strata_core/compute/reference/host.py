"""Operations on float32 numpy arrays that no backend of the host's memory needs to do otherwise: written once for all.

A backend whose arrays are ``numpy.ndarray`` and whose pages are a :class:`NumpyPageStore` derives from
:class:`HostBackend` and overrides what it does better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from strata_core.compute.base import Backend
from strata_core.compute.reference import indexed, mixture, recurrent
from strata_core.compute.reference.kv import Floats
from strata_core.errors import BackendError

#: Elements that an elementwise operation works on at a time, so that its temporaries stay in the second-level cache.
PIECE = 128 * 1024


class HostBackend(mixture.HostMixture, recurrent.HostRecurrent, indexed.HostIndexed, Backend):
    """See the module's docstring."""

    def add(self, x: Floats, y: Floats) -> Floats:
        x += y
        return x

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        return self.multiply(self.activate(gate, activation), up)

    def activate(self, x: Floats, activation: str) -> Floats:
        function = ACTIVATIONS.get(activation)
        if function is None:
            raise BackendError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        x = np.ascontiguousarray(x)
        flat = x.reshape(-1)
        for a in range(0, len(flat), PIECE):
            function(flat[a : a + PIECE])
        return x

    def multiply(self, x: Floats, y: Floats) -> Floats:
        groups = y.shape[-1]
        if groups == x.shape[1]:
            x *= y
            return x
        out: Floats = x.reshape(len(x), groups, -1) * y[..., None]
        return out.reshape(x.shape)

    def shift(self, x: Floats, vector: Floats) -> Floats:
        x += vector
        return x

    def scale(self, x: Floats, factor: float) -> Floats:
        x *= np.float32(factor)
        return x

    def split(self, x: Floats, widths: Sequence[int], heads: int = 1) -> tuple[Floats, ...]:
        grouped = x.reshape(len(x), heads, sum(widths))
        edges = np.cumsum([0, *widths])
        return tuple(grouped[:, :, a:b].reshape(len(x), heads * (b - a)) for a, b in pairwise(edges))

    def join(self, parts: Sequence[Floats], heads: int = 1) -> Floats:
        rows = len(parts[0])
        grouped = [part.reshape(rows, heads, -1) for part in parts]
        out: Floats = np.concatenate(grouped, axis=2).reshape(rows, -1)
        return out

    def repeat(self, x: Floats, times: int) -> Floats:
        return np.tile(x, (1, times))

    def fold(self, x: Floats, groups: int) -> Floats:
        out: Floats = x.reshape(len(x), groups, -1).sum(axis=1)
        return out

    def group_norm(self, x: Floats, weight: Floats, groups: int, eps: float) -> Floats:
        ones = np.ones(x.shape[1] // groups, np.float32)
        out: Floats = self.rms_norm(x, ones, eps)
        out *= weight
        return out

    def group_dot(self, x: Floats, y: Floats, groups: int) -> Floats:
        shape = len(x), groups, x.shape[1] // groups
        out: Floats = np.einsum("rgi,rgi->rg", x.reshape(shape), y.reshape(shape))
        return out

    def l2_norm(self, x: Floats, width: int, eps: float) -> Floats:
        groups = x.reshape(-1, width)
        norm = np.einsum("ij,ij->i", groups, groups)
        norm += np.float32(eps)
        np.sqrt(norm, out=norm)
        out: Floats = (groups / norm[:, None]).reshape(x.shape)
        return out

    def head_linear(self, x: Floats, weight: Floats) -> Floats:
        heads, _, width = weight.shape
        per_head = x.reshape(len(x), heads, width).swapaxes(0, 1)
        out: Floats = np.matmul(per_head, weight.swapaxes(1, 2)).swapaxes(0, 1).reshape(len(x), -1)
        return out


def _sigmoid(x: Floats) -> None:
    """``1 / (1 + exp(-x))``, by way of ``tanh``, which overflows for no argument."""
    x *= np.float32(0.5)
    np.tanh(x, out=x)
    x += np.float32(1)
    x *= np.float32(0.5)


def _silu(x: Floats) -> None:
    """``x / (1 + exp(-x))``."""
    divisor = np.negative(x)
    with np.errstate(over="ignore"):  # exp(-x) = inf gives 0, the limit
        np.exp(divisor, out=divisor)
    divisor += np.float32(1)
    x /= divisor


def _gelu_tanh(x: Floats) -> None:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`` (Hendrycks & Gimpel 2016)."""
    inner = x * x
    inner *= np.float32(0.044715)
    inner += np.float32(1)
    inner *= x
    inner *= np.float32(np.sqrt(2 / np.pi))
    np.tanh(inner, out=inner)
    inner += np.float32(1)
    x *= inner
    x *= np.float32(0.5)


def _softplus(x: Floats) -> None:
    """``log(1 + exp(x))``."""
    np.logaddexp(x, np.float32(0), out=x)


def _signed_root(x: Floats) -> None:
    """``sign(x) * sqrt(max(|x|, 1e-6))``."""
    sign = np.sign(x)
    np.abs(x, out=x)
    np.maximum(x, np.float32(1e-6), out=x)
    np.sqrt(x, out=x)
    x *= sign


ACTIVATIONS: dict[str, Callable[[Floats], object]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "relu": lambda x: np.maximum(x, 0, out=x),
    "tanh": lambda x: np.tanh(x, out=x),
    "signed_root": _signed_root,
}
