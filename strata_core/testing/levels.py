"""What every storage level must pass. Subclass :class:`LevelTests`, or :class:`PersistentLevelTests` for a level that
outlives the process, and give it the fixture ``make_level``::

    class TestMyLevel(LevelTests):
        @pytest.fixture
        def make_level(self, tmp_path):
            return lambda scene, max_bytes: MyLevel(tmp_path / "entries", scene.pools, max_bytes)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest

from strata_core.compute.base import PageStore
from strata_core.conversations.identity import Identity
from strata_core.errors import DamagedEntry, LevelError
from strata_core.pool.layout import PageLayout
from strata_core.store.base import Entry, Level, Outcome
from strata_core.testing.scene import LAYOUTS, PAGE_TOKENS, Scene, numpy_store

#: Makes a level for the pools of a scene that may hold so many bytes, and any number of entries.
MakeLevel = Callable[[Scene, int], Level]
#: Closes a level and opens it again on what it left behind, with the same bound.
Reopen = Callable[[Scene, Level], Level]

#: More than any test here stores.
PLENTY = 1 << 26

#: Lengths around the edges of pages.
LENGTHS = (1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS, 3 * PAGE_TOKENS + 2)


def tokens(seed: int, count: int) -> np.ndarray:
    """``count`` random ids; the same, as far as they go, for the same seed."""
    return np.random.default_rng(seed).integers(0, 1000, 4096).astype(np.int32)[:count]


class LevelTests:
    """The level contract, see :mod:`strata_core.store.base`. Every test runs for several sets of page layouts."""

    def make_store(self, layout: PageLayout) -> PageStore:
        """The memory of the engine's pages. Override it to test with a device's."""
        return numpy_store(layout)

    def damage(self, level: Level, entry: Entry) -> bool:
        """Change a byte of what is stored of the entry's pages. False where nothing can, as in memory."""
        return False

    @pytest.fixture(params=list(LAYOUTS))
    def scene(self, request: pytest.FixtureRequest) -> Iterator[Scene]:
        scene = Scene.build(LAYOUTS[request.param], self.make_store)
        yield scene
        assert scene.used == 0, "pages of the engine's pools are still held"

    @pytest.fixture
    def make_level(self) -> MakeLevel:
        raise NotImplementedError("override the fixture make_level")

    @pytest.fixture
    def level(self, scene: Scene, make_level: MakeLevel) -> Iterator[Level]:
        level = make_level(scene, PLENTY)
        yield level
        level.close()

    # -- lookup -------------------------------------------------------------------------------------------------

    def test_a_new_level_is_empty(self, scene: Scene, level: Level) -> None:
        usage = level.usage()
        assert (usage.bytes, usage.entries, usage.max_bytes) == (0, 0, PLENTY)
        assert list(level.entries()) == []
        assert level.find(scene.query(tokens(1, 10))) == []

    @pytest.mark.parametrize("length", LENGTHS)
    def test_what_was_put_is_found_at_once(self, scene: Scene, level: Level, length: int) -> None:
        entry = scene.put(level, tokens(1, length))
        for asked in (*LENGTHS, 100):
            [(found, shared)] = level.find(scene.query(tokens(1, asked)))
            assert (found.id, shared) == (entry.id, min(length, asked))

    def test_an_entry_comes_back_as_it_was_put(self, scene: Scene, level: Level) -> None:
        tenant = scene.identity.for_tenant("someone")
        put = scene.put(
            level, tokens(1, 10), identity=tenant, tenant="someone", reason="rewind", pinned=True, used=5.25,
            turns=(0, 4, 7), root=True,
        )  # fmt: skip
        [(found, _)] = level.find(scene.query(tokens(1, 10), tenant))
        for entry in (found, *level.entries()):
            assert _same(entry, put)
            assert entry.tokens.dtype == np.int32
            assert not entry.tokens.flags.writeable

    def test_the_entries_that_share_most_come_first(self, scene: Scene, level: Level) -> None:
        random = np.random.default_rng(3)
        stored = [scene.put(level, random.integers(0, 2, random.integers(1, 12)).astype(np.int32)) for _ in range(40)]
        for _ in range(60):
            prompt = random.integers(0, 2, random.integers(1, 14)).astype(np.int32)
            true = {entry.id: _common(entry.tokens, prompt) for entry in stored}
            found = level.find(scene.query(prompt))
            counts = [shared for _, shared in found]
            assert counts == sorted(counts, reverse=True)
            assert all(shared == true[entry.id] > 0 for entry, shared in found)
            most = max(true.values())
            listed = {entry.id for entry, shared in found if shared == most}
            assert listed == {key for key, shared in true.items() if shared == most > 0}

    def test_without_the_longest_the_next_is_found(self, scene: Scene, level: Level) -> None:
        entries = [scene.put(level, tokens(1, count)) for count in (2, 6, 13, 20)]
        excluded: set[str] = set()
        for entry in reversed(entries):
            assert level.find(scene.query(tokens(1, 30)), frozenset(excluded))[0][0].id == entry.id
            excluded.add(entry.id)
        assert level.find(scene.query(tokens(1, 30)), frozenset(excluded)) == []

    def test_equal_addresses_are_no_match_where_tokens_differ(self, scene: Scene, level: Level) -> None:
        forged = scene.entry(tokens(1, 2 * PAGE_TOKENS))
        other = tokens(1, 2 * PAGE_TOKENS).copy()
        other[1] += 1
        pages = scene.pages(forged)
        level.put(attrs.evolve(forged, tokens=other), pages)
        pages.release()
        assert all(shared <= 1 for _, shared in level.find(scene.query(forged.tokens)))

    def test_another_identity_finds_nothing(self, scene: Scene, level: Level) -> None:
        scene.put(level, tokens(1, 20))
        for identity in (scene.identity.for_tenant("other"), Identity.of({"weights": "others"})):
            assert level.find(scene.query(tokens(1, 20), identity)) == []

    def test_beginnings_are_the_entries_that_a_longer_one_replaces(self, scene: Scene, level: Level) -> None:
        shorter, equal, longer = (scene.put(level, tokens(1, count)) for count in (3, 9, 12))
        scene.put(level, tokens(2, 3))
        scene.put(level, tokens(1, 3), identity=scene.identity.for_tenant("other"))
        newer = scene.put(level, tokens(1, 9))
        assert {e.id for e in level.beginnings(newer)} == {shorter.id, equal.id}
        assert level.holds(longer.id)
        assert not level.holds("unknown")

    # -- contents -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", LENGTHS)
    def test_contents_come_back_byte_by_byte(self, scene: Scene, level: Level, length: int) -> None:
        entry = scene.put(level, tokens(1, length))
        scene.put(level, tokens(2, length))
        for wanted in (n for n in LENGTHS if n <= length):
            pages = scene.restore(level, entry, wanted)
            assert pages.tokens == wanted
            assert scene.holds(pages, entry)
            pages.release()

    def test_entries_with_a_common_prefix_keep_their_own_contents(self, scene: Scene, level: Level) -> None:
        prompt = tokens(1, 2 * PAGE_TOKENS)
        entries = [scene.put(level, np.append(prompt, tokens(seed, 6))) for seed in (2, 3, 4)]
        entries.append(scene.put(level, prompt[:-1]))
        level.remove(entries.pop(0))
        for entry in entries:
            _check_contents(scene, level, entry)

    def test_pages_that_were_put_may_be_used_for_something_else(self, scene: Scene, level: Level) -> None:
        entry = scene.put(level, tokens(1, 11))
        others = [scene.pages(scene.entry(tokens(seed, 40))) for seed in range(10, 14)]
        _check_contents(scene, level, entry)
        for pages in others:
            pages.release()

    def test_writing_to_restored_pages_changes_nothing_stored(self, scene: Scene, level: Level) -> None:
        entry = scene.put(level, tokens(1, 11))
        pages = scene.restore(level, entry, 11)
        for pool, table in zip(pages.pools, pages.tables, strict=True):
            pool.store.upload(np.zeros((len(table), pool.layout.nbytes), np.uint8), table).wait()
        pages.release()
        _check_contents(scene, level, entry)

    def test_held_pages_have_the_contents(self, scene: Scene, level: Level) -> None:
        entry = scene.put(level, tokens(1, 11))
        held = level.held(entry)
        if held is not None:
            assert held.tokens == len(entry.tokens)
            assert scene.holds(held, entry)

    def test_a_damaged_entry_is_refused_and_never_offered_again(self, scene: Scene, level: Level) -> None:
        good, bad = scene.put(level, tokens(1, 11)), scene.put(level, tokens(2, 11))
        if self.damage(level, bad):
            assert level.held(bad) is None
            with pytest.raises(DamagedEntry):
                scene.restore(level, bad, 11)
            assert level.find(scene.query(bad.tokens)) == []
        _check_contents(scene, level, good)

    # -- accounts -----------------------------------------------------------------------------------------------

    def test_cost_is_what_put_adds_and_weight_is_what_is_held(self, scene: Scene, level: Level) -> None:
        random = np.random.default_rng(5)
        held: list[Entry] = []
        for step in range(60):
            if held and step % 3 == 2:
                level.remove(held.pop(int(random.integers(len(held)))))
            else:
                entry = scene.entry(random.integers(0, 2, random.integers(1, 14)).astype(np.int32))
                cost, before = level.cost(entry), level.usage().bytes
                assert level.weigh([*held, entry]) == before + cost
                pages = scene.pages(entry)
                level.put(entry, pages)
                pages.release()
                held.append(entry)
                assert level.usage().bytes == before + cost
            assert level.usage().bytes == level.weigh(held)
            assert level.usage().entries == len(level.entries()) == len(held)
        assert level.weigh([]) == 0

    def test_an_entry_costs_at_least_its_pages(self, scene: Scene, level: Level) -> None:
        for length in LENGTHS:
            entry = scene.entry(tokens(length, length))
            blocks = scene.pools[0].layout.pages_for(length)
            assert level.cost(entry) >= blocks * scene.block_bytes

    def test_what_exceeds_the_bound_is_refused_whole(self, scene: Scene, make_level: MakeLevel) -> None:
        probe = make_level(scene, PLENTY)
        bound = probe.weigh([scene.entry(tokens(seed, 20)) for seed in (1, 2)])
        probe.close()
        level = make_level(scene, bound)
        kept = [scene.put(level, tokens(seed, 20)) for seed in (1, 2)]
        level.settle()
        before, used = level.usage(), scene.used
        assert before.bytes == bound
        with pytest.raises(LevelError):
            scene.put(level, tokens(3, 1))
        level.settle()
        assert (level.usage(), scene.used) == (before, used)
        assert level.find(scene.query(tokens(3, 1))) == []
        level.remove(kept.pop(0))
        scene.put(level, tokens(3, 1))
        _check_contents(scene, level, kept[0])
        level.close()

    def test_update_takes_over_use_and_pin(self, scene: Scene, level: Level) -> None:
        entry = scene.put(level, tokens(1, 11))
        before = level.usage()
        changed = attrs.evolve(entry, used=entry.used + 100.5, pinned=True)
        level.update(changed)
        assert [_same(e, changed) for e in level.entries()] == [True]
        assert _same(level.find(scene.query(entry.tokens))[0][0], changed)
        assert level.usage() == before
        _check_contents(scene, level, changed)

    def test_a_removed_entry_is_gone(self, scene: Scene, level: Level) -> None:
        empty = level.usage()
        entry = scene.put(level, tokens(1, 11))
        level.remove(entry)
        assert list(level.entries()) == []
        assert level.find(scene.query(entry.tokens)) == []
        assert level.usage() == empty
        _check_contents(scene, level, scene.put(level, tokens(1, 11)))

    @pytest.mark.parametrize("scene", ["one layout"], indirect=True)
    def test_a_thousand_entries(self, scene: Scene, level: Level) -> None:
        entries = []
        for number in range(1000):
            entries.append(scene.put(level, [number, *range(PAGE_TOKENS - 1 + number % 10)]))
            level.poll()
        assert level.usage().entries == 1000
        assert level.usage().bytes == level.weigh(entries)
        for entry in entries[::7]:
            assert level.find(scene.query(entry.tokens))[0][0].id == entry.id
        for entry in entries[::2]:
            level.remove(entry)
        assert level.usage().entries == 500
        assert level.usage().bytes == level.weigh(entries[1::2])
        assert {entry.id for entry in level.entries()} == {entry.id for entry in entries[1::2]}
        for entry in entries[1::98]:
            _check_contents(scene, level, entry)

    # -- outcomes and pages -------------------------------------------------------------------------------------

    def test_what_came_of_a_put_is_told_once_at_once_or_by_a_poll(self, scene: Scene, level: Level) -> None:
        for seed in range(3):
            entry = scene.entry(tokens(seed, 20))
            pages = scene.pages(entry)
            outcome = level.put(entry, pages)
            pages.release()
            told = [outcome] if outcome is not None else []
            told += _finish(level)
            assert [(o.kind, o.entry.id) for o in told] == [("stored", entry.id)]
            assert told[0].pages is None
            assert told[0].nbytes >= 0

    def test_background_work_ends_and_gives_pages_back(self, scene: Scene, level: Level) -> None:
        for seed in range(5):
            scene.put(level, tokens(seed, 20))
        _finish(level)
        used = scene.used
        level.settle()
        assert scene.used == used
        for entry in level.entries():
            _check_contents(scene, level, entry)

    def test_removing_and_closing_do_not_wait_for_a_poll(self, scene: Scene, make_level: MakeLevel) -> None:
        level = make_level(scene, PLENTY)
        level.remove(scene.put(level, tokens(1, 30)))
        scene.put(level, tokens(2, 30))
        level.close()
        assert scene.used == 0


