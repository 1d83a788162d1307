"""Products with weights of every stored type and of every shape."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_kit import make
from numpy.typing import NDArray
from strata_cpu import library

from strata_core.compute.base import Backend, ExpertSpec
from strata_core.testing.backend_kit import random_rows, stored
from strata_core.weights.quant import TYPES
from strata_core.weights.tensor import StoredTensor

#: Halves that are scales and offsets in a block of each type, by their byte offsets: random bytes could be infinite.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32")


def random_tensor(kind: str, rows: int, width: int, seed: int = 0) -> StoredTensor:
    """A tensor of any type: random codes, sensible scales."""
    if kind in FLOATS:
        return stored(random_rows(seed, rows, width), kind)
    random, layout = np.random.default_rng(seed), TYPES[kind]
    blocks = random.integers(0, 256, (rows * width // layout.block, layout.size), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = random.uniform(0.01, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return StoredTensor("weight", (rows, width), kind, blocks.reshape(-1))


def product(backend: Backend, x: NDArray[np.float32], *tensors: StoredTensor) -> NDArray[np.float32]:
    return backend.to_host(backend.linear(backend.from_host(x), backend.matrix(*tensors)))


def largest_of_blocks(tensor: StoredTensor) -> NDArray[np.float64]:
    """Every weight replaced by the largest magnitude in its block of 32: what its rounding may be a share of."""
    largest = np.abs(tensor.dequantise().astype(np.float64))
    if tensor.type not in FLOATS:
        blocks = largest.reshape(len(largest), -1, 32)
        blocks[:] = blocks.max(axis=2, keepdims=True)
    return largest


def check(actual: NDArray[np.float32], x: NDArray[np.float32], tensor: StoredTensor) -> None:
    """Against float64, with an error bound from the terms: the sum may be small where they are not.

    Scales and offsets of the K types are rounded to float16, so a block's largest weight decides.
    """
    weight = tensor.dequantise().astype(np.float64)
    allowed = 1e-3 * np.sqrt(x.astype(np.float64) ** 2 @ largest_of_blocks(tensor).T ** 2) + 1e-6
    off = np.abs(actual - x.astype(np.float64) @ weight.T)
    assert (off <= allowed).all(), f"off by {off.max():.3g}, {(off / allowed).max():.2f} of what is allowed"


@pytest.mark.parametrize("kind", [*SCALES, *FLOATS])
def test_products_with_every_stored_type(isa: str, kind: str) -> None:
    tensor, x = random_tensor(kind, 48, 512), random_rows(1, 9, 512)
    check(product(make(2, isa), x, tensor), x, tensor)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "F32"])
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 13])
def test_rows_that_fill_no_panel_and_no_tile(isa: str, kind: str, out_features: int, rows: int) -> None:
    tensor, x = random_tensor(kind, out_features, 32, seed=out_features), random_rows(rows, rows, 32)
    check(product(make(2, isa), x, tensor), x, tensor)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 18, 31])
def test_float_weights_of_odd_width(isa: str, width: int) -> None:
    for kind in FLOATS:
        tensor, x = random_tensor(kind, 19, width), random_rows(2, 3, width)
        check(product(make(2, isa), x, tensor), x, tensor)


@pytest.mark.parametrize("kind", [kind for kind in library.STORED if kind != "F32"])
def test_embedded_rows_are_the_dequantised_ones(kind: str) -> None:
    backend, tensor = make(), random_tensor(kind, 40, 256)
    rows = np.array([39, 0, 17, 17], np.int32)
    out = np.empty((4, 256), np.float32)
    matrix = backend.matrix(tensor)
    library.load(library.library_path()).strata_rows(matrix.struct, rows.ctypes.data, 4, 1.0, out.ctypes.data)
    off = np.abs(out - tensor.dequantise()[rows])  # scales of the K types are products, rounded to float16
    assert (off <= 2**-10 * largest_of_blocks(tensor)[rows]).all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K", "BF16", "F32"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_on_any_number_of_threads(isa: str, kind: str) -> None:
    tensor, x = random_tensor(kind, 100, 768), random_rows(3, 37, 768)
    together = product(make(2, isa), x, tensor)
    for threads in (1, 3):
        backend = make(threads, isa)
        matrix = backend.matrix(tensor)
        for rows in (slice(0, 1), slice(5, 7), slice(4, 9), slice(20, 37)):
            alone = backend.to_host(backend.linear(backend.from_host(x[rows]), matrix))
            assert alone.tobytes() == together[rows].tobytes()


def test_activations_of_zeros_and_of_extreme_numbers(isa: str) -> None:
    tensor, x = random_tensor("Q4_1", 16, 64), np.zeros((4, 64), np.float32)
    x[1] = 1e-39
    x[2] = 1e30
    x[3, :32] = 1e4
    out = product(make(1, isa), x, tensor)
    assert not out[0].any()
    assert np.abs(out[1]).max() < 1e-36
    check(out[2:], x[2:], tensor)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_shows_in_the_result(isa: str, wrong: float) -> None:
    for kind in ("Q4_0", "Q8_0", "F32"):
        x = random_rows(1, 2, 64)
        x[1, 33] = wrong
        out = product(make(1, isa), x, random_tensor(kind, 16, 64))
        assert np.isfinite(out[0]).all()
        assert not np.isfinite(out[1]).any()


def test_a_row_gets_the_same_bits_from_its_experts_alone_and_among_others(isa: str) -> None:
    backend, x = make(2, isa), random_rows(1, 6, 64)
    gate, up, down = (stored(random_rows(i, 7, *shape), "Q4_0") for i, shape in enumerate([(96, 64), (96, 64), (64, 96)]))
    experts = backend.experts(gate, up, down)
    ids = np.array([np.random.default_rng(i).permutation(7)[:3] for i in range(6)], np.int32)
    weights = random_rows(4, 6, 3)
    together = backend.mixture(x, ids, weights, experts, ExpertSpec())
    alone = [backend.mixture(x[[i]], ids[[i]], weights[[i]], experts, ExpertSpec()) for i in range(6)]
    assert np.concatenate(alone).tobytes() == together.tobytes()
