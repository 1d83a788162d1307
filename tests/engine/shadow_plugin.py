"""Registers the shadow backend, so that engines of this folder's tests can be opened on it."""

from __future__ import annotations

from collections.abc import Callable

from strata_core.compute.base import BackendFactory, Probe
from strata_core.hookspecs import hookimpl
from strata_core.testing.shadow import ShadowBackend


@hookimpl
def strata_register_backends(register: Callable[[BackendFactory], None]) -> None:
    register(BackendFactory("shadow", -1, lambda: Probe(True, "for tests"), lambda options: ShadowBackend()))
