"""Reading GGUF files: what a good file gives, and the error that each kind of bad file gets."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.errors import ModelFileError, NotFound
from strata_core.testing.gguf_build import quantise, write_gguf
from strata_core.testing.tiny import tiny_llama
from strata_core.weights import GGUFFile

METADATA = {
    "general.architecture": "llama",
    "a.string": "naïve 🙂",
    "a.uint8": np.uint8(200),
    "a.int8": np.int8(-3),
    "a.uint16": np.uint16(60_000),
    "a.int16": np.int16(-3),
    "a.uint32": 7,
    "a.int32": -7,
    "a.float32": 0.5,
    "a.bool": True,
    "a.uint64": 2**63,
    "a.int64": np.int64(-(2**40)),
    "a.float64": np.float64(1e-300),
    "some.strings": ["", "a", "Ġthe", "日本"],
    "some.numbers": [1, 2, 3],
    "some.floats": np.array([0.5, -1], np.float64),
    "some.booleans": [True, False],
}


def small_file(path: Path, **options: int) -> Path:
    numbers = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    tensors = {
        "plain": numbers,
        "half": numbers[0].astype(np.float16),
        "quantised": quantise(numbers, "Q4_1"),
        "cube": numbers.reshape(2, 4, 16),
    }
    return write_gguf(path, METADATA, tensors, **options)


@pytest.mark.parametrize("options", [{}, {"version": 2}, {"alignment": 64}, {"alignment": 8}])
def test_metadata_and_tensors_come_back_as_written(tmp_path: Path, options: dict[str, int]) -> None:
    path = small_file(tmp_path / "small.gguf", **options)
    with GGUFFile.open(path) as model:
        assert (model.path, model.version, model.size) == (path, options.get("version", 3), path.stat().st_size)
        for key, value in METADATA.items():
            read = model.metadata[key]
            if isinstance(value, (list, np.ndarray)) and not isinstance(value[0], str):
                np.testing.assert_array_equal(read, np.asarray(value))
            else:
                assert read == value
                assert type(read) in (str, int, float, bool, list)
        numbers = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
        assert list(model.tensors) == ["plain", "half", "quantised", "cube"]
        np.testing.assert_array_equal(model.tensors["plain"].dequantise(), numbers)
        np.testing.assert_array_equal(model.tensors["half"].dequantise(), numbers[0].astype(np.float16))
        np.testing.assert_array_equal(model.tensors["cube"].dequantise(), numbers.reshape(2, 4, 16))
        quantised = model.tensors["quantised"]
        assert (quantised.shape, quantised.type, quantised.nbytes) == ((4, 32), "Q4_1", 80)
        assert np.abs(quantised.dequantise() - numbers).max() < 0.3
        assert not quantised.data.flags.writeable


def test_files_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "theirs.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    numbers = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("token_embd.weight", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as model:
        assert model.require_key("llama.context_length", int) == 512
        assert model.require_key("tokenizer.ggml.tokens", list) == ["a", "b"]
        np.testing.assert_array_equal(model.require_key("tokenizer.ggml.scores", np.ndarray), [0.5, -1.0])
        np.testing.assert_array_equal(model.require("token_embd.weight", (3, 32)).dequantise(), numbers)


def test_our_files_are_read_by_the_gguf_package(tmp_path: Path) -> None:
    from gguf import GGUFReader

    theirs = GGUFReader(tiny_llama(tmp_path / "tiny.gguf", weights="Q8_0"))
    with GGUFFile.open(tmp_path / "tiny.gguf") as ours:
        assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
        for tensor in theirs.tensors:
            assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
            assert ours.tensors[tensor.name].data.tobytes() == tensor.data.tobytes()
        assert theirs.fields["tokenizer.ggml.tokens"].contents() == ours.metadata["tokenizer.ggml.tokens"]


def test_tensors_outlive_their_closed_file(tmp_path: Path) -> None:
    with GGUFFile.open(small_file(tmp_path / "small.gguf")) as model:
        kept = model.tensors["plain"]
        before = kept.dequantise()
    assert not model.tensors
    np.testing.assert_array_equal(kept.dequantise(), before)


def test_missing_files_folders_and_empty_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.gguf"):
        GGUFFile.open(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelFileError, match="empty"):
        GGUFFile.open(tmp_path / "empty.gguf")


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, code: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", code) + value


def entry(name: str = "t", shape: tuple[int, ...] = (8,), code: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + sizes + struct.pack("<IQ", code, offset)


def raw_file(
    *parts: bytes, keys: int = 0, tensors: int = 0, magic: bytes = b"GGUF", version: int = 3, data: int = 64
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(data)


HUGE = struct.pack("<Q", 2**63)
BAD_FILES = {
    "not GGUF": (raw_file(magic=b"GGML"), "not a GGUF", "magic"),
    "version 1": (raw_file(version=1), "version 1 is not", "version"),
    "version 4": (raw_file(version=4), "version 4 is not", "version"),
    "big endian": (raw_file(version=3 << 24), "big-endian", "version"),
    "huge key count": (raw_file(keys=2**60), "key count", None),
    "huge tensor count": (raw_file(tensors=2**60), "tensor count", None),
    "huge key length": (raw_file(HUGE, keys=1), "metadata key 0", "metadata key 0"),
    "key beyond the end": (raw_file(struct.pack("<Q", 5000), keys=1), "metadata key 0", "metadata key 0"),
    "huge string": (raw_file(key("k.s", 8, HUGE), keys=1), r"value of k\.s", "k.s"),
    "huge numbers": (raw_file(key("k.n", 9, struct.pack("<I", 4) + HUGE), keys=1), r"k\.n", "k.n"),
    "huge strings": (raw_file(key("k.n", 9, struct.pack("<I", 8) + HUGE), keys=1), r"k\.n", "k.n"),
    "huge nesting": (raw_file(key("k.n", 9, struct.pack("<I", 9) + HUGE), keys=1), r"k\.n", "k.n"),
    "deep nesting": (raw_file(key("k.n", 9, struct.pack("<IQ", 9, 1) * 40), keys=1, data=600), "deeper", "k.n"),
    "string in array too long": (
        raw_file(key("k.n", 9, struct.pack("<IQ", 8, 2) + string("a") + HUGE), keys=1), "string 1 of", "k.n"
    ),
    "value type": (raw_file(key("k.v", 13, b""), keys=1), "unknown value type 13", "k.v"),
    "element type": (raw_file(key("k.v", 9, struct.pack("<IQ", 99, 1)), keys=1), "unknown element type 99", "k.v"),
    "boolean of 2": (raw_file(key("k.b", 7, b"\x02"), keys=1), "neither 0 nor 1", "k.b"),
    "key not UTF-8": (raw_file(key(b"\xff\xfe", 7, b"\x01"), keys=1), "not UTF-8", "metadata key 0"),
    "string not UTF-8": (raw_file(key("k.s", 8, string(b"a\xff")), keys=1), "not UTF-8", "k.s"),
    "token not UTF-8": (
        raw_file(key("k.s", 9, struct.pack("<IQ", 8, 2) + string("a") + string(b"\xc3")), keys=1), "string 1", "k.s"
    ),
    "same key twice": (raw_file(key("k.k", 7, b"\x01") * 2, keys=2), "occurs twice", "k.k"),
    "same tensor twice": (raw_file(entry("t"), entry("t", offset=32), tensors=2), "occurs twice", "t"),
    "tensor name not UTF-8": (raw_file(string(b"\xff") + entry()[9:], tensors=1), "not UTF-8", "the name of tensor 0"),
    "no dimensions": (raw_file(entry(shape=()), tensors=1), "0 dimensions", "t"),
    "five dimensions": (raw_file(entry(shape=(1,) * 5), tensors=1), "5 dimensions", "t"),
    "billions of dimensions": (raw_file(string("t") + b"\xff" * 24, tensors=1), "dimensions", "t"),
    "dimension 0": (raw_file(entry(shape=(0, 8)), tensors=1), "size 0", "t"),
    "sizes that overflow": (raw_file(entry(shape=(2**63, 2**63)), tensors=1), "ends at byte", "t"),
    "sizes whose product wraps to 0": (raw_file(entry(shape=(2**32, 2**32)), tensors=1), "ends at byte", "t"),
    "rows that cut a block": (raw_file(entry(shape=(2, 16), code=8), tensors=1), "do not divide", "t"),
    "tensor type": (raw_file(entry(code=5), tensors=1), "unknown type 5", "t"),
    "offset beyond the end": (raw_file(entry(offset=2**40), tensors=1), "ends at byte", "t"),
    "offset that wraps": (raw_file(entry(offset=2**64 - 32), tensors=1), "ends at byte", "t"),
    "misaligned offset": (raw_file(entry(offset=4), tensors=1), "not a multiple", "t"),
    "overlap": (raw_file(entry("t", (16,)), entry("u", offset=32), tensors=2), "overlap", "u"),
    "same place": (raw_file(entry("t"), entry("u"), tensors=2), "overlap", "u"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_get_an_error_that_names_the_culprit(tmp_path: Path, kind: str) -> None:
    content, message, param = BAD_FILES[kind]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        GGUFFile.open(tmp_path / "bad.gguf")
    assert str(tmp_path / "bad.gguf") in caught.value.message
    assert caught.value.param == param


@pytest.mark.parametrize("value", [0, 48, -32, 0.5, "32", True])
def test_alignments_that_are_no_power_of_two_are_refused(tmp_path: Path, value: object) -> None:
    write_gguf(tmp_path / "bad.gguf", {"general.alignment": value}, {"t": np.zeros(8, np.float32)})
    with pytest.raises(ModelFileError, match="power of two") as caught:
        GGUFFile.open(tmp_path / "bad.gguf")
    assert caught.value.param == "general.alignment"


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "small.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(1, len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            GGUFFile.open(cut)


MUTATION = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("u64"), st.integers(0, 1 << 16), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
    st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.integers(0, 64)),
    st.tuples(st.just("insert"), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=33)),
)


def mutate(content: bytes, kind: str, at: int, value: bytes | int) -> bytes:
    at %= len(content) or 1
    if isinstance(value, int):
        if kind == "cut":
            return content[:at] + content[at + value :]
        value = struct.pack("<Q", value)
    return content[:at] + value + content[at + (len(value) if kind != "insert" else 0) :]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_any_mutation_is_an_error_or_a_valid_file_and_costs_no_memory(tmp_path: Path, mutations: list) -> None:  # type: ignore[type-arg]
    path = tmp_path / "small.gguf"
    content = small_file(path).read_bytes()
    for mutation in mutations:
        content = mutate(content, *mutation)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with GGUFFile.open(path) as model:
            for tensor in model.tensors.values():
                assert tensor.nbytes <= len(content)
    except ModelFileError as error:
        assert str(path) in error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 500_000


@pytest.mark.model
def test_the_default_model_opens_quickly(default_model_path: Path) -> None:
    GGUFFile.open(default_model_path).close()  # the file's pages are now in memory
    best = min(_seconds_to_open(default_model_path) for _ in range(3))
    assert best <= 0.3


def _seconds_to_open(path: Path) -> float:
    start = time.process_time()  # other work on the machine does not count
    GGUFFile.open(path).close()
    return time.process_time() - start
