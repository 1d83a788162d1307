"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.errors import NotFound
from strata_core.weights.catalogue import DEFAULT, resolve


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The installed default model. A test that asks for it is marked ``model``."""
    try:
        return resolve(DEFAULT)
    except NotFound as error:
        pytest.skip(str(error))
