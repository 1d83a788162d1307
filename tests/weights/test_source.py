"""Looking things up in a model, telling weights apart, and models in several files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata_core.errors import ModelFileError, NotFound
from strata_core.testing.gguf_build import TensorData, quantise, write_gguf
from strata_core.testing.tiny import tiny_llama
from strata_core.weights import GGUFFile, open_model


@pytest.fixture
def model(tmp_path: Path) -> GGUFFile:
    metadata = {
        "k.int": 3, "k.float": 0.5, "k.bool": True, "k.str": "x", "k.strings": ["a", "b"], "k.numbers": [1, 2],
    }  # fmt: skip
    return GGUFFile.open(write_gguf(tmp_path / "m.gguf", metadata, {"w": np.zeros((2, 3), np.float32)}))


def test_keys_come_in_the_kind_that_is_asked_for(model: GGUFFile) -> None:
    assert model.require_key("k.int", int) == 3
    assert model.require_key("k.float", float) == 0.5
    assert model.require_key("k.bool", bool) is True
    assert model.require_key("k.str", str) == "x"
    assert model.require_key("k.strings", list) == ["a", "b"]
    np.testing.assert_array_equal(model.require_key("k.numbers", np.ndarray), [1, 2])
    whole = model.require_key("k.int", float)
    assert whole == 3.0 and type(whole) is float


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("k.float", int), ("k.bool", int), ("k.bool", float), ("k.int", bool), ("k.int", str), ("k.str", int),
        ("k.strings", str), ("k.strings", np.ndarray), ("k.numbers", list), ("k.numbers", int), ("k.str", list),
    ],
)  # fmt: skip
def test_a_key_of_another_kind_is_an_error_that_names_it(model: GGUFFile, key: str, kind: type) -> None:
    with pytest.raises(ModelFileError, match=key) as caught:
        model.require_key(key, kind)
    assert caught.value.param == key
    if kind is not list and kind is not np.ndarray:
        with pytest.raises(ModelFileError, match=key):
            model.key(key, kind())


def test_defaults_stand_in_for_missing_keys_only(model: GGUFFile) -> None:
    assert model.key("k.int", 9) == 3
    assert model.key("k.none", 9) == 9
    assert model.key("k.none", None, str) is None
    assert model.key("k.str", None, str) == "x"
    with pytest.raises(ModelFileError, match=r"k\.none"):
        model.require_key("k.none", int)


def test_missing_and_misshapen_tensors_are_named_with_what_was_expected(model: GGUFFile) -> None:
    assert model.require("w", (2, 3)) is model.get("w")
    assert model.get("v") is None
    with pytest.raises(ModelFileError, match=r"tensor v of shape \(4, 5\) is missing; .* several files") as caught:
        model.require("v", (4, 5))
    assert caught.value.param == "v"
    with pytest.raises(ModelFileError, match=r"w has shape \(2, 3\), .* \(3, 2\)"):
        model.require("w", (3, 2))


def fingerprint(path: Path) -> bytes:
    with GGUFFile.open(path) as model:
        return model.fingerprint()


def test_the_fingerprint_ignores_names_metadata_and_order(tmp_path: Path) -> None:
    big = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    small = np.ones(3, np.float32)
    one = write_gguf(tmp_path / "one.gguf", {"general.name": "one"}, {"a": big, "b": small})
    other = write_gguf(tmp_path / "other.gguf", {"general.name": "other", "x": 1}, {"b": small, "a": big}, alignment=64)
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 16


CHANGES: dict[str, Callable[[np.ndarray], dict[str, TensorData]]] = {
    "first element": lambda a: {"a": np.where(np.arange(a.size).reshape(a.shape) == 0, 9, a).astype("f4")},
    "last element": lambda a: {"a": np.where(np.arange(a.size).reshape(a.shape) == a.size - 1, 9, a).astype("f4")},
    "a slight tuning": lambda a: {"a": a * np.float32(1.001)},
    "shape": lambda a: {"a": a.reshape(160, 640)},
    "name": lambda a: {"b": a},
    "type": lambda a: {"a": a.astype(np.float16)},
    "quantisation": lambda a: {"a": quantise(a, "Q8_0")},
    "another tensor": lambda a: {"a": a, "b": np.zeros(1, np.float32)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_tells_other_weights_apart(tmp_path: Path, change: str) -> None:
    weights = np.random.default_rng(0).standard_normal((320, 320)).astype(np.float32)
    one = write_gguf(tmp_path / "one.gguf", {}, {"a": weights})
    other = write_gguf(tmp_path / "other.gguf", {}, CHANGES[change](weights))
    assert fingerprint(one) != fingerprint(other)


def test_every_element_of_a_small_tensor_counts(tmp_path: Path) -> None:
    seen = set()
    for changed in range(0, 4_096, 97):
        weights = np.zeros(4_096, np.float32)
        weights[changed] = 1
        seen.add(fingerprint(write_gguf(tmp_path / "w.gguf", {}, {"a": weights})))
    assert len(seen) == len(range(0, 4_096, 97))


def split(folder: Path, *, total: int = 3) -> list[Path]:
    """A model in two files, tensors a and b in the first and c in the second."""
    arrays = {name: np.full(4, index, np.float32) for index, name in enumerate("abc")}
    contents = [{"a": arrays["a"], "b": arrays["b"]}, {"c": arrays["c"]}]
    return [
        write_gguf(
            folder / f"m-{number + 1:05d}-of-00002.gguf",
            {"split.no": np.uint16(number), "split.count": np.uint16(2), "split.tensors.count": np.int32(total)}
            | ({"general.name": "whole"} if number == 0 else {}),
            tensors,
        )
        for number, tensors in enumerate(contents)
    ]


@pytest.mark.parametrize("opened", [0, 1])
def test_a_set_of_files_is_one_model_whichever_file_is_opened(tmp_path: Path, opened: int) -> None:
    with open_model(split(tmp_path)[opened]) as model:
        assert list(model.tensors) == ["a", "b", "c"]
        assert model.require_key("general.name", str) == "whole"
        np.testing.assert_array_equal(model.require("c", (4,)).dequantise(), np.full(4, 2))


def test_one_file_is_opened_as_it_is(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    with open_model(path) as model, GGUFFile.open(path) as file:
        assert list(model.tensors) == list(file.tensors)
    with pytest.raises(NotFound):
        open_model(tmp_path / "none.gguf")


def test_incomplete_sets_say_which_file_is_wrong(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    content = second.read_bytes()
    second.write_bytes(content[:-20])
    with pytest.raises(ModelFileError, match=r"00002-of-00002.*cut short"):
        open_model(first)
    second.unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00002.*missing"):
        open_model(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelFileError, match=r"00002-of-00002.*another part"):
        open_model(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="others cannot be found"):
        open_model(tmp_path / "renamed.gguf")


def test_sets_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="3 tensors instead of 4"):
        open_model(split(tmp_path, total=4)[0])
