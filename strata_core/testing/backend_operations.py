"""Conformance of everything but attention and pages."""

from __future__ import annotations

import numpy as np
import pytest

from strata_core.compute.base import Backend, Rotation
from strata_core.testing import formulas
from strata_core.testing.backend_kit import BackendKit, batch_of, begin, no_pages, random_rows, stored

#: One row, two, few, more than any small-batch path, an odd many.
ROWS = (1, 2, 5, 67)


class OperationTests(BackendKit):
    """Each operation against its formula."""

    def test_arrays_come_back_from_the_device_as_they_went(self, backend: Backend) -> None:
        values = random_rows(1, 3, 5)
        array = backend.from_host(values)
        expected = values.copy()
        values[:] = 0  # the array is a copy
        assert np.array_equal(backend.to_host(array), expected)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
    def test_linear_multiplies_with_the_dequantised_weights(self, backend: Backend, kind: str, rows: int) -> None:
        weight, x = stored(random_rows(1, 37, 96), kind), random_rows(2, rows, 96)
        expected = x.astype(np.float64) @ weight.dequantise().astype(np.float64).T
        self.close_to(backend.to_host(backend.linear(backend.from_host(x), backend.matrix(weight))), expected)

    def test_linear_adds_the_bias(self, backend: Backend) -> None:
        weight, bias, x = random_rows(1, 10, 32), random_rows(2, 10), random_rows(3, 4, 32)
        out = backend.linear(backend.from_host(x), backend.matrix(stored(weight)), backend.vector(stored(bias)))
        self.close_to(backend.to_host(out), x.astype(np.float64) @ weight.T + bias)

    @pytest.mark.parametrize("rows", ROWS)
    def test_a_stacked_matrix_projects_to_each_of_its_parts(self, backend: Backend, rows: int) -> None:
        shapes = {"Q4_1": 48, "Q8_0": 16, "F32": 7}
        parts = [stored(random_rows(size, size, 64), kind) for kind, size in shapes.items()]
        x, bias = random_rows(9, rows, 64), random_rows(8, 16)
        expected = [x.astype(np.float64) @ part.dequantise().T for part in parts]
        matrix, array = backend.matrix(*parts), backend.from_host(x)
        for out, wanted in zip(backend.linear_split(array, matrix), expected, strict=True):
            self.close_to(backend.to_host(out), wanted)
        self.close_to(backend.to_host(backend.linear(array, matrix)), np.concatenate(expected, axis=1))
        biased = backend.linear_split(array, matrix, (None, backend.vector(stored(bias)), None))
        self.close_to(backend.to_host(biased[1]), expected[1] + bias)
        self.close_to(backend.to_host(biased[2]), expected[2])

    @pytest.mark.parametrize("size", [10.0, 0.003])  # far above and about the square root of epsilon
    @pytest.mark.parametrize("rows", ROWS)
    def test_rms_norm_works_on_rows_and_on_heads(self, backend: Backend, rows: int, size: float) -> None:
        x = random_rows(1, rows, 96) * np.float32(size)
        for width in (96, 24):
            weight = random_rows(width, width)
            out = backend.rms_norm(backend.from_host(x), backend.vector(stored(weight)), 1e-5)
            self.close_to(backend.to_host(out), formulas.rms_norm(x, weight, 1e-5))

    def test_rms_norm_of_zeros_is_zero(self, backend: Backend) -> None:
        zeros, weight = backend.from_host(np.zeros((2, 8), np.float32)), backend.vector(stored(random_rows(1, 8)))
        out = backend.rms_norm(zeros, weight, 1e-6)
        assert not backend.to_host(out).any()

    def test_rms_norm_of_a_part_of_a_projection(self, backend: Backend) -> None:
        x, weight = random_rows(1, 5, 32), random_rows(2, 16)
        parts = [random_rows(i, 32, 32) for i in (3, 4)]
        split = backend.linear_split(backend.from_host(x), backend.matrix(*map(stored, parts)))
        out = backend.rms_norm(split[1], backend.vector(stored(weight)), 1e-5)
        self.close_to(backend.to_host(out), formulas.rms_norm(x.astype(np.float64) @ parts[1].T, weight, 1e-5))

    @pytest.mark.parametrize("rows", ROWS)
    def test_add_is_the_sum(self, backend: Backend, rows: int) -> None:
        x, y = random_rows(1, rows, 33), random_rows(2, rows, 33)
        assert np.array_equal(backend.to_host(backend.add(backend.from_host(x), backend.from_host(y))), x + y)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_gated_activation_also_of_extreme_numbers(self, backend: Backend, activation: str, rows: int) -> None:
        gate, up = random_rows(1, rows, 40) * 4, random_rows(2, rows, 40)
        gate[0, :4] = -200, 200, -88.8, 0
        out = backend.gated(backend.from_host(gate), backend.from_host(up), activation)
        self.close_to(backend.to_host(out), formulas.activation(activation, gate) * up)

    def test_wider_forms_equal_their_parts(self, backend: Backend) -> None:
        x, y = random_rows(1, 6, 32), random_rows(2, 6, 64)
        gate, up, down = random_rows(3, 64, 32), random_rows(4, 64, 32), random_rows(5, 32, 64)
        bias = random_rows(6, 32)
        matrix = backend.matrix(stored(down))
        residual = backend.add_linear(backend.from_host(x), backend.from_host(y), matrix)
        self.close_to(backend.to_host(residual), x + y.astype(np.float64) @ down.T)
        biased = backend.add_linear(
            backend.from_host(x), backend.from_host(y), matrix, backend.vector(stored(bias))
        )
        self.close_to(backend.to_host(biased), x + y.astype(np.float64) @ down.T + bias)
        mlp = backend.gated_mlp(backend.from_host(x), backend.matrix(stored(gate), stored(up)), matrix, "silu")
        wide = x.astype(np.float64)
        self.close_to(backend.to_host(mlp), (formulas.activation("silu", wide @ gate.T) * (wide @ up.T)) @ down.T)

    @pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
    def test_embedding_rows_from_a_table_and_from_a_tied_matrix(self, backend: Backend, kind: str) -> None:
        weight, tokens = stored(random_rows(1, 50, 64), kind), [49, 0, 7, 7, 31]
        expected = weight.dequantise()[tokens]
        for table in (backend.table(weight), backend.matrix(weight)):
            step = begin(backend, [no_pages(0, 4), no_pages(9, 1)], tokens=tokens)
            self.close_to(backend.to_host(backend.embed(step, table)), expected)
            self.close_to(backend.to_host(backend.embed(step, table, 3.0)), expected * 3)

    @pytest.mark.parametrize("outputs", [[], [0], [6], [0, 3, 6], list(range(7))])
    def test_select_outputs_takes_exactly_the_wanted_rows(self, backend: Backend, outputs: list[int]) -> None:
        x = random_rows(1, 7, 12)
        step = begin(backend, [no_pages(0, 7)], outputs=outputs)
        assert np.array_equal(backend.to_host(backend.select_outputs(step, backend.from_host(x))), x[outputs])

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("rotated", [16, 10, 2])
    def test_rope_turns_each_row_by_its_own_position(self, backend: Backend, interleaved: bool, rotated: int) -> None:
        frequencies = (10000.0 ** (-np.arange(0, rotated, 2) / rotated)).astype(np.float32)
        spans = [no_pages(0, 1), no_pages(5, 3), no_pages(8191, 1), no_pages(31, 2)]
        x = random_rows(1, 7, 3 * 16)
        for magnitude in (1.0, 1.25):
            rotation = Rotation(frequencies, interleaved, magnitude)
            out = backend.rope(begin(backend, spans), backend.from_host(x), rotation, 3)
            expected = formulas.rope(x, batch_of(spans).positions, rotation, 3)
            self.close_to(backend.to_host(out), expected)

    def test_rope_keeps_two_rotations_of_one_step_apart(self, backend: Backend) -> None:
        step, x = begin(backend, [no_pages(3, 2)]), random_rows(1, 2, 8)
        for seed in range(3):
            rotation = Rotation(np.abs(random_rows(seed, 4)), False)
            out = backend.rope(step, backend.from_host(x), rotation, 1)
            self.close_to(backend.to_host(out), formulas.rope(x, np.array([3, 4]), rotation, 1))

    def test_weights_are_counted(self, backend: Backend) -> None:
        before = backend.weight_bytes()
        held = backend.vector(stored(random_rows(1, 64)))
        assert backend.weight_bytes() >= before + 64 * 4
        assert backend.to_host(backend.rms_norm(backend.from_host(np.ones((1, 64), np.float32)), held, 0.0)).any()

    def test_the_same_input_gives_the_same_bits(self, backend: Backend) -> None:
        x, matrix = random_rows(1, 9, 64), backend.matrix(stored(random_rows(2, 200, 64), "Q8_0"))
        first, second = (backend.to_host(backend.linear(backend.from_host(x), matrix)) for _ in range(2))
        assert first.tobytes() == second.tobytes()
