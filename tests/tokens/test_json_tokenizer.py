"""Tokenizers from the ``tokenizer.json`` of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from json_tokenizers import CHAT, KINDS, PLAIN, TEXTS, byte_level, sentence_piece, write
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.tokens import ChatTemplate, StreamingDetokenizer, Tokenizer
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.tokenizer import tokenizer_metadata


def metadata(folder: Path, count: int | None = None, **config: Any) -> dict[str, object]:
    known = Library.from_file(str(folder / "tokenizer.json")).get_vocab_size() if count is None else count
    return tokenizer_metadata(folder, Config(folder / "config.json", {"vocab_size": known, **config}))


def opened(folder: Path, count: int | None = None, **config: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(folder, count, **config))


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Tokenizer]:
    make, settings = KINDS[request.param]
    library = make()
    return library, opened(write(tmp_path_factory.mktemp("t"), library, settings))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_the_library(both: tuple[Library, Tokenizer], text: str) -> None:
    library, ours = both
    ids = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, parse_special=True).tolist() == ids
    assert ours.encode(text, parse_special=True, add_special=True).tolist() == library.encode(text).ids
    assert ours.encode_pieces(ours.split_special(text)).tolist() == ids
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)
    stream = StreamingDetokenizer(ours)
    assert "".join([*map(stream.push, ids), stream.finish()]) == ours.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_never_becomes_a_control_token(both: tuple[Library, Tokenizer], text: str) -> None:
    library, ours = both
    ids = ours.encode(text).tolist()
    assert not any(ours.is_control(token) for token in ids)
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_not_even_a_merge_makes_a_control_token(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "abab": 3, "x": 4}
    library = Library(models.BPE(vocab, [("a", "b"), ("ab", "ab")], ignore_merges=True))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["ab"])
    tokenizer = opened(write(tmp_path, library, {"eos_token": "abab"}))
    assert tokenizer.encode("ababx").tolist() == [0, 1, 0, 1, 4]
    assert tokenizer.encode("ababx", parse_special=True).tolist() == [3, 4]


def test_roles_and_ends_come_from_all_files(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), CHAT, generation_config={"eos_token_id": [1, 0]})
    tokenizer = opened(folder, eos_token_id=7)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (2, 1, True)
    assert tokenizer.end_ids == {0, 1, 7}
    roles = {"eos_token": {"content": "</s>"}}
    write(tmp_path, sentence_piece("never"), {"unk_token": "<unk>"}, special_tokens_map=roles)
    tokenizer = opened(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, 2, False)


def test_the_vocabulary_is_as_large_as_the_models(tmp_path: Path) -> None:
    library = byte_level()
    folder = write(tmp_path, library, CHAT)
    known = library.get_vocab_size()
    larger = opened(folder, known + 5)
    assert larger.vocab_size == known + 5
    assert larger.token_bytes(known + 1) == f"[PAD{known + 1}]".encode()
    # A token that only a larger model knows is plain text.
    smaller = opened(folder, known - 1)
    assert smaller.encode("<mask>", parse_special=True).max() < known - 1
    with pytest.raises(ModelFileError, match="but the model knows 100 tokens"):
        opened(folder, 100)


def test_fingerprints_tell_rules_and_roles_apart(tmp_path: Path) -> None:
    first = opened(write(tmp_path, sentence_piece("first"), PLAIN)).fingerprint()
    assert opened(write(tmp_path, sentence_piece("first"), PLAIN)).fingerprint() == first
    assert opened(write(tmp_path, sentence_piece("always"), PLAIN)).fingerprint() != first
    assert opened(write(tmp_path, sentence_piece("first"), {"eos_token": "<s>"})).fingerprint() != first


def template_of(folder: Path) -> ChatTemplate | None:
    keys = metadata(folder)
    return ChatTemplate.from_metadata(keys, Tokenizer.from_metadata(keys))


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), CHAT)
    assert template_of(folder) is None
    write(tmp_path, byte_level(), {**CHAT, "chat_template": "{{ bos_token }}one"})
    assert (found := template_of(folder)) is not None and found.render([]) == "<bos>one"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "two"}))
    assert (found := template_of(folder)) is not None and found.render([]) == "two"
    (folder / "chat_template.jinja").write_text("three")
    assert (found := template_of(folder)) is not None and found.render([]) == "three"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, byte_level(), {**CHAT, "chat_template": named})
    for name in "chat_template.json", "chat_template.jinja":
        (folder / name).unlink()
    assert (found := template_of(folder)) is not None
    assert (found.render([]), found.render([], tools=[{"name": "f"}])) == ("plain", "tools")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert (found := template_of(folder)) is not None and found.render([], tools=[{"name": "f"}]) == "more"


def test_a_folder_without_rules_has_no_tokenizer_and_says_so(tmp_path: Path) -> None:
    keys = tokenizer_metadata(tmp_path, Config(tmp_path / "config.json", {"vocab_size": 3}))
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.model is missing"):
        Tokenizer.from_metadata(keys)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, UnsupportedModel, "model type 'Unigram'"),
        ({"model": {"type": "BPE"}}, ModelFileError, "model.vocab is missing"),
        ({"model": {"vocab": {"a": "1"}, "merges": []}}, ModelFileError, "token 'a' has id"),
        ({"added_tokens": [{"content": "x"}]}, ModelFileError, "added token is malformed"),
        ({"added_tokens": [3]}, ModelFileError, "added token is malformed"),
        ({"post_processor": {"type": "BertProcessing"}}, ModelFileError, "post_processor is malformed"),
        ({"pre_tokenizer": {"type": "Strange"}}, UnsupportedModel, "tokenizer.json cannot be used"),
        ({"model": {"vocab": {"a": 0}, "merges": [["a"]]}}, ModelFileError, "tokenizer.json is malformed"),
    ],
)
def test_rules_that_cannot_be_used_are_an_error(
    tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    folder = write(tmp_path, byte_level(), CHAT)
    rules = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**rules, **change}))
    with pytest.raises(kind, match=message):
        opened(folder, 500)
