"""The ``strata`` command: one module per command, imported when it is invoked."""

from strata_core.cli.main import main

__all__ = ["main"]
