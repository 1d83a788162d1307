"""What one page holds, byte by byte.

A page is ``page_tokens`` consecutive positions of one sequence: the cached rows of *all* layers of one kind, in one
contiguous block. The layout is the only place that knows offsets; backends, levels and the on-disk format read it.

Within a page the order is layer, then part (K, V, scales), then head, then position, so that the rows of one head are
consecutive in memory. Each part starts at a multiple of 64 bytes, and the page's size is a multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from strata_core.errors import SettingsError

ALIGNMENT = 64

#: K/V types: name -> (dtype of the stored elements, whether a float32 scale per head and position goes with them).
#: bfloat16 is held as its upper 16 bits; numpy has no type of that name.
KV_TYPES: dict[str, tuple[np.dtype, bool]] = {
    "f32": (np.dtype("<f4"), False),
    "f16": (np.dtype("<f2"), False),
    "bf16": (np.dtype("<u2"), False),
    "int8": (np.dtype("<i1"), True),
}


@attrs.frozen
class Part:
    """One array of a layer within a page: shape ``(heads, page_tokens, width)``, at ``offset`` bytes of the page."""

    name: str
    heads: int
    width: int
    dtype: np.dtype
    offset: int

    def nbytes(self, page_tokens: int) -> int:
        return self.heads * page_tokens * self.width * self.dtype.itemsize


@attrs.frozen
class PageLayout:
    """The parts of every layer in a page. Build it with :meth:`attention` or :meth:`state`.

    :ivar kind: name of the pool these pages live in (``full`` for attention over all positions).
    :ivar kv_type: a key of :data:`KV_TYPES`.
    :ivar nbytes: bytes of one page.
    """

    kind: str
    kv_type: str
    page_tokens: int
    layers: tuple[tuple[Part, ...], ...]
    nbytes: int

    @classmethod
    def attention(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        kv_type: str,
        page_tokens: int,
        value_dim: int | None = None,
        latent: bool = False,
        index_dim: int | None = None,
        kind: str = "full",
    ) -> PageLayout:
        """Layout of ``layers`` equal attention layers.

        :param value_dim: width of a V row, where it is not ``head_dim``.
        :param latent: there are no V rows; values are the beginnings of keys.
        :param index_dim: width of the keys that an indexer chooses positions by; they are the last part of a layer, one
            head, float32 where the K/V type is f32 and float16 otherwise. None where there is no indexer.
        :raises SettingsError: unknown K/V type, or a page size that is not a power of two.
        """
        if kv_type not in KV_TYPES:
            raise SettingsError(f"unknown K/V type {kv_type!r}; known: {', '.join(KV_TYPES)}", param="kv")
        if page_tokens < 1 or page_tokens & (page_tokens - 1):
            raise SettingsError(f"page_tokens must be a power of two, not {page_tokens}", param="page_tokens")
        dtype, scaled = KV_TYPES[kv_type]
        rows = [("k", kv_heads, head_dim, dtype)]
        if not latent:
            rows.append(("v", kv_heads, value_dim or head_dim, dtype))
        if scaled:
            rows += [(f"{name}_scale", kv_heads, 1, np.dtype("<f4")) for name, _, _, _ in rows]
        if index_dim is not None:
            rows.append(("index", 1, index_dim, np.dtype("<f4" if kv_type == "f32" else "<f2")))
        offset, built = 0, []
        for _ in range(layers):
            parts = []
            for name, heads, width, element in rows:
                part = Part(name, heads, width, element, offset)
                parts.append(part)
                offset = _aligned(offset + part.nbytes(page_tokens))
            built.append(tuple(parts))
        return cls(kind, kv_type, page_tokens, tuple(built), offset)

    @classmethod
    def state(cls, parts: Sequence[tuple[str, int, int]]) -> PageLayout:
        """Layout of the recurrent state of all layers at one position: a page is one state.

        :param parts: name, heads and float32 elements per head of each state, in the order of their numbers.
        """
        offset, built = 0, []
        for name, heads, width in parts:
            part = Part(name, heads, width, np.dtype("<f4"), offset)
            built.append((part,))
            offset = _aligned(offset + part.nbytes(1))
        return cls("state", "f32", 1, tuple(built), offset)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return math.ceil(tokens / self.page_tokens)

    def view(self, pages: np.ndarray, layer: int, part: int) -> np.ndarray:
        """One part of one layer in a stack of pages.

        :param pages: uint8 array of shape ``(n, nbytes)``, C-contiguous.
        :returns: a view ``(n, heads, page_tokens, width)`` in the part's dtype; writing to it writes the pages.
        """
        p = self.layers[layer][part]
        block = pages[:, p.offset : p.offset + p.nbytes(self.page_tokens)]
        return block.view(p.dtype).reshape(len(pages), p.heads, self.page_tokens, p.width)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
