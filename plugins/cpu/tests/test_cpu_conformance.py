"""The cpu backend passes the suite that every backend passes, on every instruction set that this machine runs."""

from __future__ import annotations

import pytest
from cpu_kit import make

from strata_core.compute.base import Backend
from strata_core.testing.backends import BackendTests


class TestCpuBackend(BackendTests):
    """Activations of 16 bits: an operation may be off by 2^-16 of its largest input, summed over its terms."""

    tolerance = 5e-5
    kv_tolerance = {"f32": 2e-5, "f16": 2e-5, "bf16": 2e-5, "int8": 2e-3}  # noqa: RUF012 - as the suite declares it
    model_tolerance = 5e-3  # the suite's tiny models are sharp: they magnify a K/V that rounds to the other neighbour

    @pytest.fixture(autouse=True)
    def _isa(self, isa: str) -> None:
        self.isa = isa

    def make_backend(self) -> Backend:
        return make(2, self.isa)
