"""How levels fill, and what leaves them: order, protection, demotion, faults."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from ladder_world import Shelf, World, new_scene, room, tokens

from strata_core.conversations.ladder import over, victims
from strata_core.errors import LevelError
from strata_core.store.base import Usage
from strata_core.store.ram import RamLevel
from strata_core.testing.faults import FaultyLevel
from strata_core.testing.scene import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = new_scene()
    yield scene
    assert scene.used == 0


def ram(scene: Scene, entries: float = 3, max_entries: int = 1000) -> RamLevel:
    return RamLevel(scene.pools, copies=False, max_bytes=room(scene, entries), max_entries=max_entries)


# -- taking in --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leave_until_the_new_one_fits(scene: Scene) -> None:
    world = World.build(ram(scene), scene=scene)
    for number, used in ((1, 30.0), (2, 10.0), (3, 20.0)):
        world.put(number, used=used)
    world.put(4, used=40.0)
    assert world.kept() == [1, 3, 4]
    world.put(5, count=20, used=50.0)
    assert world.kept() == [4, 5]
    assert world.left == [(n, "ram", "evicted: budget", None) for n in (2, 3, 1)]
    assert world.ladder.counts["evictions"] == 3
    world.close()


def test_entries_leave_for_the_bound_on_their_number_too(scene: Scene) -> None:
    world = World.build(ram(scene, entries=100, max_entries=2), scene=scene)
    for number in (1, 2, 3):
        world.put(number)
    assert world.kept() == [2, 3]
    world.close()


def test_the_entry_taken_in_is_no_victim_of_its_own_pass_although_it_was_used_first(scene: Scene) -> None:
    world = World.build(ram(scene), scene=scene)
    for number in (1, 2, 3):
        world.put(number)
    world.put(4, used=0.0)
    assert world.kept() == [2, 3, 4]
    world.close()


def test_what_could_never_fit_is_refused_before_anything_leaves(scene: Scene) -> None:
    world = World.build(ram(scene), scene=scene)
    for number in (1, 2):
        world.put(number)
    assert world.put(3, count=300) is None
    assert world.kept() == [1, 2]
    assert world.left == []
    assert world.troubles == []
    world.close()


def test_pinned_and_guarded_entries_stay_whatever_comes(scene: Scene) -> None:
    world = World.build(ram(scene), scene=scene)
    world.put(1, pinned=True)
    world.put(2)
    guarded = world.entry(2)
    world.put(3)
    world.ladder.guard(guarded)
    world.put(4)
    assert world.kept() == [1, 2, 4]
    assert world.put(5, count=20) is None  # there is room for one, beside the two that stay
    assert world.kept() == [1, 2, 4]
    world.ladder.unguard(guarded)
    world.put(5, count=14)
    assert world.kept() == [1, 5]
    world.close()


def test_a_guard_holds_until_the_last_one_ends(scene: Scene) -> None:
    world = World.build(ram(scene, entries=1), scene=scene)
    world.put(1)
    entry = world.entry(1)
    world.ladder.guard(entry)
    world.ladder.guard(entry)
    world.ladder.unguard(entry)
    assert world.put(2) is None
    world.ladder.unguard(entry)
    assert world.put(2) is not None
    assert world.kept() == [2]
    world.close()


def test_what_shares_its_pages_with_those_that_stay_fits_where_alone_it_would_not(scene: Scene) -> None:
    system = 40
    bound = room(scene, 1, system) + room(scene, 1.2)
    world = World.build(RamLevel(scene.pools, copies=False, max_bytes=bound, max_entries=10), scene=scene)
    assert world.put(1, count=system)
    entry = scene.entry([*tokens(1, system), 7, 7])
    pages = scene.pages(entry)
    assert world.ladder.put(entry, pages) is not None
    pages.release()
    assert len(world.ladder.levels[0].entries()) == 2
    assert world.left == []
    world.close()


# -- going down -------------------------------------------------------------------------------------------------------


def test_a_victim_goes_to_the_next_level_with_its_contents_and_its_age(scene: Scene) -> None:
    shelf = Shelf(scene, room(scene, 2))
    world = World.build(shelf, ram(scene, 1), scene=scene)  # in any order: the rank counts
    world.put(1, pinned=False)
    first = world.entry(1)
    world.put(2)
    assert (world.kept(0), world.kept(1)) == ([2], [1])
    assert world.left == [(1, "ram", "evicted: budget", "shelf")]
    assert (world.ladder.counts["demotions"], world.ladder.counts["evictions"]) == (1, 0)
    moved = world.entry(1)
    assert (moved.id, moved.used, moved.created) == (first.id, first.used, first.created)
    pages = scene.restore(shelf, moved, 10)
    assert scene.holds(pages, moved)
    pages.release()
    world.close()


def test_only_what_the_last_level_lets_go_is_lost(scene: Scene) -> None:
    world = World.build(ram(scene, 1), Shelf(scene, room(scene, 1)), scene=scene)
    for number in (1, 2, 3):
        world.put(number)
    assert (world.kept(0), world.kept(1)) == ([3], [2])
    assert world.left == [
        (1, "ram", "evicted: budget", "shelf"),
        (1, "shelf", "evicted: budget", None),
        (2, "ram", "evicted: budget", "shelf"),
    ]
    assert (world.ladder.counts["demotions"], world.ladder.counts["evictions"]) == (2, 0)
    world.close()


def test_what_one_level_has_no_room_for_goes_to_the_next(scene: Scene) -> None:
    world = World.build(ram(scene, 1), Shelf(scene, room(scene, 9)), scene=scene)
    world.put(1)
    level = world.put(2, count=80)
    assert level is world.ladder.levels[1]
    assert (world.kept(0), world.kept(1)) == ([1], [2])
    world.close()


def test_the_first_level_can_be_passed_by(scene: Scene) -> None:
    world = World.build(ram(scene), Shelf(scene, room(scene, 3)), scene=scene)
    world.put(1, first=1)
    assert (world.kept(0), world.kept(1)) == ([], [1])
    world.close()


def test_a_guarded_entry_stays_on_the_lower_level_while_a_victim_comes_down(scene: Scene) -> None:
    world = World.build(ram(scene, 1), Shelf(scene, room(scene, 1)), scene=scene)
    world.put(1)
    world.put(2)  # 1 goes down
    guarded = world.entry(1)
    world.ladder.guard(guarded)
    world.put(3)  # 2 has nowhere to go
    assert (world.kept(0), world.kept(1)) == ([3], [1])
    assert world.left[-1] == (2, "ram", "evicted: budget", None)
    world.ladder.unguard(guarded)
    world.close()


# -- looking up -------------------------------------------------------------------------------------------------------


def test_a_lower_level_is_used_only_where_it_shares_strictly_more(scene: Scene) -> None:
    world = World.build(ram(scene), Shelf(scene, room(scene, 9)), scene=scene)
    world.put(1, count=10)
    world.put(1, count=10, first=1, used=9999.0)
    found = world.ladder.find(scene.query(tokens(1, 20)))
    assert found is not None
    assert (found.level.name, found.shared) == ("ram", 10)
    world.put(1, count=11, first=1)
    found = world.ladder.find(scene.query(tokens(1, 20)))
    assert found is not None
    assert (found.level.name, found.shared) == ("shelf", 11)
    world.close()


def test_of_equals_on_a_level_the_latest_used_is_found(scene: Scene) -> None:
    world = World.build(ram(scene, 9), scene=scene)
    for number, used in ((90, 1.0), (91, 3.0), (92, 2.0)):
        entry = scene.entry([*tokens(1, 10), number], used=used)
        pages = scene.pages(entry)
        world.ladder.put(entry, pages)
        pages.release()
    found = world.ladder.find(scene.query(tokens(1, 20)))
    assert found is not None
    assert (found.entry.tokens[-1], found.shared) == (91, 10)
    world.close()


def test_what_is_used_is_the_last_to_leave(scene: Scene) -> None:
    world = World.build(ram(scene), scene=scene)
    for number in (1, 2, 3):
        world.put(number)
    found = world.ladder.find(scene.query(tokens(1, 10)))
    assert found is not None
    world.ladder.touch(found)
    world.put(4)
    assert world.kept() == [1, 3, 4]
    world.close()


# -- replaced copies --------------------------------------------------------------------------------------------------


def test_beginnings_of_a_newer_copy_are_dropped_and_nothing_else(scene: Scene) -> None:
    world = World.build(ram(scene, 20), scene=scene)
    kept = [
        scene.put(world.ladder.levels[0], ids, **fields)  # type: ignore[arg-type]
        for ids, fields in (
            (tokens(1, 12), {"pinned": True}),
            ([*tokens(1, 9), 99], {}),
            (tokens(1, 30), {}),
            (tokens(1, 12), {"identity": scene.identity.for_tenant("other")}),
            (tokens(2, 12), {}),
        )
    ]
    for count in (1, 8, 12, 20):
        scene.put(world.ladder.levels[0], tokens(1, count))
    newer = scene.put(world.ladder.levels[0], tokens(1, 20))
    assert world.ladder.supersede(newer, world.ladder.levels[0]) == 4
    assert {e.id for e in world.ladder.levels[0].entries()} == {e.id for e in [*kept, newer]}
    assert world.ladder.counts["superseded"] == 4
    assert world.left == []
    world.close()


def test_a_copy_further_down_stays_until_the_newer_one_comes_there(scene: Scene) -> None:
    world = World.build(ram(scene, 2), Shelf(scene, room(scene, 9)), scene=scene)
    world.put(1, count=8, first=1)
    world.put(1, count=12)
    newer = next(iter(world.ladder.levels[0].entries()))
    assert world.ladder.supersede(newer, world.ladder.levels[0]) == 0
    assert [len(e.tokens) for e in world.ladder.levels[1].entries()] == [8]
    world.put(2)
    world.put(3)  # 1 goes down
    assert [len(e.tokens) for e in world.ladder.levels[1].entries()] == [12]
    world.close()


def test_a_guarded_beginning_stays(scene: Scene) -> None:
    world = World.build(ram(scene, 9), scene=scene)
    old, new = (scene.put(world.ladder.levels[0], tokens(1, count)) for count in (8, 12))
    world.ladder.guard(old)
    assert world.ladder.supersede(new, world.ladder.levels[0]) == 0
    world.ladder.unguard(old)
    world.close()


# -- memory pressure --------------------------------------------------------------------------------------------------


def test_shedding_lets_the_oldest_in_ram_go_and_says_when_none_can(scene: Scene) -> None:
    world = World.build(ram(scene), Shelf(scene, room(scene, 1)), scene=scene)
    world.put(1)
    world.put(2, pinned=True)
    assert world.ladder.shed()
    assert (world.kept(0), world.kept(1)) == ([2], [1])
    assert world.left == [(1, "ram", "evicted: memory", "shelf")]
    assert not world.ladder.shed()
    world.close()


def test_without_a_level_in_ram_nothing_is_shed(scene: Scene) -> None:
    world = World.build(Shelf(scene, room(scene, 3)), scene=scene)
    world.put(1)
    assert not world.ladder.shed()
    assert world.kept() == [1]
    assert not World.build(scene=scene).ladder.shed()
    world.close()


def test_a_level_that_rejects_when_full_keeps_what_it_has(scene: Scene) -> None:
    shelf = Shelf(scene, room(scene, 2))
    shelf.when_full = "reject"
    cellar = Shelf(scene, room(scene, 3), "cellar", 20)
    world = World.build(ram(scene, 1), shelf, cellar, scene=scene)
    for number in (1, 2, 3, 4):
        world.put(number)
    assert (world.kept(0), world.kept(1), world.kept(2)) == ([4], [1, 2], [3])
    assert world.ladder.counts["evictions"] == world.ladder.counts["disk_evictions"] == 0
    world.close()


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LevelError("disk full"), RuntimeError("a bug in a plugin")], ids=["foreseen", "bug"])
@pytest.mark.parametrize("method", ["put", "usage", "cost", "weigh"])
def test_a_level_that_fails_is_passed_by(scene: Scene, method: str, error: Exception) -> None:
    faulty = FaultyLevel(Shelf(scene, room(scene, 3)))
    world = World.build(ram(scene, 1), faulty, Shelf(scene, room(scene, 3), "cellar", 20), scene=scene)
    world.put(1)
    faulty.faults[method] = error
    world.put(2)
    assert ("shelf", error) in world.troubles
    faulty.faults.clear()
    assert (world.kept(0), world.kept(1), world.kept(2)) == ([2], [], [1])
    world.close()


def test_when_the_level_below_fails_ram_keeps_to_its_bound_all_the_same(scene: Scene) -> None:
    faulty = FaultyLevel(Shelf(scene, room(scene, 3)))
    world = World.build(ram(scene, 1), faulty, scene=scene)
    faulty.faults["put"] = LevelError("no space left on device")
    world.put(1)
    world.put(2)
    assert world.kept(0) == [2]
    assert world.left == [(1, "ram", "evicted: budget", None)]
    assert world.ladder.counts["evictions"] == 1
    assert [name for name, _ in world.troubles] == ["shelf"]
    world.close()


def test_a_level_that_cannot_be_searched_hides_only_its_own(scene: Scene) -> None:
    faulty = FaultyLevel(ram(scene))
    world = World.build(faulty, Shelf(scene, room(scene, 3)), scene=scene)
    world.put(1, count=10)
    world.put(1, count=6, first=1)
    for error in (LevelError("cannot be read"), KeyError("a bug")):
        faulty.faults["find"] = error
        found = world.ladder.find(scene.query(tokens(1, 20)))
        assert found is not None
        assert (found.level.name, found.shared) == ("shelf", 6)
    assert [name for name, _ in world.troubles] == ["ram", "ram"]
    world.close()


def test_an_entry_that_cannot_be_removed_does_not_hang_the_ladder(scene: Scene) -> None:
    faulty = FaultyLevel(ram(scene, 1))
    world = World.build(faulty, scene=scene)
    world.put(1)
    faulty.faults["remove"] = LevelError("locked")
    assert world.put(2) is None
    assert not world.ladder.shed()
    newer = scene.entry(tokens(1, 20))
    assert world.ladder.supersede(newer, faulty) == 0
    assert world.kept() == [1]
    faulty.faults.clear()
    world.close()


def test_a_poll_that_fails_does_not_keep_others_from_theirs(scene: Scene) -> None:
    faulty = FaultyLevel(Shelf(scene, room(scene, 3)))
    cellar = Shelf(scene, room(scene, 3), "cellar", 20)
    world = World.build(faulty, cellar, scene=scene)
    world.put(1)
    world.put(2, first=1)
    faulty.faults["poll"] = RuntimeError("a bug")
    assert scene.used == 6
    while cellar.busy():
        world.ladder.poll()
    assert scene.used == 3
    assert {name for name, _ in world.troubles} == {"shelf"}
    world.close()


# -- pure parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "entries", "max_bytes", "max_entries", "cost", "exceeds"),
    [
        (90, 1, 100, None, 10, False),
        (90, 1, 100, None, 11, True),
        (0, 0, 100, None, 101, True),
        (90, 1, None, 2, 1000, False),
        (90, 2, None, 2, 0, True),
        (90, 2, None, None, 1000, False),
        (0, 0, 0, None, 1, True),
    ],
)
def test_over_either_bound(
    used: int, entries: int, max_bytes: int | None, max_entries: int | None, cost: int, exceeds: bool
) -> None:
    assert over(Usage(used, entries, max_bytes, max_entries), cost) is exceeds


def test_victims_are_those_that_nobody_protects_oldest_first(scene: Scene) -> None:
    entries = [scene.entry([n], used=used) for n, used in enumerate((5.0, 1.0, 4.0, 2.0, 3.0))]
    entries[1] = attrs.evolve(entries[1], pinned=True)
    order = victims(entries, frozenset({entries[3].id}))
    assert np.array([entry.used for entry in order]).tolist() == [3.0, 4.0, 5.0]
