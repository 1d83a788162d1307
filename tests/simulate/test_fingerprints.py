"""What a trace tells of token sequences: how far any two agree, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.conversations.tokens import common_prefix
from strata_core.engine.fingerprints import Fingerprints
from strata_core.engine.requests import RequestRecord
from strata_core.engine.trace import TracedRequest, TraceWriter
from strata_core.simulate.trace import OPENER, Trace, read_trace

SIZE = 8
HEADER = {"start": 100.0, "page_tokens": SIZE}
KEY = b"k" * 32


def traced(tokens: np.ndarray, number: int = 0, **fields: object) -> TracedRequest:
    record = RequestRecord(
        id=f"r{number}", status="stop", prompt_tokens=max(1, len(tokens) - 2), cached_tokens=0, read_tokens=len(tokens),
        generated_tokens=3, reused={}, reread=(), created=100.0 + number, queued_s=0.0, restore_s=None, read_s=0.1,
        generate_s=0.1, slot=0, tenant=str(fields.pop("tenant", "")),
    )  # fmt: skip
    return TracedRequest(record, tokens.astype(np.int32), len(tokens), **fields)  # type: ignore[arg-type]


def through_a_trace(sequences: Sequence[np.ndarray], writer: TraceWriter | None = None) -> Trace:
    writer = writer or TraceWriter(HEADER, KEY)
    requests = [writer.line(traced(tokens, number)) for number, tokens in enumerate(sequences)]
    return read_trace([writer.header() + "\n", *(line + "\n" for line in requests)])


def branches(seed: int, count: int) -> list[np.ndarray]:
    """Sequences that leave each other everywhere, within pages and at their edges."""
    random = np.random.default_rng(seed)
    found = [random.integers(0, 49_000, 100)]
    while len(found) < count:
        parent = found[random.integers(len(found))]
        cut = random.integers(0, len(parent) + 1)
        found.append(np.concatenate([parent[:cut], random.integers(0, 49_000, random.integers(1, 60))]))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_any_two_sequences_agree_as_far_as_they_did(seed: int) -> None:
    sequences = branches(seed, 30)
    trace = through_a_trace(sequences)
    made = [trace.tokens(item) for item in trace.items]
    assert [len(tokens) for tokens in made] == [len(tokens) for tokens in sequences]
    pairs = [(a, b) for a in range(30) for b in range(a)]
    excess = [common_prefix(made[a], made[b]) - common_prefix(sequences[a], sequences[b]) for a, b in pairs]
    assert min(excess) >= 0, "what agreed agrees"
    # One byte per token: a difference is missed, and seen one token later, once in 256 times.
    assert max(excess) <= 1
    assert sum(map(bool, excess)) < len(pairs) / 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=2, max_size=8))
def test_nothing_that_agreed_is_told_apart(sequences: list[list[int]]) -> None:
    arrays = [np.array(tokens) for tokens in sequences]
    made = through_a_trace(arrays)
    for a, one in enumerate(arrays):
        for b, other in enumerate(arrays):
            common = common_prefix(one, other)
            assert common_prefix(made.tokens(made.items[a]), made.tokens(made.items[b])) >= common


def test_a_page_is_written_once() -> None:
    prints, tokens = Fingerprints(SIZE, KEY), np.arange(100)
    first, again = prints.take("", tokens), prints.take("", np.append(tokens, 7))
    assert (first.known, len(first.names), len(first.prints)) == (0, 12 * 8, 100)
    assert (again.known, len(again.names), len(again.prints)) == (96, 0, 5)
    assert again.parent == first.names[-8:]


def test_forgotten_pages_are_written_again_beginnings_last() -> None:
    prints = Fingerprints(SIZE, KEY, max_known=6)
    shared = np.arange(4 * SIZE)
    for number in range(5):
        prints.take("", np.concatenate([shared, np.full(4 * SIZE, 1000 + number)]))
    assert prints.take("", np.append(shared, 5)).known == 4 * SIZE
    assert prints.take("", np.concatenate([shared, np.full(4 * SIZE, 1000)])).known == 4 * SIZE


def test_a_reader_follows_a_writer_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(HEADER, KEY)
    monkeypatch.setattr(writer, "_prints", Fingerprints(SIZE, KEY, max_known=3))
    sequences = branches(9, 20)
    made = through_a_trace(sequences, writer)
    whole = through_a_trace(sequences)
    for item, other in zip(made.items, whole.items, strict=True):
        assert np.array_equal(made.tokens(item), whole.tokens(other))


def test_another_key_and_another_tenant_have_nothing_in_common() -> None:
    tokens = np.arange(200)
    one = Fingerprints(SIZE, KEY).take("", tokens)
    for other in (Fingerprints(SIZE).take("", tokens), Fingerprints(SIZE, KEY).take("someone", tokens)):
        assert not {one.names[i : i + 8] for i in range(0, 200, 8)} & {other.names[i : i + 8] for i in range(0, 200, 8)}
        assert (one.prints == other.prints).mean() < 0.05


def test_prints_of_equal_tokens_look_random() -> None:
    prints = Fingerprints(SIZE, KEY).take("", np.zeros(80_000, np.int32)).prints
    counts = np.bincount(prints, minlength=256)
    assert counts.min() > 200
    assert counts.max() < 430


def test_a_line_names_neither_tenant_nor_key_nor_tokens() -> None:
    writer = TraceWriter(HEADER, KEY)
    line = writer.line(traced(np.full(40, 31337), tenant="alice@example.org"))
    assert "alice" not in line
    assert "31337" not in line
    assert KEY.hex() not in line
    assert len(json.loads(line)["tenant"]) == 16


def test_turn_openers_are_where_they_were() -> None:
    writer = TraceWriter(HEADER, KEY)
    tokens = np.arange(30)
    lines = [
        writer.header() + "\n",
        writer.line(traced(tokens, 0, turns=(0, 11, 25))) + "\n",
        writer.line(traced(np.append(tokens, [5, 6]), 1, turns=(0, 11, 25, 30))) + "\n",
    ]
    trace = read_trace(lines)
    places = [np.flatnonzero(trace.tokens(item) == OPENER).tolist() for item in trace.items]
    assert places == [[0, 11, 25], [0, 11, 25, 30]]
