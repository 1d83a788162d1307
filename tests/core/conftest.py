"""What the tests of the core share: plugin modules written on the fly, and runs of the command line."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from strata_core.cli import main


@pytest.fixture
def plugin_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], EntryPoint]:
    """Write a plugin module that can be imported; returns an entry point for it, of the module's name."""
    monkeypatch.syspath_prepend(tmp_path)
    head = "from strata_core.hookspecs import hookimpl\n"

    def write(name: str, source: str) -> EntryPoint:
        (tmp_path / f"{name}.py").write_text(head + textwrap.dedent(source))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return EntryPoint(name, name, "strata")

    return write


@pytest.fixture
def strata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run ``strata ARGUMENTS`` in an empty folder, with nothing but ``env`` of Strata's variables."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)

    def run(*arguments: str, **env: str) -> Result:
        clean: dict[str, str | None] = {name: None for name in os.environ if name.startswith("STRATA_")}
        clean |= {"STRATA_HOME": str(home), "COLUMNS": "200"} | env
        return CliRunner().invoke(main, list(arguments), env=clean, prog_name="strata")

    return run
