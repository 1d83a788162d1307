"""Descriptions of layers as kernels take them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import AttentionSpec, Decoder, DecoderLayer, Rotation
from strata_core.pool.layout import PageLayout

from . import library as native
from .pages import CpuPageStore


def rotation_struct(rotation: Rotation) -> native.Rotation:
    """Valid as long as the rotation."""
    frequencies = rotation.inverse_frequencies
    if frequencies.dtype != np.float32 or not frequencies.flags.c_contiguous:
        raise TypeError("inverse frequencies are a contiguous float32 array")
    return native.Rotation(rotation.rotated, rotation.interleaved, rotation.magnitude, frequencies.ctypes.data)


def attention_struct(
    spec: AttentionSpec, layer: tuple[int, int], layout: PageLayout, sinks: NDArray[np.float32] | None = None
) -> native.Attention:
    """How layer number ``layer[1]`` of a layout is attended. Valid as long as the sinks, a contiguous array."""
    offsets = [part.offset for part in layout.layers[layer[1]]]
    offsets += [0] * (4 - len(offsets))  # no scales
    return native.Attention(
        layer[0],
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.value_dim,
        spec.window or 0,
        spec.scale,
        spec.softcap or 0.0,
        *offsets,
        None if sinks is None else sinks.ctypes.data,
    )


class NativeDecoder:
    """A decoder as kernels take it, made once for each set of page layouts."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self._made: tuple[tuple[PageLayout, ...], native.Decoder] | None = None
        self._rotations: dict[int, native.Rotation] = {}
        self.vocabulary: int = decoder.output.edges[-1]

    def struct(self, stores: Sequence[CpuPageStore]) -> native.Decoder:
        layouts = tuple(store.layout for store in stores)
        if self._made is None or any(a is not b for a, b in zip(self._made[0], layouts, strict=True)):
            self._made = layouts, self._make(layouts)
        return self._made[1]

    def _make(self, layouts: Sequence[PageLayout]) -> native.Decoder:
        d = self._decoder
        layers = (native.Layer * len(d.layers))(*(self._layer(layer, layouts) for layer in d.layers))
        output = ctypes.pointer(d.output.struct)
        return native.Decoder(len(d.layers), layers, d.norm.ctypes.data, d.eps, output)

    def _layer(self, layer: DecoderLayer, layouts: Sequence[PageLayout]) -> native.Layer:
        rotation = self._rotations.setdefault(id(layer.rotation), rotation_struct(layer.rotation))
        return native.Layer(
            attention_norm=layer.attention_norm.ctypes.data,
            qkv=ctypes.pointer(layer.qkv.with_biases(layer.qkv_biases)),
            q_norm=None if layer.q_norm is None else layer.q_norm.ctypes.data,
            k_norm=None if layer.k_norm is None else layer.k_norm.ctypes.data,
            rotation=ctypes.pointer(rotation),
            attention=attention_struct(layer.spec, layer.cache, layouts[layer.cache[0]]),
            output=ctypes.pointer(layer.output.with_biases((layer.output_bias,))),
            ffn_norm=layer.ffn_norm.ctypes.data,
            gate_up=ctypes.pointer(layer.gate_up.struct),
            down=ctypes.pointer(layer.down.struct),
            eps=layer.eps,
            activation=native.ACTIVATIONS.index(layer.activation),
        )
