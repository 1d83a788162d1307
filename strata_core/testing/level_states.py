"""What every storage level must pass that keeps conversations of models with recurrent state.

Subclass :class:`StateTests` beside :class:`strata_core.testing.levels.LevelTests`, with the same fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from strata_core.compute.base import PageStore
from strata_core.errors import DamagedEntry
from strata_core.pool.layout import PageLayout
from strata_core.store.base import Entry, Level
from strata_core.testing.levels import PLENTY, MakeLevel, Reopen, tokens
from strata_core.testing.scene import LAYOUTS, STATES, Scene, numpy_store


class StateTests:
    """Entries are offered as far as their deepest usable state, and come back with all states they are asked for."""

    def make_store(self, layout: PageLayout) -> PageStore:
        """The memory of the engine's pages. Override it to test with a device's."""
        return numpy_store(layout)

    @pytest.fixture
    def scene(self) -> Iterator[Scene]:
        scene = Scene.build(LAYOUTS["one layout"], self.make_store, states=STATES)
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

    def test_an_entry_is_offered_up_to_its_deepest_state_that_leaves_a_token_to_read(
        self, scene: Scene, level: Level
    ) -> None:
        entry = scene.put(level, tokens(1, 18), states=(8, 12, 18))
        for asked, shared in ((30, 18), (19, 18), (18, 12), (13, 12), (12, 8), (9, 8)):
            assert [(e.id, n) for e, n in level.find(scene.query(tokens(1, asked)))] == [(entry.id, shared)]
        for asked in (8, 5, 1):
            assert level.find(scene.query(tokens(1, asked))) == []

    def test_what_shares_less_and_can_be_resumed_deeper_comes_first(self, scene: Scene, level: Level) -> None:
        scene.put(level, tokens(1, 20), states=(4, 20))
        best = scene.put(level, tokens(1, 12), states=(12,))
        scene.put(level, tokens(1, 30), states=(8, 30))
        [(found, shared), *_] = level.find(scene.query(tokens(1, 20)))
        assert (found.id, shared) == (best.id, 12)

    @pytest.mark.parametrize("settle", [False, True])
    def test_pages_and_states_come_back_as_they_were_put(self, scene: Scene, level: Level, settle: bool) -> None:
        entry = scene.put(level, tokens(1, 18), states=(8, 12, 18))
        if settle:
            level.flush()
            level.poll()
        [found] = level.entries()
        assert found.states == (8, 12, 18)
        for count in (8, 12, 18):
            pages = scene.restore(level, entry, count)
            assert pages.states is not None
            assert pages.states.positions == tuple(p for p in (8, 12, 18) if p <= count)
            assert scene.holds(pages, entry)
            pages.release()

    def test_states_count_and_those_at_page_boundaries_are_shared(self, scene: Scene, level: Level) -> None:
        plain = scene.entry(tokens(1, 16), states=())
        first = scene.entry(tokens(1, 16), states=(8, 16))
        assert level.cost(first) >= level.cost(plain) + 2 * STATES.nbytes
        pages = scene.pages(first)
        level.put(first, pages)
        pages.release()
        longer = scene.entry(tokens(1, 18), states=(8, 16, 18))
        assert level.cost(longer) < level.cost(scene.entry(tokens(2, 18), states=(8, 16, 18))) - 2 * STATES.nbytes
        before = level.usage().bytes
        cost = level.cost(longer)
        pages = scene.pages(longer)
        level.put(longer, pages)
        pages.release()
        assert level.usage().bytes == before + cost == level.weigh([first, longer])
        level.remove(first)
        assert level.usage().bytes == level.weigh([longer])
        restored = scene.restore(level, longer, 18)
        assert scene.holds(restored, longer)
        restored.release()

    def test_removing_the_last_user_of_a_state_frees_it(self, scene: Scene, level: Level) -> None:
        empty = level.usage()
        for seed in (1, 2):
            level.remove(scene.put(level, tokens(seed, 11), states=(4, 11)))
        assert level.usage() == empty


class PersistentStateTests(StateTests):
    """The same for levels that outlive the process."""

    @pytest.fixture
    def reopen(self) -> Reopen:
        raise NotImplementedError("override the fixture reopen")

    def damage_state(self, level: Level, entry: Entry, position: int) -> None:
        """Change a byte of the stored state of an entry at a position."""
        raise NotImplementedError("override damage_state")

    def test_states_survive_the_process(self, scene: Scene, make_level: MakeLevel, reopen: Reopen) -> None:
        level = make_level(scene, PLENTY)
        put = [scene.put(level, tokens(seed, 18), states=(8, 12, 18)) for seed in (1, 2)]
        level.flush()
        level.poll()
        used = level.usage()
        level = reopen(scene, level)
        assert level.usage() == used
        for entry in put:
            [(found, shared)] = level.find(scene.query(tokens(1 if entry is put[0] else 2, 25)))
            assert (found.id, found.states, shared) == (entry.id, (8, 12, 18), 18)
            pages = scene.restore(level, entry, 18)
            assert scene.holds(pages, entry)
            pages.release()
        level.close()

    def test_a_damaged_state_costs_itself_and_nothing_else(self, scene: Scene, level: Level) -> None:
        entry = scene.put(level, tokens(1, 18), states=(8, 12, 18))
        self.damage_state(level, entry, 12)
        with pytest.raises(DamagedEntry) as caught:
            scene.restore(level, entry, 18)
        assert caught.value.good_tokens == 8
        [(found, shared)] = level.find(scene.query(tokens(1, 25)))
        assert (found.states, shared) == ((8, 18), 18)
        pages = scene.restore(level, attrs.evolve(entry, states=(8, 18)), 18)
        assert scene.holds(pages, entry)
        pages.release()
