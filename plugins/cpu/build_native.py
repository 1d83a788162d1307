"""The build backend: setuptools, with the kernels compiled into the package first (:mod:`compile_kernels`)."""

from __future__ import annotations

from typing import Any

from compile_kernels import build_into_package, requirements

# The hooks that this module does not replace are setuptools' own.
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return requirements(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return requirements(build_meta.get_requires_for_build_editable(config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    build_into_package()
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    build_into_package()
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return name
