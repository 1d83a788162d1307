"""The conformance suite that every backend passes.

Subclass :class:`BackendTests` in a test module and say how to make the backend::

    class TestMyBackend(BackendTests):
        tolerance = 1e-4

        def make_backend(self) -> Backend:
            return MyBackend()

Everything is compared with :mod:`strata_core.testing.formulas` or, for whole models, with the numpy reference.
"""

from __future__ import annotations

from strata_core.testing.backend_attention import AttentionTests
from strata_core.testing.backend_elementwise import ElementwiseTests
from strata_core.testing.backend_families import FamilyTests
from strata_core.testing.backend_further import FurtherTests
from strata_core.testing.backend_hybrids import HybridTests
from strata_core.testing.backend_indexed import IndexedTests
from strata_core.testing.backend_mixture import MixtureTests
from strata_core.testing.backend_models import ModelTests
from strata_core.testing.backend_operations import OperationTests
from strata_core.testing.backend_pages import PageTests
from strata_core.testing.backend_recurrent import RecurrentTests
from strata_core.testing.backend_scoring import ScoringTests


class BackendTests(
    OperationTests,
    ElementwiseTests,
    MixtureTests,
    AttentionTests,
    IndexedTests,
    RecurrentTests,
    ScoringTests,
    PageTests,
    ModelTests,
    FamilyTests,
    HybridTests,
    FurtherTests,
):
    """All of a backend's conformance tests. Override :meth:`make_backend`, and the tolerances where needed."""
