"""The index against brute force, over tiny alphabets, so that prefixes collide often."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.conversations.identity import Identity, page_addresses
from strata_core.conversations.index import RECENT, PrefixIndex, Query
from strata_core.conversations.tokens import common_prefix

IDENTITIES = [Identity.of({"weights": "one"}), Identity.of({"weights": "two"})]

sequences = st.lists(st.integers(0, 1), min_size=1, max_size=14)
actions = st.tuples(st.integers(0, 5), st.booleans(), sequences, st.integers(0, 1))
pages = st.sampled_from([2, 3, 4, 8])


@attrs.frozen(eq=False)
class Stored:
    identity: bytes
    tokens: np.ndarray
    addresses: tuple[bytes, ...]
    states: tuple[int, ...] | None = None


def stored(ids: list[int], page: int, identity: Identity = IDENTITIES[0]) -> Stored:
    tokens = np.array(ids, np.int32)
    return Stored(identity.digest, tokens, page_addresses(identity, tokens, page))


def query(ids: list[int], page: int, identity: Identity = IDENTITIES[0]) -> Query:
    entry = stored(ids, page, identity)
    return Query(entry.identity, entry.tokens, entry.addresses)


def shared(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check(index: PrefixIndex[int], kept: dict[int, tuple[list[int], int]], ids: list[int], page: int) -> None:
    for which, identity in enumerate(IDENTITIES):
        for excluded in (frozenset[int](), frozenset(list(kept)[::2])):
            true = {k: shared(tokens, ids) for k, (tokens, i) in kept.items() if i == which and k not in excluded}
            found = index.longest(query(ids, page, identity), excluded)
            assert all(true[key] == count > 0 for key, count in found)
            assert [count for _, count in found] == sorted((count for _, count in found), reverse=True)
            most = max(true.values(), default=0)
            assert {k for k, count in found if count == most} == {k for k, count in true.items() if count == most > 0}
            assert all(count > most - page for _, count in found)


@given(st.lists(st.tuples(sequences, st.integers(0, 1)), max_size=12), sequences, pages)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_longest_are_found(entries: list[tuple[list[int], int]], ids: list[int], page: int) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for key, (tokens, which) in enumerate(entries):
        index.add(key, stored(tokens, page, IDENTITIES[which]))
    check(index, dict(enumerate(entries)), ids, page)


@given(st.lists(actions, max_size=25), sequences, pages)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_entries_come_go_and_are_replaced(
    done: list[tuple[int, bool, list[int], int]], ids: list[int], page: int
) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    kept: dict[int, tuple[list[int], int]] = {}
    for key, add, tokens, which in done:
        if add:
            index.add(key, stored(tokens, page, IDENTITIES[which]))
            kept[key] = (tokens, which)
        elif key in kept:
            index.remove(key)
            del kept[key]
        check(index, kept, ids, page)
        held = {address for tokens, w in kept.values() for address in stored(tokens, page, IDENTITIES[w]).addresses}
        for address in stored(ids, page).addresses:
            assert bool(list(index.holders(address))) == (address in held)


def test_an_address_alone_is_no_match() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    honest, forged = stored([1, 2, 3, 4], 2), stored([1, 2, 3, 4], 2)
    index.add("forged", attrs.evolve(forged, tokens=np.array([1, 9, 3, 4], np.int32)))
    index.add("alien", attrs.evolve(forged, identity=b"x" * 16))
    assert index.longest(query([1, 2, 3, 4], 2)) == [("forged", 1)]
    index.add("honest", honest)
    assert index.longest(query([1, 2, 3, 4], 2))[0] == ("honest", 4)


@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200), st.integers(0, 40))
@settings(deadline=None, derandomize=True)
def test_common_prefix_counts_equal_leading_ids(a: list[int], at: int, tail: int) -> None:
    b = a[:at] + [7] * tail
    expected = min(at, len(a))
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


def test_for_less_than_a_page_only_the_entries_added_last_are_looked_at() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for key in range(RECENT + 2):
        index.add(key, stored([key, 7], 4))
    assert index.longest(query([0, 7, 9], 4)) == []
    assert index.longest(query([2, 7, 9], 4)) == [(2, 2)]
    index.add(0, stored([0, 7], 4))
    assert index.longest(query([0, 7, 9], 4)) == [(0, 2)]


@given(st.lists(sequences, max_size=12), sequences, st.integers(2, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_sparse_index_finds_the_same(entries: list[list[int]], ids: list[int], stride: int) -> None:
    index: PrefixIndex[int] = PrefixIndex(stride)
    for key, tokens in enumerate(entries):
        index.add(key, stored(tokens, 2))
    most = max((shared(tokens, ids) for tokens in entries), default=0)
    found = index.longest(query(ids, 2))
    assert {key for key, n in found if n == most} == {k for k, t in enumerate(entries) if shared(t, ids) == most > 0}
    for key in range(len(entries)):
        index.remove(key)
    assert index.longest(query(ids, 2)) == []
