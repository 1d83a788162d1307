"""How the reference backend is found and made: numpy, which runs everywhere."""

from __future__ import annotations

import ctypes
import logging

import numpy as np

from strata_core.compute.base import Backend, BackendFactory, BackendOptions, Probe
from strata_core.compute.reference.backend import NumpyBackend
from strata_core.memory.probe import available_memory

logger = logging.getLogger(__name__)

#: Of the memory that is available, the share that float32 weights may take; the rest is for pages and everyone else.
_WEIGHTS_SHARE = 0.6


def _keep_bytes() -> int | None:
    available = available_memory()
    return None if available is None else int(available * _WEIGHTS_SHARE)


def _probe() -> Probe:
    keep = _keep_bytes()
    most = "all weights" if keep is None else f"up to {keep >> 20} MiB of weights"
    return Probe(True, f"numpy {np.__version__}, float32; {most} dequantised while loading, others in each use")


def _create(options: BackendOptions) -> Backend:
    if options.threads and not _set_blas_threads(options.threads):
        logger.warning(
            "the numpy backend cannot set the number of threads of this numpy's BLAS; "
            "set OPENBLAS_NUM_THREADS, MKL_NUM_THREADS or VECLIB_MAXIMUM_THREADS instead of --threads"
        )
    return NumpyBackend(_keep_bytes())


def _set_blas_threads(threads: int) -> bool:
    """Tell the OpenBLAS inside numpy's wheels how many threads to use; False where numpy has another BLAS."""
    from numpy.linalg import _umath_linalg

    # Looking a symbol up in an extension module also looks in the libraries that it was linked with.
    library = ctypes.CDLL(_umath_linalg.__file__)
    for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
        try:
            setter = getattr(library, name)
        except AttributeError:
            continue
        setter(ctypes.c_int(threads))
        return True
    return False


FACTORY = BackendFactory(name=NumpyBackend.name, priority=0, probe=_probe, create=_create)
"""What the built-in plugin registers; any other usable backend outranks it."""
