"""The backends of the core pass the conformance suite."""

from __future__ import annotations

from strata_core.compute.base import Backend
from strata_core.compute.reference import NumpyBackend
from strata_core.testing.backends import BackendTests
from strata_core.testing.shadow import ShadowBackend
from strata_core.testing.wrapped import FaultyBackend


class TestNumpyBackend(BackendTests):
    def make_backend(self) -> Backend:
        return NumpyBackend()


class TestNumpyBackendThatKeepsNoWeights(BackendTests):
    """Weights stay as stored and are dequantised in each use."""

    def make_backend(self) -> Backend:
        return NumpyBackend(keep_bytes=0)


class TestShadowBackend(BackendTests):
    def make_backend(self) -> Backend:
        return ShadowBackend(seed=1)


class TestFaultyBackendWithoutFaults(BackendTests):
    def make_backend(self) -> Backend:
        return FaultyBackend(NumpyBackend(), ())
