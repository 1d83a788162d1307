"""Text to ids and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from strata_core.tokens import Tokenizer
from strata_core.tokens.pretokenizers import PRE_TOKENIZERS, pre_tokenizer

HERE = Path(__file__).parent
SMALL = json.loads((HERE / "golden_small_vocabularies.json").read_text(encoding="utf-8"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def test_small_vocabularies_of_all_kinds_give_the_ids_of_llama_cpp_with_control_tokens_parsed():
    assert {entry["name"] for entry in SMALL} >= {"qwen2", "qwen35", "llama-bpe", "deepseek-v3", "spm", "spm-plain"}
    for entry in SMALL:
        tokenizer = Tokenizer.from_metadata(entry["metadata"])
        ids = [tokenizer.encode(text, parse_special=True).tolist() for text in entry["texts"]]
        assert ids == entry["ids"], entry["name"]


@pytest.mark.model
def test_the_default_model_gives_the_ids_of_llama_cpp(smollm):
    golden = json.loads((HERE / "golden_smollm.json").read_text(encoding="utf-8"))
    assert len(golden) > 100
    for entry in golden:
        ids = smollm.encode(entry["text"], parse_special=entry["parse_special"]).tolist()
        assert ids == entry["ids"], entry


@pytest.mark.model
def test_every_special_token_of_the_default_model_is_one_id_when_parsed_and_text_when_not(smollm):
    control = [token for token in range(smollm.vocab_size) if smollm.is_control(token)]
    assert len(control) == 17
    for token in control:
        text = smollm.token_bytes(token).decode()
        assert smollm.encode(text, parse_special=True).tolist() == [token]
        plain = smollm.encode(f"a{text}b")
        assert not any(smollm.is_control(i) for i in plain)
        assert smollm.decode(plain) == f"a{text}b"


@pytest.mark.model
def test_the_default_model_ends_replies_at_its_end_of_turn_and_adds_no_begin_token(smollm):
    assert {smollm.token_bytes(i) for i in smollm.end_ids} == {b"<|im_end|>", b"<|endoftext|>"}
    assert not smollm.adds_bos
    text = "Hello world! Café déjà vu — 123 😊"
    assert smollm.encode_prompt(text).tolist() == smollm.encode(text).tolist()
    assert smollm.decode(smollm.encode(text)) == text


def test_user_defined_tokens_are_whole_and_control_tokens_only_when_parsed(tokenizer):
    think, start = tokenizer.id_of("<think>"), tokenizer.id_of("<|im_start|>")
    for parse_special in (False, True):
        ids = tokenizer.encode("a<think>b<|im_start|>", parse_special=parse_special).tolist()
        assert think in ids
        assert (start in ids) is parse_special
    assert not tokenizer.is_control(think)
    assert tokenizer.is_control(start)


def test_the_longest_special_token_is_taken_where_several_match(byte_level_metadata):
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(special={"<a>": 3, "<a><b>": 3, "<b>": 4}))
    ids = tokenizer.encode("<a><b><a>", parse_special=True).tolist()
    assert ids == [tokenizer.id_of("<a><b>"), tokenizer.id_of("<a>")]


def test_merging_never_makes_a_control_token(byte_level_metadata, spm):
    # "hello" as a control token: merges would lead to it.
    metadata = byte_level_metadata()
    index = metadata["tokenizer.ggml.tokens"].index("hello")
    metadata["tokenizer.ggml.token_type"][index] = 3
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert index not in tokenizer.encode("hello hello")
    assert index in tokenizer.encode("hello", parse_special=True)
    # "<s" and ">" are pieces that SentencePiece could merge into the begin token.
    assert spm.bos_id not in spm.encode("a<s>")
    assert spm.decode(spm.encode("a<s>")) == "a<s>"


def test_a_word_that_is_a_control_token_is_text_where_merges_are_ignored(byte_level_metadata):
    tokenizer = Tokenizer.from_metadata(byte_level_metadata("llama-bpe", special={"###": 3}))
    assert tokenizer.id_of("###") not in tokenizer.encode("###")


def test_a_control_looking_end_of_turn_is_control_whatever_its_file_says(byte_level_metadata):
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(special={"<|im_end|>": 4, "<|eot_id|>": 1}))
    assert tokenizer.end_ids == {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|eot_id|>")}
    assert tokenizer.id_of("<|im_end|>") not in tokenizer.encode("<|im_end|>")


def test_end_ids_have_all_named_tokens_and_no_message_end_of_a_dialect_with_calls(byte_level_metadata):
    metadata = byte_level_metadata(eos_token_id=1, eot_token_id=2, eom_token_id=3, special={"<|im_end|>": 3})
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.end_ids == {1, 2, 3, tokenizer.id_of("<|im_end|>")}
    harmony = Tokenizer.from_metadata(byte_level_metadata(special={"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}))
    assert harmony.end_ids == {harmony.id_of("<|return|>"), harmony.id_of("<|call|>")}


@pytest.mark.parametrize("add", [True, False, None])
def test_a_prompt_gets_exactly_one_begin_token_when_the_model_wants_one(byte_level_metadata, add):
    for pre, by_default in (("qwen2", False), ("llama-bpe", True)):
        metadata = byte_level_metadata(pre, bos_token_id=262, eos_token_id=264, add_bos_token=add)
        tokenizer = Tokenizer.from_metadata(metadata)
        wanted = by_default if add is None else add
        assert tokenizer.adds_bos is wanted
        assert tokenizer.encode_prompt("a").tolist().count(262) == wanted
        assert tokenizer.encode_prompt("").tolist() == [262] * wanted
        assert tokenizer.encode_prompt("<|endoftext|>a").tolist().count(262) == 1
        # What the text has is never taken away, also where it is more than one.
        assert tokenizer.encode_prompt("<|endoftext|><|endoftext|>a").tolist().count(262) == 2
        assert tokenizer.encode("a", add_special=True).tolist().count(262) == wanted


def test_no_begin_token_is_made_up_where_the_file_names_none(byte_level_metadata, sentence_piece_metadata):
    for metadata in (byte_level_metadata(add_bos_token=True), sentence_piece_metadata(bos_token_id=None)):
        tokenizer = Tokenizer.from_metadata(metadata)
        assert tokenizer.bos_id is None
        assert not tokenizer.adds_bos
        assert not any(tokenizer.is_control(i) for i in tokenizer.encode_prompt("hello"))


def test_an_end_token_is_added_to_whole_texts_where_the_model_wants_one_but_never_to_prompts(byte_level_metadata):
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(eos_token_id=264, add_eos_token=True))
    assert tokenizer.encode("a", add_special=True)[-1] == 264
    assert 264 not in tokenizer.encode_prompt("a")


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(spm):
    def texts(text):
        return [spm.token_bytes(i) for i in spm.encode(text)]

    assert texts("hello") == [b" hello"]
    assert texts("é") == [b" ", b"\xc3", b"\xa9"]
    # Two spaces score better than "he", of which " he" is made: they have taken the space before it could.
    assert texts(" hello") == [b"  ", b"he", b"llo"]
    assert texts("  hello") == [b"  ", b" hello"]
    assert texts("hello<user>hello") == [b" hello", b"<user>", b" hello"]


def test_sentence_piece_without_byte_tokens_uses_the_unknown_token(sentence_piece_metadata):
    metadata = sentence_piece_metadata()
    kept = [n for n, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind != 6]
    for key in ("tokens", "token_type", "scores"):
        metadata[f"tokenizer.ggml.{key}"] = [metadata[f"tokenizer.ggml.{key}"][n] for n in kept]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("é").tolist() == [tokenizer.id_of("▁"), tokenizer.id_of("<unk>")]


def test_a_leading_space_is_taken_away_only_where_encoding_puts_one_and_a_text_begins(
    spm, tokenizer, sentence_piece_metadata
):
    ids = spm.encode("hello")
    assert spm.decode(ids) == "hello"
    assert spm.decode(ids, continues=True) == " hello"
    assert spm.decode([spm.bos_id, *ids]) == "hello"
    plain = Tokenizer.from_metadata(sentence_piece_metadata(add_space_prefix=False))
    assert plain.decode(plain.encode(" hello")) == " hello"
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_every_text_survives_being_encoded_and_decoded(text):
    for entry in SMALL:
        tokenizer = _cached(entry["name"])
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert not any(tokenizer.is_control(i) for i in ids)
        # The small SentencePiece vocabularies store no piece for the escape of spaces itself.
        assert tokenizer.decode(ids) == (text.replace("▁", " ") if entry["name"].startswith("spm") else text)


_CACHE: dict[str, Tokenizer] = {}


def _cached(name: str) -> Tokenizer:
    if name not in _CACHE:
        entry = next(entry for entry in SMALL if entry["name"] == name)
        _CACHE[name] = Tokenizer.from_metadata(entry["metadata"])
    return _CACHE[name]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<|im_start|>", "<think>", "<|im_", "end|>", "a", " ", "\n", "é"]), max_size=12))
def test_pieces_of_a_text_encode_to_the_same_as_the_whole(tokenizer, parts):
    text = "".join(parts)
    pieces = tokenizer.split_special(text)
    assert "" not in pieces
    assert tokenizer.encode_pieces(pieces).tolist() == tokenizer.encode(text, parse_special=True).tolist()


def test_an_unpaired_surrogate_is_refused_by_name(tokenizer):
    with pytest.raises(InvalidRequest, match=r"surrogate \(U\+D83D\) at character 2"):
        tokenizer.encode("ab\ud83d")


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidRequest, match="not in the vocabulary"):
            tokenizer.decode([token])


def test_control_tokens_are_decoded_only_when_asked_for(tokenizer):
    ids = tokenizer.encode("<|im_start|>hello<think>", parse_special=True)
    assert tokenizer.decode(ids) == "hello<think>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<think>"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "model is missing"),
        ({"model": 3}, "model is 3"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": ["a", 1]}, "tokens is not an array of strings"),
        ({"tokens": "abc"}, "tokens is not an array"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'a' twice, as 0 and 2"),
        ({"token_type": [1]}, "token_type has 1 values for 268 tokens"),
        ({"token_type": [9] * 268}, "token_type has an unknown type"),
        ({"token_type": ["x"] * 268}, "token_type is not an array of numbers"),
        ({"scores": [0.0]}, "scores has 1 values"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b"]}, "merges number 0 is 'a b'"),
        ({"merges": ["ab"]}, "merges number 0 is 'ab'"),
        ({"bos_token_id": 268}, "bos_token_id is 268, but there are 268 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "x"}, "eot_token_id is 'x'"),
        ({"eom_token_id": True}, "eom_token_id is True"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
    ],
)
def test_malformed_metadata_are_refused_by_the_name_of_the_key(byte_level_metadata, change, named):
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\." + ".*") as caught:
        Tokenizer.from_metadata(byte_level_metadata(**change))
    assert named in caught.value.message
    assert caught.value.param in caught.value.message


def test_sentence_piece_metadata_are_checked_too(sentence_piece_metadata):
    with pytest.raises(ModelFileError, match="scores is missing"):
        Tokenizer.from_metadata(sentence_piece_metadata(scores=None))
    metadata = sentence_piece_metadata()
    metadata["tokenizer.ggml.tokens"][10] = "<0xZZ>"
    with pytest.raises(ModelFileError, match="10 is a byte token"):
        Tokenizer.from_metadata(metadata)
    with pytest.raises(ModelFileError, match="neither all 256 byte tokens nor an unknown token"):
        Tokenizer.from_metadata(sentence_piece_metadata(tokens=["a"], token_type=[1], scores=[0.0], bos_token_id=None,
                                                        eos_token_id=None))  # fmt: skip


def test_unknown_kinds_are_refused_by_name_and_never_guessed(byte_level_metadata):
    with pytest.raises(UnsupportedModel, match="'bert'"):
        Tokenizer.from_metadata(byte_level_metadata(model="bert"))
    with pytest.raises(UnsupportedModel, match="pre is 'qwen99'"):
        Tokenizer.from_metadata(byte_level_metadata("qwen99"))
    with pytest.raises(UnsupportedModel, match="pre is missing"):
        Tokenizer.from_metadata(byte_level_metadata(pre=None))


def test_arrays_may_be_of_numpy(byte_level_metadata):
    metadata = byte_level_metadata()
    types = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    same = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.token_type": types})
    assert same.fingerprint() == Tokenizer.from_metadata(metadata).fingerprint()


def test_the_fingerprint_changes_with_everything_that_changes_ids_and_with_nothing_else(byte_level_metadata):
    def fingerprint(pre="qwen2", **keys):
        return Tokenizer.from_metadata(byte_level_metadata(pre, **keys)).fingerprint()

    base = fingerprint()
    assert len(base) == 16
    assert fingerprint() == base
    assert Tokenizer.from_metadata({**byte_level_metadata(), "tokenizer.chat_template": "x"}).fingerprint() == base
    merges = list(reversed(byte_level_metadata()["tokenizer.ggml.merges"]))
    others = [
        fingerprint("llama-bpe"),
        fingerprint(merges=merges),
        fingerprint(bos_token_id=3),
        fingerprint(bos_token_id=3, add_bos_token=True),
        fingerprint(special={"<|endoftext|>": 3, "<x>": 4}),
        fingerprint(special={"<|endoftext|>": 3, "<x>": 3}),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_expressions_cut_where_the_families_differ():
    def cut(name, text):
        pieces = pre_tokenizer(name).build().pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in pieces]

    text = "I'LL pay 12345 for naïveTé\n\n  now!!\n"
    assert cut("gpt-2", text) == [
        "I", "'", "LL", " pay", " 12345", " for", " naïveTé", "\n\n ", " now", "!!", "\n",
    ]  # fmt: skip
    assert cut("smollm", text)[4:11] == [" ", "1", "2", "3", "4", "5", " for"]
    assert cut("qwen2", text)[:9] == ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5"]
    assert cut("llama-bpe", text)[2:6] == [" pay", " ", "123", "45"]
    assert cut("gpt-4o", text)[:1] == ["I'LL"]
    assert "Té" in cut("gpt-4o", text)
    assert cut("qwen2", "!!\n\na")[0] == "!!\n\n"
    assert cut("seed-coder", "!!\n\na")[0] == "!!"
    assert cut("qwen2", "e\u0301a") == ["e", "\u0301a"]
    assert cut("qwen35", "e\u0301a") == ["e\u0301a"]


def test_every_rule_covers_every_text():
    text = "x'sS 123 ab\u0301!?\r\n\t \u3000中文 カタ한국 😊½٣"
    for name, rule in PRE_TOKENIZERS.items():
        pieces = rule.build().pre_tokenize_str(text)
        assert "".join(text[start:end] for _, (start, end) in pieces) == text, name
