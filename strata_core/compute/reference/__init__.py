"""The numpy reference backend: the readable truth that every other backend is compared with."""

from strata_core.compute.reference.backend import NumpyBackend
from strata_core.compute.reference.pages import NumpyPageStore

__all__ = ["NumpyBackend", "NumpyPageStore"]
