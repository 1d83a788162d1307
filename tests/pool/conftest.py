from __future__ import annotations

import pytest
from pool_stores import MakeStore, shadow_store

from strata_core.testing.scene import numpy_store


@pytest.fixture(params=[numpy_store, shadow_store], ids=["numpy", "shadow"])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    make: MakeStore = request.param
    return make
