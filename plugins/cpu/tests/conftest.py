"""What the tests of the cpu backend share."""

from __future__ import annotations

import pytest
from cpu_kit import instruction_sets
from strata_cpu import library


@pytest.fixture(scope="session", params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set in turn."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def no_plugin_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the core switch this plugin off for whole processes, and may have run in this one."""
    monkeypatch.delenv("STRATA_DISABLE_PLUGINS", raising=False)


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if not instruction_sets():
        pytest.skip(f"no kernels: {library.library_path()} was not built")
