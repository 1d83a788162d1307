"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata_core.errors import NotFound
from strata_core.weights.catalogue import DEFAULT, resolve

# Servers that tests start are the core's own: plugins that happen to be installed would keep conversations in the
# user's folders and bring another backend. They have tests of their own.
os.environ.setdefault("STRATA_DISABLE_PLUGINS", "tiers,cpu")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The installed default model. A test that asks for it is marked ``model``."""
    try:
        return resolve(DEFAULT)
    except NotFound as error:
        pytest.skip(str(error))
