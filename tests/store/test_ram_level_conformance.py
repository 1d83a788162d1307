"""The RAM level keeps the level contract: with references to the engine's pages, and with copies of a device's."""

from __future__ import annotations

import pytest

from strata_core.compute.base import PageStore
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.pool.pool import PagePool
from strata_core.store.ram import RamLevel
from strata_core.testing.level_states import StateTests
from strata_core.testing.levels import LevelTests, MakeLevel
from strata_core.testing.scene import Scene, numpy_store
from strata_core.testing.shadow import ShadowBackend


def refer(scene: Scene, max_bytes: int) -> RamLevel:
    return RamLevel(scene.pools, copies=False, max_bytes=max_bytes, max_entries=2000, state_pool=scene.state_pool)


def copy(scene: Scene, max_bytes: int) -> RamLevel:
    pools = [PagePool(numpy_store(pool.layout), 1 << 16) for pool in scene.pools]
    states = None if scene.state_pool is None else PagePool(numpy_store(scene.state_pool.layout), 1 << 16)
    return RamLevel(pools, copies=True, max_bytes=max_bytes, max_entries=2000, state_pool=states)


def on_a_device(layout: PageLayout) -> PageStore:
    return ShadowBackend(seed=layout.nbytes).page_store(layout, 8, PortableArena("off"))


class TestReferences(LevelTests):
    @pytest.fixture
    def make_level(self) -> MakeLevel:
        return refer


class TestCopies(LevelTests):
    def make_store(self, layout: PageLayout) -> PageStore:
        return on_a_device(layout)

    @pytest.fixture
    def make_level(self) -> MakeLevel:
        return copy


class TestStatesByReference(StateTests):
    @pytest.fixture
    def make_level(self) -> MakeLevel:
        return refer


class TestCopiedStates(StateTests):
    def make_store(self, layout: PageLayout) -> PageStore:
        return on_a_device(layout)

    @pytest.fixture
    def make_level(self) -> MakeLevel:
        return copy
