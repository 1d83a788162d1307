"""Tensors that are made of others when they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hf_build import numbers

from strata_core.testing.backend_kit import stored
from strata_core.weights.derived import abreast, bits, computed, joined, rearranged, renamed, stacked
from strata_core.weights.tensor import StoredTensor


def all_ways(tensor: StoredTensor, expected: np.ndarray) -> None:
    """Whole, every range of rows, and one inner tensor give the same numbers."""
    assert (tensor.shape, tensor.nbytes) == (expected.shape, expected.size * (tensor.nbytes // expected.size))
    np.testing.assert_array_equal(tensor.dequantise(), expected)
    for start in range(len(expected) + 1):
        for stop in range(start, len(expected) + 1):
            np.testing.assert_array_equal(tensor.dequantise(slice(start, stop)), expected[start:stop])
    if expected.ndim > 1:
        inner = tensor.inner(len(expected) - 1)
        assert inner.shape == expected.shape[1:]
        np.testing.assert_array_equal(inner.dequantise(), expected[-1])
        np.testing.assert_array_equal(inner.dequantise(slice(1, 2)), expected[-1][1:2])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_views_of_any_stride_are_tensors(kind: str) -> None:
    tensor = stored(numbers(6, 4), kind)
    array = tensor.dequantise()
    pairs = bits(tensor).reshape(2, 3, 4).swapaxes(0, 1)
    all_ways(rearranged("x", pairs, kind, lead=2), array.reshape(2, 3, 4).swapaxes(0, 1).reshape(6, 4))
    all_ways(rearranged("x", bits(tensor).T, kind), array.T)
    all_ways(rearranged("x", bits(tensor)[:, ::2], kind), array[:, ::2])
    columns = bits(tensor).reshape(6, 2, 2).swapaxes(1, 2)
    all_ways(rearranged("x", columns, kind, shape=(6, 4)), array.reshape(6, 2, 2).swapaxes(1, 2).reshape(6, 4))


def test_what_lies_together_is_not_copied() -> None:
    tensor = stored(numbers(6, 4))
    part = rearranged("x", bits(tensor)[2:4], "F32")
    assert not part.derived and np.shares_memory(part.data, tensor.data)
    again = renamed(tensor, "y", (24,))
    assert (again.name, again.shape) == ("y", (24,)) and np.shares_memory(again.data, tensor.data)
    stack = stacked("z", [tensor, tensor])
    assert np.shares_memory(stack.rows(1, 2), tensor.data)
    assert np.shares_memory(joined("z", [tensor, tensor]).rows(7, 9), tensor.data)


def test_joined_stacked_and_computed_tensors_have_the_numbers_of_their_parts() -> None:
    a, b = numbers(3, 2), numbers(1, 2, seed=5)
    all_ways(joined("x", [stored(a), stored(b), stored(a)]), np.concatenate([a, b, a]))
    all_ways(stacked("x", [stored(a), stored(2 * a)]), np.stack([a, 2 * a]))
    all_ways(computed("x", stored(a), lambda values: values + 1), a + 1)
    all_ways(abreast("x", [stored(a), stored(numbers(3, 4))]), np.concatenate([a, numbers(3, 4)], axis=1))
    all_ways(joined("x", [rearranged("x", bits(stored(a))[::2], "F32"), stored(b)]), np.concatenate([a[::2], b]))


def test_nothing_but_the_rows_in_hand_is_made() -> None:
    made: list[tuple[int, int]] = []

    def watched(start: int, stop: int) -> np.ndarray:
        made.append((start, stop))
        return np.zeros((stop - start) * 8, np.uint8)

    stack = stacked("x", [StoredTensor("p", (4, 2), "F32", watched) for _ in range(3)])
    stack.dequantise(slice(1, 2))
    assert made == [(0, 4)]
