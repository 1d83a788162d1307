"""Conformance of the forms that layers are put together from: elementwise, by groups of columns, and by heads."""

from __future__ import annotations

import numpy as np
import pytest

from strata_core.compute.base import Backend
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, random_rows, stored

ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid", "softplus", "relu", "tanh", "signed_root")


class ElementwiseTests(BackendKit):
    """Each form against its formula."""

    @pytest.mark.parametrize("rows", [1, 67])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations_also_of_extreme_numbers(self, backend: Backend, activation: str, rows: int) -> None:
        x = random_rows(1, rows, 40) * 4
        x[0, :5] = -200, 200, -88.8, 0, 30
        out = backend.activate(backend.from_host(x), activation)
        self.close_to(backend.to_host(out), formulas.activation(activation, x))

    def test_activation_of_a_part_of_a_projection(self, backend: Backend) -> None:
        x, parts = random_rows(1, 5, 32), [random_rows(i, 48, 32) for i in (3, 4)]
        _, second = backend.linear_split(backend.from_host(x), backend.matrix(*map(stored, parts)))
        out = backend.activate(second, "sigmoid")
        self.close_to(backend.to_host(out), formulas.activation("sigmoid", x.astype(np.float64) @ parts[1].T))

    @pytest.mark.parametrize("groups", [1, 4, 24])
    def test_multiply_by_a_column_for_each_group(self, backend: Backend, groups: int) -> None:
        x, y = random_rows(1, 6, 24), random_rows(2, 6, groups)
        expected = x.astype(np.float64) * np.repeat(y, 24 // groups, axis=1)
        out = backend.multiply(backend.from_host(x), backend.from_host(y))
        self.close_to(backend.to_host(out), expected)
        vector = random_rows(3, groups)
        out = backend.multiply(backend.from_host(x), backend.vector(stored(vector)))
        self.close_to(backend.to_host(out), x.astype(np.float64) * np.repeat(vector, 24 // groups))

    def test_shift_and_scale(self, backend: Backend) -> None:
        x, vector = random_rows(1, 6, 24), random_rows(2, 24)
        assert np.array_equal(
            backend.to_host(backend.shift(backend.from_host(x), backend.vector(stored(vector)))), x + vector
        )
        self.close_to(backend.to_host(backend.scale(backend.from_host(x), -0.3)), x.astype(np.float64) * -0.3)

    @pytest.mark.parametrize("heads", [1, 3])
    def test_split_cuts_each_head_and_join_undoes_it(self, backend: Backend, heads: int) -> None:
        x, widths = random_rows(1, 5, heads * 12), (4, 1, 7)
        grouped = x.reshape(5, heads, 12)
        parts = backend.split(backend.from_host(x), widths, heads)
        for part, start, width in zip(parts, (0, 4, 5), widths, strict=True):
            expected = grouped[:, :, start : start + width].reshape(5, heads * width)
            assert np.array_equal(backend.to_host(part), expected)
        assert np.array_equal(backend.to_host(backend.join(parts, heads)), x)
        swapped = np.concatenate([grouped[:, :, 5:], grouped[:, :, :4]], axis=2).reshape(5, -1)
        assert np.array_equal(backend.to_host(backend.join([parts[2], parts[0]], heads)), swapped)

    def test_repeat_and_fold(self, backend: Backend) -> None:
        x = random_rows(1, 5, 12)
        assert np.array_equal(backend.to_host(backend.repeat(backend.from_host(x), 3)), np.tile(x, (1, 3)))
        expected = x.astype(np.float64).reshape(5, 4, 3).sum(axis=1)
        self.close_to(backend.to_host(backend.fold(backend.from_host(x), 4)), expected)

    @pytest.mark.parametrize("size", [10.0, 0.003])
    def test_l2_norm_of_groups(self, backend: Backend, size: float) -> None:
        x = random_rows(1, 5, 24) * np.float32(size)
        x[0, :8] = 0
        for width in (24, 8):
            out = backend.l2_norm(backend.from_host(x), width, 1e-6)
            self.close_to(backend.to_host(out), formulas.l2_norm(x, width, 1e-6))

    @pytest.mark.parametrize("groups", [1, 3, 24])
    def test_group_dot_has_a_column_for_each_group(self, backend: Backend, groups: int) -> None:
        x, y = random_rows(1, 5, 24), random_rows(2, 5, 24)
        expected = (x.astype(np.float64) * y).reshape(5, groups, -1).sum(axis=2)
        self.close_to(backend.to_host(backend.group_dot(backend.from_host(x), backend.from_host(y), groups)), expected)

    def test_group_norm_has_a_weight_for_every_column(self, backend: Backend) -> None:
        x, weight = random_rows(1, 5, 24), random_rows(2, 24)
        out = backend.group_norm(backend.from_host(x), backend.vector(stored(weight)), 3, 1e-5)
        self.close_to(backend.to_host(out), formulas.rms_norm(x, np.ones(8), 1e-5) * weight)

    @pytest.mark.parametrize("rows", [1, 33])
    def test_head_linear_has_a_matrix_for_each_head(self, backend: Backend, rows: int) -> None:
        x, weight = random_rows(1, rows, 3 * 16), random_rows(2, 3, 20, 16)
        out = backend.head_linear(backend.from_host(x), backend.vector(stored(weight)))
        expected = np.einsum("rhi,hoi->rho", x.astype(np.float64).reshape(rows, 3, 16), weight).reshape(rows, -1)
        self.close_to(backend.to_host(out), expected)
