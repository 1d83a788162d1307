"""The RAM level keeps the level contract: with references to the engine's pages, and with copies of a device's."""

from __future__ import annotations

import pytest

from strata_core.compute.base import PageStore
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool
from strata_core.store.ram import RamLevel
from strata_core.testing.levels import LevelTests, MakeLevel
from strata_core.testing.scene import Scene, numpy_store
from strata_core.testing.shadow import ShadowBackend


class TestReferences(LevelTests):
    @pytest.fixture
    def make_level(self) -> MakeLevel:
        return lambda scene, max_bytes: RamLevel(scene.pools, copies=False, max_bytes=max_bytes, max_entries=2000)


class TestCopies(LevelTests):
    def make_store(self, layout: PageLayout) -> PageStore:
        return ShadowBackend(seed=layout.nbytes).page_store(layout, 8, PortableArena("off"))

    @pytest.fixture
    def make_level(self) -> MakeLevel:
        def make(scene: Scene, max_bytes: int) -> RamLevel:
            pools = [PagePool(numpy_store(pool.layout), 1 << 16) for pool in scene.pools]
            return RamLevel(pools, copies=True, max_bytes=max_bytes, max_entries=2000)

        return make
