"""The page stores that the pool is tested on: the reference's, in host memory, and the shadow's, apart from it."""

from __future__ import annotations

from collections.abc import Callable

from strata_core.compute.base import PageStore
from strata_core.memory.arena import PortableArena
from strata_core.pool.layout import PageLayout
from strata_core.testing.shadow import ShadowBackend

#: Makes stores with chunks of 8 pages.
MakeStore = Callable[[PageLayout], PageStore]


def shadow_store(layout: PageLayout) -> PageStore:
    return ShadowBackend(seed=1).page_store(layout, 8, PortableArena("off"))
