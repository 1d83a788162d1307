"""Rows of a large table, read in three ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata_core.errors import ModelFileError, SettingsError
from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.weights.derived import joined
from strata_core.weights.gguf import GGUFFile
from strata_core.weights.rows import WAYS, DirectRows, open_rows
from strata_core.weights.tensor import StoredTensor

ROWS, WIDTH = 500, 160


@pytest.fixture(params=["F32", "F16", "Q8_0"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> StoredTensor:
    """A table that does not begin at a sector, so that some of its rows reach into a second one."""
    numbers = np.random.default_rng(1).standard_normal((ROWS, WIDTH), np.float32)
    tensors = {"before": quantise(np.ones(33, np.float32), "F32"), "table": quantise(numbers, request.param)}
    return GGUFFile.open(write_gguf(tmp_path / "rows.gguf", {}, tensors)).tensors["table"]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_rows_that_were_asked_for(table: StoredTensor, way: str) -> None:
    rows = open_rows(table, way, 10_000)
    expected = table.dequantise()
    for seed in range(4):
        ids = np.random.default_rng(seed).integers(0, ROWS, 70)
        assert np.array_equal(rows.rows(ids), expected[ids])
    ends = np.array([ROWS - 1, 0, 0, ROWS - 1])
    assert np.array_equal(rows.rows(ends), expected[ends])
    assert rows.rows(np.empty(0, np.int64)).shape == (0, WIDTH)
    assert rows.counters.rows == 4 * 70 + 4
    rows.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_that_is_not_there_is_an_error(table: StoredTensor, way: str, row: int) -> None:
    rows = open_rows(table, way, 10_000)
    with pytest.raises(IndexError, match="500 rows"):
        rows.rows(np.array([3, row]))
    rows.close()


def test_the_cache_of_direct_reads_is_bounded_and_keeps_what_was_used_last(table: StoredTensor) -> None:
    size = table.nbytes // ROWS
    rows = open_rows(table, "direct", 3 * size + 1)
    assert isinstance(rows, DirectRows)
    rows.rows(np.array([1, 2, 3, 1]))
    assert (rows.counters.reads, rows.counters.hits, rows.counters.cached_bytes) == (3, 0, 3 * size)
    rows.rows(np.array([1]))
    rows.rows(np.array([4]))  # 2 leaves: 1 was used after it
    assert (rows.counters.reads, rows.counters.hits, rows.counters.cached_bytes) == (4, 1, 3 * size)
    rows.rows(np.array([1, 3, 4]))
    assert (rows.counters.reads, rows.counters.hits) == (4, 4)
    rows.rows(np.array([2]))
    assert rows.counters.reads == 5
    assert rows.counters.read_bytes >= 5 * size
    rows.close()


def test_without_a_cache_every_row_is_read(table: StoredTensor) -> None:
    rows = open_rows(table, "direct", table.nbytes // ROWS - 1)
    for _ in range(2):
        assert np.array_equal(rows.rows(np.array([7]))[0], table.dequantise()[7])
    assert (rows.counters.reads, rows.counters.hits, rows.counters.cached_bytes) == (2, 0, 0)
    rows.close()


def test_a_table_in_pieces_can_be_mapped_and_loaded_but_not_read_directly(table: StoredTensor) -> None:
    whole = joined("whole", [table, table])
    ids = np.array([ROWS + 3, 3, ROWS - 1, ROWS])
    expected = table.dequantise()[[3, 3, ROWS - 1, 0]]
    for way in ("mmap", "ram"):
        assert np.array_equal(open_rows(whole, way, 0).rows(ids), expected)
    with pytest.raises(SettingsError, match=r"whole.*mmap or ram"):
        open_rows(whole, "direct", 1 << 20)


def test_a_file_that_was_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    numbers = np.zeros((ROWS, WIDTH), np.float32)
    path = write_gguf(tmp_path / "cut.gguf", {}, {"table": numbers})
    source = GGUFFile.open(path)
    rows = open_rows(source.tensors["table"], "direct", 0)
    with path.open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(ModelFileError, match=r"cut\.gguf.*table"):
        rows.rows(np.array([ROWS - 1]))
    rows.close()


def test_an_unknown_way_is_named(table: StoredTensor) -> None:
    with pytest.raises(SettingsError, match="mmap, direct, ram, not 'tape'"):
        open_rows(table, "tape", 0)
