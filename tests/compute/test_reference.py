"""What only the numpy reference promises."""

from __future__ import annotations

import numpy as np
import pytest

from strata_core.compute.base import BackendOptions
from strata_core.compute.reference import NumpyBackend
from strata_core.compute.reference.kv import decode, encode
from strata_core.errors import BackendError
from strata_core.memory.arena import PortableArena
from strata_core.plugins import Plugins
from strata_core.pool.layout import PageLayout
from strata_core.testing import formulas
from strata_core.testing.backend_kit import random_rows, stored


def test_every_half_is_decoded_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.empty(len(halves), np.float32)
    decode("f16", halves, None, out)
    assert out.tobytes() == halves.astype(np.float32).tobytes()


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000], np.uint32)
    rows = bits.view(np.float32).reshape(1, 1, -1)
    codes, scales = encode("bf16", rows)
    assert scales is None
    assert codes.ravel().tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80]
    assert encode("bf16", np.array([[[np.nan]]], np.float32))[0].item() == 0x7FC0


def test_bf16_equals_the_formula_on_random_numbers() -> None:
    rows = random_rows(1, 50, 2, 16)
    out = np.empty_like(rows)
    decode("bf16", encode("bf16", rows)[0], None, out)
    assert np.array_equal(out, formulas.through("bf16", rows))


def test_int8_uses_the_whole_range_and_keeps_zeros() -> None:
    rows = np.array([[[-4.0, 2.0, 0.01]], [[0.0, 0.0, 0.0]]], np.float32)
    codes, scales = encode("int8", rows)
    assert codes.tolist() == [[[-127, 64, 0]], [[0, 0, 0]]]
    assert scales is not None and np.allclose(scales.ravel(), [4 / 127, 0])


def test_weights_are_kept_as_float32_until_the_budget_is_used() -> None:
    backend = NumpyBackend(keep_bytes=2 * 32 * 32 * 4)
    for held in (1, 2, 2, 2):
        backend.matrix(stored(random_rows(1, 32, 32), "Q8_0"))
        assert backend.weight_bytes() == held * 32 * 32 * 4


def test_an_embedding_table_is_not_dequantised() -> None:
    backend = NumpyBackend()
    backend.table(stored(random_rows(1, 32, 32), "Q8_0"))
    assert backend.weight_bytes() == 0


def test_a_page_of_an_absent_chunk_is_an_error_and_not_other_memory() -> None:
    layout = PageLayout.attention(layers=1, kv_heads=1, head_dim=16, kv_type="f32", page_tokens=4)
    store = NumpyBackend().page_store(layout, 4, PortableArena("off"))
    store.add_chunk(1)
    for misuse in (
        lambda: store.copy(0, 4),
        lambda: store.copy(4, 8),
        lambda: store.drop_chunk(0),
        lambda: store.add_chunk(1),
        lambda: store.host_view(-1),
    ):
        with pytest.raises(BackendError, match="chunk"):
            misuse()


def test_the_reference_is_registered_as_the_last_choice() -> None:
    factory = Plugins.load(environ={}, entry_points=[]).backends()["numpy"]
    assert factory.priority == 0
    assert factory.probe().usable and "MiB" in factory.probe().detail
    assert isinstance(factory.create(BackendOptions(threads=1)), NumpyBackend)
