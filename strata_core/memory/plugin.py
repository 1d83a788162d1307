"""Built-in plugin: the portable memory provider, and Linux's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from strata_core.memory.base import MemoryProvider


@hookimpl
def strata_register_memory(register: Callable[[MemoryProvider], None]) -> None:
    from strata_core.memory.arena import LinuxArena, PortableArena
    from strata_core.memory.base import MemoryProvider
    from strata_core.memory.probe import probe_memory

    register(MemoryProvider("portable", 0, probe_memory, PortableArena))
    if sys.platform == "linux":
        register(MemoryProvider("linux", 10, probe_memory, LinuxArena))
