"""Makes the plugin importable without installing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def no_plugin_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the core switch this plugin off for whole processes, and may have run in this one."""
    monkeypatch.delenv("STRATA_DISABLE_PLUGINS", raising=False)
