"""Every dequantiser gives the numbers of the ``gguf`` package's, to the bit, or of the type's definition."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from strata_core.errors import UnsupportedModel
from strata_core.weights import StoredTensor
from strata_core.weights.quant import BY_CODE, TYPES, dequantise

READABLE = [kind.name for kind in TYPES.values() if kind.decode is not None]
#: float16 patterns at the edges: zeros, subnormals, one, the largest, infinities, nan.
EDGES = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00], "<u2")


def random_blocks(name: str, count: int, seed: int) -> np.ndarray:
    kind = TYPES[name]
    return np.random.default_rng(seed).integers(0, 256, (count, kind.size), dtype=np.uint8)


def few_bits(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Types that the package does not know, one element at a time; as llama.cpp dequantises them."""
    scale, out = blocks[:, :2].copy().view("<f2").astype(np.float32), []
    for place in range(16 * 8 // bits):
        code = blocks[:, 2 + place * bits // 8] >> (place * bits % 8) & (2**bits - 1)
        out.append(code.astype(np.float32) - 1 if bits == 2 else 2 * code.astype(np.float32) - 1)
    return (np.stack(out, axis=1) * scale).reshape(-1)


def oracle(name: str, blocks: np.ndarray) -> np.ndarray:
    if name in ("Q1_0", "Q2_0"):
        with np.errstate(all="ignore"):
            return few_bits(blocks, int(name[1]))
    with np.errstate(all="ignore"):
        return np.asarray(dequantize(blocks, GGMLQuantizationType[name]), np.float32).reshape(-1)


def assert_same_numbers(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    keep = ~np.isnan(ours)
    np.testing.assert_array_equal(ours[keep].view(np.uint32), theirs[keep].view(np.uint32))


@pytest.mark.parametrize("name", READABLE)
def test_random_blocks_give_the_oracles_bits(name: str) -> None:
    blocks = random_blocks(name, 700, seed=1)
    assert_same_numbers(dequantise(TYPES[name], blocks.reshape(-1)), oracle(name, blocks))


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
def test_blocks_of_one_byte_value_give_the_oracles_bits(name: str, byte: int) -> None:
    blocks = np.full((3, TYPES[name].size), byte, np.uint8)
    assert_same_numbers(dequantise(TYPES[name], blocks.reshape(-1)), oracle(name, blocks))


#: Where the float16 scales of each type lie in its block.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108]} | {
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "F16": [0], "Q1_0": [0], "Q2_0": [0],
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scales_at_the_edges_of_float16_give_the_oracles_bits(name: str) -> None:
    blocks = random_blocks(name, len(EDGES) ** 2, seed=2)
    for place, scales in zip(SCALES[name], np.meshgrid(EDGES, EDGES), strict=False):
        blocks[:, place : place + 2] = scales.reshape(-1, 1).view(np.uint8)
    assert_same_numbers(dequantise(TYPES[name], blocks.reshape(-1)), oracle(name, blocks))


@pytest.mark.parametrize("name", READABLE)
def test_pieces_do_not_show_in_long_tensors_and_unaligned_data(name: str) -> None:
    kind = TYPES[name]
    count = 131_072 // kind.block + 3
    padded = np.concatenate([np.zeros(1, np.uint8), random_blocks(name, count, seed=3).reshape(-1)])
    unaligned = padded[1:]
    whole = dequantise(kind, unaligned)
    assert_same_numbers(whole[-3 * kind.block :], dequantise(kind, unaligned[-3 * kind.size :].copy()))
    assert_same_numbers(whole, oracle(name, unaligned.reshape(count, kind.size)))


@pytest.mark.parametrize("name", READABLE)
def test_rows_are_the_rows_of_the_whole(name: str) -> None:
    kind = TYPES[name]
    width = 2 * kind.block
    data = random_blocks(name, 2 * 7, seed=4).reshape(-1)
    tensor = StoredTensor("t", (7, width), name, data)
    whole = tensor.dequantise()
    assert whole.shape == (7, width)
    for rows in (slice(0, 7), slice(2, 5), slice(6, None), slice(-2, None), slice(3, 3), slice(5, 99)):
        assert_same_numbers(tensor.dequantise(rows), whole[rows])


def test_numbers_are_written_where_they_are_wanted() -> None:
    tensor = StoredTensor("t", (7, 64), "Q4_1", random_blocks("Q4_1", 14, seed=5).reshape(-1))
    stack = np.zeros((9, 64), np.float32)
    written = tensor.dequantise(out=stack[1:8])
    assert np.shares_memory(written, stack)
    assert_same_numbers(stack[1:8], tensor.dequantise())
    assert not stack[0].any() and not stack[8].any()
    assert_same_numbers(tensor.dequantise(slice(2, 4), stack[:2]), tensor.dequantise(slice(2, 4)))


@pytest.mark.parametrize("out", [np.zeros((7, 128), np.float32)[:, ::2], np.zeros((7, 64)), np.zeros(63, np.float32)])
def test_an_array_that_cannot_take_the_numbers_is_refused(out: np.ndarray) -> None:
    tensor = StoredTensor("t", (7, 64), "Q4_1", random_blocks("Q4_1", 14, seed=5).reshape(-1))
    with pytest.raises(ValueError, match=r"contiguous|reshape"):
        tensor.dequantise(out=out)


def test_rows_with_a_step_or_through_a_block_are_refused() -> None:
    tensor = StoredTensor("t", (32,), "Q8_0", np.zeros(34, np.uint8))
    with pytest.raises(ValueError, match="one by one"):
        tensor.dequantise(slice(0, 3))
    with pytest.raises(ValueError, match="step"):
        StoredTensor("t", (4, 1), "F32", np.zeros(16, np.uint8)).dequantise(slice(None, None, 2))


def test_types_that_are_known_by_size_only_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="IQ2_XXS"):
        StoredTensor("t", (1, 256), "IQ2_XXS", np.zeros(66, np.uint8)).dequantise()


def test_sizes_and_numbers_of_types_are_those_of_the_format() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    for theirs, (block, size) in GGML_QUANT_SIZES.items():
        ours = BY_CODE[theirs.value]
        assert (ours.name, ours.block, ours.size) == (theirs.name, block, size)
