"""Kernels for instructions that this machine may not have: emulated, they give the bits of those that it has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cpu_kit import instruction_sets
from strata_cpu import library
from strata_cpu.backend import CpuBackend
from test_cpu_products import random_tensor

from strata_core.testing.backend_kit import random_rows

PLUGIN = Path(__file__).parents[1]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "avx512" not in instruction_sets():
        pytest.skip("the rest of these kernels needs AVX-512")
    spec = importlib.util.spec_from_file_location("compile_kernels", PLUGIN / "compile_kernels.py")
    assert spec is not None and spec.loader is not None
    compile_kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compile_kernels)
    target: Path = tmp_path_factory.mktemp("emulated") / "native.so"
    compile_kernels.build(target, emulate=PLUGIN / "tests" / "emulated.h")
    return target


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", ["avx512vnni", "amx"])
def test_products_of_bytes_have_the_bits_of_products_of_words(emulated: Path, isa: str) -> None:
    native = library.load(emulated)
    if isa not in library.instruction_sets(native):
        pytest.skip(f"the compiler knows no {isa}")
    backends = [CpuBackend(native, 2, name) for name in (isa, "avx512")]
    for kind in KINDS:
        tensor = random_tensor(kind, 40, 512)
        for rows in (1, 5, 15, 16, 17, 33, 64, 100):  # a tile has 16 rows, and 4 tiles share unpacked weights
            x = random_rows(rows, rows, 512)
            own, plain = (b.linear(b.from_host(x), b.matrix(tensor)).tobytes() for b in backends)
            assert own == plain, f"{kind}, {rows} rows"
