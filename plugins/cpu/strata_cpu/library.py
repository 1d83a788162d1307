"""The native library: its structures and functions as ``src/strata.h`` declares them.

Calls go through ctypes, which releases the interpreter's lock for as long as they run.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from strata_core.errors import BackendError

ABI_VERSION = 4

HERE = Path(__file__).parent
#: Written by the build where it could not make the library; says why.
NOT_BUILT = HERE / "not_built.txt"
#: Another library to load instead of the installed one, such as one built with sanitizers.
LIBRARY_VARIABLE = "STRATA_CPU_LIBRARY"
#: Name of the instruction set whose kernels to use, instead of the best that this machine runs.
ISA_VARIABLE = "STRATA_CPU_ISA"

STORED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
KV_TYPES = ("f32", "f16", "bf16", "int8")
ACTIVATIONS = ("silu", "gelu_tanh")
#: Widest keys of the gated delta rule that kernels take.
MOST_KEY_DIM = 512


class Part(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("rows", c_int32),
        ("width", c_int32),
        ("panels", c_int32),
        ("stride", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Matrix(ctypes.Structure):
    _fields_ = (
        ("parts", c_int32),
        ("rows", c_int32),
        ("width", c_int32),
        ("panels", c_int32),
        ("part", POINTER(Part)),
    )


class Store(ctypes.Structure):
    _fields_ = (
        ("kv_type", c_int32),
        ("page_tokens", c_int32),
        ("chunk_pages", c_int32),
        ("page_bytes", c_int64),
        ("chunks", c_void_p),
    )


class Span(ctypes.Structure):
    _fields_ = (("start", c_int32), ("rows", c_int32), ("tables", c_void_p))


class Step(ctypes.Structure):
    _fields_ = (
        ("rows", c_int32),
        ("spans", c_int32),
        ("outputs", c_int32),
        ("span", POINTER(Span)),
        ("position", c_void_p),
        ("output", c_void_p),
        ("store", POINTER(POINTER(Store))),
    )


class Rotation(ctypes.Structure):
    _fields_ = (("rotated", c_int32), ("interleaved", c_int32), ("magnitude", c_float), ("frequency", c_void_p))


class Attention(ctypes.Structure):
    _fields_ = (
        ("layout", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("k", c_int64),
        ("v", c_int64),
        ("k_scale", c_int64),
        ("v_scale", c_int64),
        ("sinks", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", POINTER(Matrix)),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("rotation", POINTER(Rotation)),
        ("attention", Attention),
        ("output", POINTER(Matrix)),
        ("ffn_norm", c_void_p),
        ("gate_up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("eps", c_float),
        ("activation", c_int32),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", c_int32),
        ("layer", POINTER(Layer)),
        ("norm", c_void_p),
        ("eps", c_float),
        ("output", POINTER(Matrix)),
    )


class States(ctypes.Structure):
    _fields_ = (("spans", c_int32), ("row", c_void_p), ("before", c_void_p), ("after", c_void_p))


class Delta(ctypes.Structure):
    _fields_ = (
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("factor", c_void_p),
        ("beta", c_void_p),
        ("out", c_void_p),
    )


class Conv(ctypes.Structure):
    _fields_ = (
        ("channels", c_int32),
        ("kernel", c_int32),
        ("dilation", c_int32),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
    )


_SIGNATURES = {
    "strata_isa": (c_char_p, [c_int]),
    "strata_open": (c_void_p, [c_int, c_char_p]),
    "strata_close": (None, [c_void_p]),
    "strata_engine_isa": (c_char_p, [c_void_p]),
    "strata_panel_bytes": (c_int64, [c_int, c_int]),
    "strata_kind": (c_int, [c_int]),
    "strata_allocate": (c_void_p, [c_int64]),
    "strata_release": (None, [c_void_p, c_int64]),
    "strata_pack": (None, [c_void_p, c_int, c_void_p, POINTER(Part)]),
    "strata_rows": (None, [POINTER(Matrix), c_void_p, c_int, c_float, c_void_p]),
    "strata_linear": (c_int, [c_void_p, POINTER(Matrix), c_void_p, c_int, c_void_p, c_int]),
    "strata_norm": (c_int, [c_void_p, c_void_p, c_void_p, c_float, c_int, c_int, c_void_p]),
    "strata_rope": (c_int, [c_void_p, POINTER(Step), POINTER(Rotation), c_void_p, c_int, c_int]),
    "strata_gated": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_int]),
    "strata_attention": (
        c_int,
        [c_void_p, POINTER(Step), POINTER(Attention), c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "strata_top": (c_int, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "strata_delta": (c_int, [c_void_p, POINTER(States), POINTER(Delta)]),
    "strata_conv": (c_int, [c_void_p, POINTER(States), POINTER(Conv)]),
    "strata_decode": (c_int, [c_void_p, POINTER(Step), POINTER(Decoder), c_void_p, c_void_p]),
}


def library_path() -> Path:
    """Where the library is, or would be."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return Path(named)
    return HERE / "native.so"


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library, with its functions' signatures set.

    :raises BackendError: it is not there, does not load, or is of another version; the message says which and why.
    """
    if not path.exists():
        why = NOT_BUILT.read_text("utf-8").strip() if NOT_BUILT.exists() else f"{path} is missing"
        raise BackendError(f"the kernels were not built when strata-engine-cpu was installed: {why}")
    try:
        library = ctypes.CDLL(str(path))
        version: int = library.strata_abi()
    except (OSError, AttributeError) as error:
        raise BackendError(f"the kernels do not load: {error}") from error
    if version != ABI_VERSION:
        raise BackendError(f"{path} is of version {version}, not {ABI_VERSION}: install strata-engine-cpu again")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Names of those that the library has kernels for and this machine runs, best first."""
    names: list[str] = []
    while (name := library.strata_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def chosen_instruction_set(library: ctypes.CDLL) -> str:
    """What :data:`ISA_VARIABLE` names, or the best.

    :raises BackendError: it names none that can be used here.
    """
    available, wanted = instruction_sets(library), os.environ.get(ISA_VARIABLE)
    if not wanted:
        return available[0]
    if wanted not in available:
        raise BackendError(f"{ISA_VARIABLE}={wanted}, but this machine runs {', '.join(available)}")
    return wanted
