"""Token ids to text, one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.tokens import StreamingDetokenizer

FAMILY = "👩‍👩‍👧‍👦"
TEXTS = ("😀", FAMILY, "e\u0301 a\u0308\u0323", "今天天气", "🏳️‍🌈 👍🏽 1️⃣", "hello 😊 world", "\ufeffbom", "")


def stream(tokenizer, ids, **options):
    detokenizer = StreamingDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_characters_that_are_cut_into_bytes_come_whole(tokenizer, spm):
    for any_tokenizer in (tokenizer, spm):
        for text in TEXTS:
            ids = any_tokenizer.encode(text).tolist()
            deltas = stream(any_tokenizer, ids)
            assert "".join(deltas) == text
            assert "\ufffd" not in "".join(deltas)
            assert all(delta.encode().decode() == delta for delta in deltas)


def test_a_reply_that_ends_within_a_character_ends_with_one_replacement_character(tokenizer):
    ids = tokenizer.encode("a" + FAMILY).tolist()
    for kept in range(len(ids)):
        whole = "".join(stream(tokenizer, ids[:kept]))
        assert whole == tokenizer.decode(ids[:kept])
        assert whole.count("\ufffd") <= 1
        assert "\ufffd" not in whole[:-1]
    assert "".join(stream(tokenizer, ids[:3])) == "a\ufffd"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 267), max_size=40), skip=st.booleans(), goes_on=st.booleans())
def test_all_deltas_in_a_row_are_the_full_decode_whatever_the_tokens(tokenizer, spm, ids, skip, goes_on):
    for any_tokenizer in (tokenizer, spm):
        deltas = stream(any_tokenizer, ids, skip_special=skip, continues=goes_on)
        assert "".join(deltas) == any_tokenizer.decode(ids, skip_special=skip, continues=goes_on)


def test_the_space_that_encoding_puts_in_front_is_taken_away_once(spm):
    space = spm.id_of("▁")
    assert stream(spm, [spm.bos_id, space, space, *spm.encode("hello").tolist()]) == ["", "", " ", " hello", ""]
    assert stream(spm, [space, space], continues=True) == [" ", " ", ""]


def test_control_tokens_are_left_out_unless_they_are_kept(tokenizer):
    start, end = tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|im_end|>")
    assert stream(tokenizer, [start, end]) == ["", "", ""]
    assert stream(tokenizer, [start, end], keep={start}) == ["<|im_start|>", "", ""]
    assert stream(tokenizer, [start, end], skip_special=False) == ["<|im_start|>", "<|im_end|>", ""]


@pytest.mark.model
def test_the_default_model_streams_every_text_whole(smollm):
    for text in TEXTS[:-2]:
        ids = smollm.encode(text).tolist()
        assert "".join(stream(smollm, ids)) == text
