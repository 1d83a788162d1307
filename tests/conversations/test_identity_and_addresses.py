from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.conversations.identity import DIGEST_BYTES, Identity, extend_addresses, page_addresses

PARTS = {
    "weights": "abc",
    "kv": "f16",
    "page_tokens": 32,
    "rope": {"base": 1e5, "scale": 1.0},
    "tokenizer": b"\x01\xab",
}

ids = st.lists(st.integers(0, 2), max_size=20)


def changed(**parts: object) -> Identity:
    return Identity.of(PARTS | parts)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("weights", "abd"),
        ("kv", "int8"),
        ("page_tokens", 64),
        ("rope", {"base": 1e5, "scale": 2.0}),
        ("rope", {"base": np.nextafter(1e5, 2e5), "scale": 1.0}),
        ("rope", {"base": 1e5}),
        ("tokenizer", b"\x01\xac"),
        ("adapter", "new"),
    ],
)
def test_every_part_changes_the_digest_and_is_named(part: str, value: object) -> None:
    one, other = Identity.of(PARTS), changed(**{part: value})
    assert one != other
    assert one.digest != other.digest
    assert one.differing(other.parts) == other.differing(one.parts) == [part]


def test_a_missing_part_is_named() -> None:
    fewer = Identity.of({name: value for name, value in PARTS.items() if name != "kv"})
    assert fewer.digest != Identity.of(PARTS).digest
    assert fewer.differing(Identity.of(PARTS).parts) == ["kv"]


def test_the_order_of_parts_does_not_matter() -> None:
    assert Identity.of(dict(reversed(PARTS.items()))) == Identity.of(PARTS)
    assert Identity.of(PARTS).differing(Identity.of(PARTS).parts) == []


def test_names_and_values_do_not_run_together() -> None:
    assert Identity.of({"a": "b", "c": "d"}).digest != Identity.of({"a": "bc", "": "d"}).digest
    assert Identity.of({"a": 'b", "c": "d'}).digest != Identity.of({"a": "b", "c": "d"}).digest


def test_tenants_are_apart_and_the_empty_one_is_the_plain_identity() -> None:
    identity = Identity.of(PARTS)
    assert identity.for_tenant("") is identity
    assert len({identity.digest, identity.for_tenant("a").digest, identity.for_tenant("b").digest}) == 3
    assert identity.for_tenant("a") == Identity.of(PARTS).for_tenant("a")
    assert identity.for_tenant("a").differing(identity.parts) == ["tenant"]


@given(ids, ids, st.integers(2, 8))
@settings(deadline=None, derandomize=True)
def test_addresses_are_equal_exactly_as_far_as_prefixes_are(a: list[int], b: list[int], page: int) -> None:
    identity = Identity.of(PARTS)
    ours = page_addresses(identity, np.array(a, np.int32), page)
    theirs = page_addresses(identity, np.array(b, np.int32), page)
    assert len(ours) == len(a) // page
    for k in range(min(len(ours), len(theirs))):
        assert (ours[k] == theirs[k]) == (a[: (k + 1) * page] == b[: (k + 1) * page])
    assert len(set(ours)) == len(ours)
    assert all(len(address) == DIGEST_BYTES for address in ours)
    others = page_addresses(identity.for_tenant("a"), np.array(a, np.int32), page)
    assert not set(others) & set(ours)


@given(ids, st.integers(2, 8), st.data())
@settings(deadline=None, derandomize=True)
def test_extending_known_addresses_gives_what_computing_all_gives(a: list[int], page: int, data: st.DataObject) -> None:
    identity = Identity.of(PARTS)
    every = page_addresses(identity, np.array(a, np.int32), page)
    known = data.draw(st.integers(0, len(every)))
    assert extend_addresses(identity, every[:known], np.array(a, np.int32), page) == every


def test_addresses_do_not_depend_on_how_ids_are_held() -> None:
    identity = Identity.of(PARTS)
    tokens = np.arange(40, dtype=np.int32)
    wanted = page_addresses(identity, tokens, 8)
    assert page_addresses(identity, tokens.astype(np.int64), 8) == wanted
    assert page_addresses(identity, np.repeat(tokens, 2)[::2], 8) == wanted
    assert page_addresses(identity, tokens.astype(">i4"), 8) == wanted


def test_the_digest_is_pinned() -> None:
    """Conversations stored by one version are found by the next: a change here needs a new format version."""
    identity = Identity.of({"weights": "w", "rope": 1.5})
    assert identity.digest.hex() == "de68bd20782b8d3864f08fa9e5e8a2cc"
    assert page_addresses(identity, np.arange(8, dtype=np.int32), 4)[1].hex() == "a429941cb5a109d64dc0c25d7f6731e1"
