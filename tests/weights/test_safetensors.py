"""Reading safetensors files, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_build import numbers
from safetensors.numpy import save_file

from strata_core.errors import ModelFileError, NotFound, UnsupportedModel
from strata_core.weights.safetensors import SafetensorsFile


def raw(path: Path, header: object, data: bytes = b"", pad: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    arrays = {"a": numbers(3, 4), "b": numbers(5).astype(np.float16), "empty": np.zeros((0, 4), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.nbytes, tensor.derived) == (array.shape, array.nbytes, False)
        np.testing.assert_array_equal(tensor.dequantise(), array.astype(np.float32))
        assert tensor.place is not None and tensor.place.path == file.path
        assert file.path.read_bytes()[tensor.place.offset :][: array.nbytes] == array.tobytes()
    kept = file.tensors["a"]
    file.close()
    np.testing.assert_array_equal(kept.dequantise(slice(1, 3)), arrays["a"][1:3])  # it keeps the map


def test_numbers_at_odd_addresses_are_read_too(tmp_path: Path) -> None:
    array = numbers(4, 2)
    text = json.dumps({"a": entry(0, 32, [4, 2])})
    path = raw(tmp_path / "x", text.encode() + b" " * (-len(text) % 4 + 1), array.tobytes())
    tensor = SafetensorsFile(path).tensors["a"]
    np.testing.assert_array_equal(tensor.dequantise(), array)
    np.testing.assert_array_equal(tensor.dequantise(slice(2, 3)), array[2:3])
    assert tensor.data.ctypes.data % 4 == 0


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 8)}, b"1234", "tensor a has offsets 0 to 8, but the file holds 4 bytes"),
        ({"a": entry(8, 4, [1])}, bytes(8), "tensor a has offsets"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "data of tensor b overlap"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "data of tensor b leave a gap of 4 bytes"),
        ({"a": entry(0, 4)}, bytes(12), "8 bytes of data belong to no tensor"),
        ({"a": entry(0, 8, [3])}, bytes(8), "tensor a has 8 bytes, but its type and shape need 12"),
        ({"a": entry(0, 8, [2**62, 2**62])}, bytes(8), "its type and shape need"),
        ({"a": entry(0, 4, [-1])}, bytes(4), "entry of tensor a is malformed"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "entry of tensor a is malformed"),
        ({"a": 3}, b"", "entry of tensor a is malformed"),
        ({"a": entry(0, 4, [1] * 9)}, bytes(4), "9 dimensions"),
        ([1], b"", "no JSON object"),
        (b'{"a": 1, "a": 2}', b"", "'a' occurs twice"),
        (b"{", b"", "header cannot be read"),
        (b"\xff", b"", "header cannot be read"),
        (b"[" * 100_000, b"", "header cannot be read"),
    ],
)
def test_damage_is_an_error_that_names_the_tensor(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFile(raw(tmp_path / "x", header, data))


@pytest.mark.parametrize("content", [b"123", (2**40).to_bytes(8, "little") + b"{}", (50).to_bytes(8, "little") + b"{}"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelFileError, match="not a safetensors file"):
        SafetensorsFile(tmp_path / "x")


def test_absent_files_and_unknown_types_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        SafetensorsFile(tmp_path / "none")
    with pytest.raises(UnsupportedModel, match="tensor a is of type F8_E4M3"):
        SafetensorsFile(raw(tmp_path / "x", {"a": entry(0, 4, [4], "F8_E4M3")}, bytes(4)))
