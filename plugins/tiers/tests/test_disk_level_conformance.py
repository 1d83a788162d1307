"""The warm and the cold level keep the level contract, with pages in host memory and with a device's."""

from __future__ import annotations

from pathlib import Path

import pytest
from strata_tiers.layout import Shape
from strata_tiers.level import DiskLevel, LevelOptions, Workshop

from strata_core.compute.base import PageStore
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.store.base import Entry, Level
from strata_core.testing.level_states import PersistentStateTests
from strata_core.testing.levels import MakeLevel, PersistentLevelTests, Reopen
from strata_core.testing.scene import Scene
from strata_core.testing.shadow import ShadowBackend


def open_level(scene: Scene, root: Path, max_bytes: int, name: str = "cold", rank: int = 20) -> DiskLevel:
    states = scene.state_pool
    pages = tuple(pool.layout.nbytes for pool in scene.pools)
    shape = Shape(scene.page_tokens, pages, 0 if states is None else states.layout.nbytes)
    return DiskLevel(name, rank, root, scene.identity, shape, LevelOptions(max_bytes), Workshop())


class TestColdLevel(PersistentLevelTests):
    @pytest.fixture
    def make_level(self, tmp_path: Path) -> MakeLevel:
        return lambda scene, max_bytes: open_level(scene, tmp_path / "level", max_bytes)

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Reopen:
        def reopen(scene: Scene, level: Level) -> Level:
            bound = level.usage().max_bytes
            assert bound is not None
            level.close()
            return open_level(scene, tmp_path / "level", bound)

        return reopen

    def damage(self, level: Level, entry: Entry) -> bool:
        assert isinstance(level, DiskLevel)
        level.flush()
        level.poll()
        part = level.place.holdings.kept[entry.id].parts[0]
        with level.place.segment_path(part).open("r+b") as file:
            file.seek(part.piece.size - 1)
            last = file.read(1)[0]
            file.seek(part.piece.size - 1)
            file.write(bytes([last ^ 1]))
        return True


class TestColdLevelWithStates(PersistentStateTests):
    make_level = TestColdLevel.make_level
    reopen = TestColdLevel.reopen

    def damage_state(self, level: Level, entry: Entry, position: int) -> None:
        assert isinstance(level, DiskLevel)
        level.flush()
        level.poll()
        [part] = [p for p in level.place.holdings.kept[entry.id].parts if p.piece.state and p.piece.stop == position]
        path = level.place.segment_path(part)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


class TestColdLevelWithStatesOfADevice(TestColdLevelWithStates):
    def make_store(self, layout: PageLayout) -> PageStore:
        return ShadowBackend(seed=layout.nbytes).page_store(layout, 8, PortableArena("off"))


class TestColdLevelOfADevice(TestColdLevel):
    def make_store(self, layout: PageLayout) -> PageStore:
        return ShadowBackend(seed=layout.nbytes).page_store(layout, 8, PortableArena("off"))

    test_a_thousand_entries = None  # they say nothing about a device, and take long to come from one
