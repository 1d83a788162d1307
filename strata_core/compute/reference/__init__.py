"""The numpy reference backend: the readable truth that every other backend is compared with."""

from .backend import NumpyBackend
from .pages import NumpyPageStore

__all__ = ["NumpyBackend", "NumpyPageStore"]
