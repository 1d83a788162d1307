"""Conformance of what samplers ask of scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.compute.base import Backend
from strata_core.testing.backend_kit import BackendKit, random_rows

SIZES = (1, 2, 17, 127, 128, 1000, 4096 + 77, 50_000)


def _scores(n: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    x = random_rows(n, n)
    yield "random", x
    yield "small and large", (x * np.float32(1e-40)).repeat(2)[:n] + np.where(np.arange(n) % 3, 0, np.float32(3e38))
    yield "few different", np.round(x)
    yield "all equal", np.full(n, -1.5, np.float32)
    yield "zeros of both signs", np.where(np.arange(n) % 2, np.float32(0), np.float32(-0.0))
    yield "rising", np.arange(n, dtype=np.float32)
    yield "falling", -np.arange(n, dtype=np.float32)
    yield "crowded at the end", np.where(np.arange(n) < n - n // 9, -x * x - 5, x)
    hidden = x.copy()
    hidden[x < 1] = -np.inf
    yield "many hidden", hidden
    yield "all hidden", np.full(n, -np.inf, np.float32)


class ScoringTests(BackendKit):
    """Against a stable sort of everything."""

    @pytest.mark.parametrize("n", SIZES)
    def test_the_highest_come_best_first_and_by_id_among_equals(self, backend: Backend, n: int) -> None:
        for name, scores in _scores(n):
            scores = scores.astype(np.float32)
            before = scores.tobytes()
            expected = np.argsort(-scores, kind="stable")
            for k in sorted({min(k, n) for k in (1, 2, 40, 256, n // 9 + 1, n // 2 + 1, n - 1 or 1, n)}):
                ids = backend.top(scores, k)
                assert ids.dtype == np.int64
                assert ids.tolist() == expected[:k].tolist(), f"{name}, {k} of {n}"
            assert scores.tobytes() == before

    def test_a_row_of_several_is_ranked_where_it_lies(self, backend: Backend) -> None:
        rows = random_rows(3, 4, 999)
        assert [int(backend.top(row, 1)[0]) for row in rows] == rows.argmax(axis=1).tolist()
        column = rows.T[:, 1]
        assert backend.top(column, 5).tolist() == np.argsort(-column, kind="stable")[:5].tolist()
