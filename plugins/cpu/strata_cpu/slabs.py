"""Memory for weights, in pieces large enough for the system's large pages."""

from __future__ import annotations

import ctypes
import weakref

from strata_core.errors import OutOfMemory

#: Untouched memory costs nothing, so the last slab of a model may stay mostly empty.
SLAB_BYTES = 64 << 20
_ALIGNMENT = 64


class _Slab:
    """One run of native memory, given back with the last matrix that lies in it."""

    def __init__(self, library: ctypes.CDLL, size: int):
        self.address: int | None = library.strata_allocate(size)
        self.size, self.used = size, 0
        if self.address:
            weakref.finalize(self, library.strata_release, self.address, size)


class Slabs:
    """Hands out memory for matrices, one behind the other.

    Matrices of small models are smaller than a large page. Each in memory of its own they would lie on small pages,
    whose address translations cost a third of the time that reading the weights takes.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._current: _Slab | None = None

    def take(self, size: int, owner: object, purpose: str) -> int:
        """Address of ``size`` bytes of zeros, 64-byte aligned, which last as long as ``owner``.

        :raises OutOfMemory: there is none left; the message names the purpose.
        """
        slab = self._current
        if slab is None or slab.size - slab.used < size:
            slab = _Slab(self._library, max(size, SLAB_BYTES))
            if slab.address is None:
                raise OutOfMemory(f"no memory for {size >> 20} MiB of weights ({purpose})")
            if size < SLAB_BYTES:
                self._current = slab
        assert slab.address is not None
        address = slab.address + slab.used
        slab.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        weakref.finalize(owner, _keep, slab)
        return address


def _keep(slab: _Slab) -> None:
    """What a finaliser holds lives until it has run."""
