from __future__ import annotations

import numpy as np

from strata_core.conversations.ghosts import Ghost, Ghosts
from strata_core.conversations.identity import Identity, page_addresses
from strata_core.conversations.index import Query

IDENTITY = Identity.of({"weights": "w"})


def ghost(tokens: list[int], reason: str = "gone", identity: Identity = IDENTITY) -> Ghost:
    ids = np.array(tokens, np.int32)
    return Ghost(identity.digest, ids, page_addresses(identity, ids, 4), reason)


def query(tokens: list[int], identity: Identity = IDENTITY) -> Query:
    made = ghost(tokens, identity=identity)
    return Query(made.identity, made.tokens, made.addresses)


def test_the_longest_speaks_and_among_equals_the_last_dropped() -> None:
    ghosts = Ghosts()
    ghosts.add(ghost([1, 2, 3], "short"))
    ghosts.add(ghost([1, 2, 3, 4, 5, 6], "first"))
    ghosts.add(ghost([1, 2, 3, 4, 5, 7], "second"))
    assert ghosts.longest(query([1, 2, 3, 4, 5, 6, 8])) == (6, "first")
    assert ghosts.longest(query([1, 2, 3, 4, 5, 8])) == (5, "second")
    assert ghosts.longest(query([9])) == (0, "")
    assert ghosts.longest(query([1, 2, 3], IDENTITY.for_tenant("a"))) == (0, "")


def test_the_oldest_are_forgotten_beyond_the_number_of_ghosts() -> None:
    ghosts = Ghosts(max_ghosts=3)
    for number in range(5):
        ghosts.add(ghost([number, number]))
    assert [ghosts.longest(query([number]))[0] for number in range(5)] == [0, 0, 1, 1, 1]


def test_the_oldest_are_forgotten_beyond_the_number_of_tokens() -> None:
    ghosts = Ghosts(max_tokens=10)
    ghosts.add(ghost([1] * 4))
    ghosts.add(ghost([2] * 4))
    ghosts.add(ghost([3] * 2))
    assert [ghosts.longest(query([n]))[0] for n in (1, 2, 3)] == [1, 1, 1]
    ghosts.add(ghost([4] * 5))
    assert [ghosts.longest(query([n]))[0] for n in (1, 2, 3, 4)] == [0, 0, 1, 1]


def test_what_is_empty_or_too_long_is_not_remembered_and_displaces_nothing() -> None:
    ghosts = Ghosts(max_tokens=10)
    ghosts.add(ghost([1] * 10))
    ghosts.add(ghost([]))
    ghosts.add(ghost([2] * 11))
    assert ghosts.longest(query([2])) == (0, "")
    assert ghosts.longest(query([1] * 12)) == (10, "gone")
