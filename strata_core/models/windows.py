"""Which layers of a model attend all positions and which only the nearest, and where each keeps its K/V."""

from __future__ import annotations

import attrs
import numpy as np

from strata_core.models.config import DecoderConfig
from strata_core.models.keys import Keys
from strata_core.pool.layout import PageLayout


@attrs.frozen
class Windows:
    """Layers of each kind have pages of their own, as those before a window need not be kept as long as the others.

    :ivar window: how many positions a sliding layer attends, its own included.
    :ivar sliding: for each layer, whether it is one.
    """

    window: int
    sliding: tuple[bool, ...]

    @classmethod
    def read(cls, keys: Keys, layers: int, period: int) -> Windows:
        """
        :param period: every how many layers one attends everything, the last of them; where the file does not say.
        :raises ModelFileError: a key is missing or impossible.
        """
        name = "attention.sliding_window_pattern"
        pattern = keys.source.metadata.get(keys.key(name), period)
        if isinstance(pattern, int) and not isinstance(pattern, bool):
            sliding = tuple(pattern < 1 or (number + 1) % pattern != 0 for number in range(layers))
        else:
            flags = keys.source.require_key(keys.key(name), np.ndarray)
            if len(flags) != layers:
                raise keys.wrong(name, f"the model has {layers} layers")
            sliding = tuple(bool(flag) for flag in flags)
        return cls(keys.size("attention.sliding_window"), sliding)

    def of(self, layer: int) -> int | None:
        """The window of a layer; None for one that attends everything."""
        return self.window if self.sliding[layer] else None

    def cache(self, layer: int) -> tuple[int, int]:
        """(number of the page layout, number of the layer within it)."""
        kind = self.sliding[layer]
        return self._kinds().index(kind), self.sliding[:layer].count(kind)

    def layouts(self, c: DecoderConfig, kv_type: str, page_tokens: int) -> tuple[PageLayout, ...]:
        """Full attention first, where there is any."""
        return tuple(
            c.layout(self.sliding.count(kind), kv_type, page_tokens, "window" if kind else "full")
            for kind in self._kinds()
        )

    def _kinds(self) -> list[bool]:
        return sorted(set(self.sliding))