class PersistentLevelTests(LevelTests):
    """For levels whose entries are there again after a restart."""

    @pytest.fixture
    def reopen(self) -> Reopen:
        raise NotImplementedError("override the fixture reopen")

    def test_entries_are_there_again(self, scene: Scene, make_level: MakeLevel, reopen: Reopen) -> None:
        level = make_level(scene, PLENTY)
        prompt = tokens(1, 2 * PAGE_TOKENS)
        entries = [scene.put(level, np.append(prompt, tokens(seed, 6)), pinned=seed == 2) for seed in (2, 3)]
        gone = scene.put(level, tokens(4, 9))
        level.remove(gone)
        entries[1] = attrs.evolve(entries[1], used=1.5)
        level.update(entries[1])
        before = level.usage()
        level = reopen(scene, level)
        assert level.usage() == before
        assert level.weigh(entries) == before.bytes
        for entry in entries:
            assert _same(level.find(scene.query(entry.tokens))[0][0], entry)
            _check_contents(scene, level, entry)
        assert level.find(scene.query(gone.tokens)) == []
        level.close()

    def test_damage_is_found_after_a_restart(self, scene: Scene, make_level: MakeLevel, reopen: Reopen) -> None:
        level = make_level(scene, PLENTY)
        good, bad = scene.put(level, tokens(1, 11)), scene.put(level, tokens(2, 11))
        assert self.damage(level, bad), "a level that persists must say how it can be damaged"
        level = reopen(scene, level)
        with pytest.raises(DamagedEntry):
            scene.restore(level, bad, 11)
        level = reopen(scene, level)
        assert level.find(scene.query(bad.tokens)) == []
        _check_contents(scene, level, good)
        level.close()


def _finish(level: Level) -> list[Outcome]:
    """Poll until all background work is done; what it came to."""
    told: list[Outcome] = []
    deadline = time.monotonic() + 30
    while level.busy():
        assert time.monotonic() < deadline, "background work does not end"
        told += level.poll()
    return [*told, *level.poll()]


def _check_contents(scene: Scene, level: Level, entry: Entry) -> None:
    pages = scene.restore(level, entry, len(entry.tokens))
    assert scene.holds(pages, entry)
    pages.release()


def _same(a: Entry, b: Entry) -> bool:
    """Whether two entries are equal in all fields."""
    return all(
        np.array_equal(getattr(a, field.name), getattr(b, field.name))
        if field.name == "tokens"
        else getattr(a, field.name) == getattr(b, field.name)
        for field in attrs.fields(Entry)
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
