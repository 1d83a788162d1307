"""Reasoning and tool calls in what a model writes, however it is cut into deltas."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.tokens import (
    ContentDelta,
    ReasoningDelta,
    Tokenizer,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    parser_for,
)

QWEN = "… <tool_call> … <think> … </think> …"
HERMES = "… <tool_call> …"
LLAMA = "… <|python_tag|> …"
MISTRAL = "… [TOOL_CALLS] … {{ raise_exception('x') if call.id|length != 9 }} …"
TOOLS = ("weather", "time")
WEATHER = '{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}'


def read(template: str | None, text: str, cuts=(), **options):
    """Content, reasoning and calls (name, arguments, id) of a reply that comes in pieces."""
    parser = parser_for(template, **{"tool_names": TOOLS, **options})
    events = []
    for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        events += parser.push(text[start:end])
    events += parser.finish()
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [event.index for event in starts] == list(range(len(starts)))
    calls = []
    for start in starts:
        mine = [event for event in events if getattr(event, "index", None) == start.index]
        assert isinstance(mine[0], ToolCallStart) and isinstance(mine[-1], ToolCallEnd)
        arguments = "".join(event.arguments for event in mine if isinstance(event, ToolCallDelta))
        assert isinstance(json.loads(arguments), dict)
        calls.append((start.name, arguments, start.id, mine[-1].source))
    return content, reasoning, calls


CASES = {
    "text": (QWEN, "just text  \n", {}),
    "thinking": (QWEN, "<think>\nhm </thin k>\n</think>\n\nanswer", {}),
    "thinking that the prompt began": (QWEN, "\nhm\n</think>\n\nanswer", {"prompt_text": "…assistant\n<think>\n"}),
    "thinking without an end": (QWEN, "<think>hm\n", {}),
    "call": (HERMES, f"Let me look.\n<tool_call>\n{WEATHER}\n</tool_call>\nDone.", {}),
    "two calls": (HERMES, f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n", {}),
    "thinking and a call": (QWEN, f"<think>hm</think>\n<tool_call>{WEATHER}</tool_call>", {}),
    "broken call": (HERMES, "a <tool_call>{\"name\": weather}</tool_call> b", {}),
    "open call": (HERMES, "a <tool_call>{\"name\": \"weather\", ", {}),
    "marker in an argument": (
        HERMES, '<tool_call>{"name": "time", "arguments": {"x": "</tool_call> \\" <tool_call>"}}</tool_call>', {},
    ),
    "llama": (
        LLAMA, '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"a": 1}}', {},
    ),
    "bare llama": (LLAMA, '{"name": "time", "parameters": {"zone": "UTC"}}', {}),
    "JSON that is no call": (LLAMA, '{"name": "Bob", "parameters": {}}', {}),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", {}),
    "new mistral": (MISTRAL, 'ok[TOOL_CALLS]time[ARGS]{"a": 1}[TOOL_CALLS]weather[ARGS]{}', {}),
    "nearly markers": (QWEN, "a < b <t <tool_cal </think> <tool_call", {}),
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_how_a_reply_is_cut_changes_nothing(case, data):
    template, text, options = CASES[case]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))

    def without_ids(result):
        content, reasoning, calls = result
        return content, reasoning, [(name, arguments, source) for name, arguments, _, source in calls]

    assert without_ids(read(template, text, cuts, **options)) == without_ids(read(template, text, **options))


def test_text_without_markers_is_the_text():
    for template in (None, "no markers", QWEN, HERMES, LLAMA, MISTRAL):
        for text in ("", "  just\n text \n\n", "a < b </tool_call> <t", "\n\n{ x", "[1, 2]", "<think"):
            assert read(template, text) == (text, "", [])


def test_text_is_handed_on_at_once_unless_it_may_be_a_marker():
    parser = parser_for(QWEN, tool_names=TOOLS)
    assert parser.push("Hi") == [ContentDelta("Hi")]
    assert parser.push(" there <") == [ContentDelta(" there")]
    assert parser.push("b>") == [ContentDelta(" <b>")]
    assert parser.push(" <tool_ca") == []
    assert parser.finish() == [ContentDelta(" <tool_ca")]


def test_thinking_is_parted_from_the_answer_with_the_line_breaks_of_the_markers():
    assert read(QWEN, "<think>\nhm\n\nwell\n</think>\n\nanswer\n") == ("answer\n", "hm\n\nwell", [])
    assert read(QWEN, "\n<think></think>answer") == ("answer", "", [])
    opened = {"prompt_text": "<|im_start|>assistant\n<think>\n"}
    assert read(QWEN, "hm</think>answer <think>", **opened) == ("answer <think>", "hm", [])
    closed = {"prompt_text": "assistant\n<think>\n\n</think>\n\n"}
    assert read(QWEN, "answer", **closed) == ("answer", "", [])
    assert read(QWEN, "<think>never closed\n") == ("", "never closed\n", [])
    assert read(QWEN, "answer first <think>x</think>") == ("answer first <think>x</think>", "", [])
    assert read(HERMES, "<think>x</think>") == ("<think>x</think>", "", [])
    assert read(QWEN, "<think>x</think>", reasoning=False) == ("<think>x</think>", "", [])


def test_calls_of_qwen_are_read_in_order_and_keep_the_models_own_json():
    content, _, calls = read(*CASES["call"][:2])
    assert content == "Let me look.Done."
    assert [call[:2] for call in calls] == [("weather", '{"city": "Zürich", "days": [1, 2]}')]
    assert calls[0][3] == f"<tool_call>\n{WEATHER}\n</tool_call>"
    content, _, calls = read(*CASES["two calls"][:2])
    assert content == ""
    assert len(calls) == 2
    assert len({call[2] for call in calls}) == 2


def test_ids_of_calls_cannot_be_guessed_and_have_the_form_that_the_template_wants():
    ids = {read(*CASES["call"][:2])[2][0][2] for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch("call_[0-9a-f]{24}", identifier) for identifier in ids)
    assert re.fullmatch("[A-Za-z0-9]{9}", read(*CASES["mistral"][:2])[2][0][2])


def test_calls_of_llama_need_no_marker_but_an_offered_name():
    assert [call[:2] for call in read(*CASES["llama"][:2])[2]] == [("time", "{}"), ("weather", '{"a": 1}')]
    assert [call[:2] for call in read(*CASES["bare llama"][:2])[2]] == [("time", '{"zone": "UTC"}')]
    text = CASES["JSON that is no call"][1]
    assert read(LLAMA, text) == (text, "", [])
    assert read("{\"name\": function name, \"parameters\": …", CASES["bare llama"][1])[2][0][0] == "time"


def test_calls_of_mistral_come_as_a_list_or_by_name():
    assert [call[0] for call in read(*CASES["mistral"][:2])[2]] == ["weather", "weather"]
    content, _, calls = read(*CASES["new mistral"][:2])
    assert content == "ok"
    assert [call[:2] for call in calls] == [("time", '{"a": 1}'), ("weather", "{}")]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, 'a <tool_call>{"name": weather}</tool_call> b\n'),
        (HERMES, "<tool_call>\n[]\n</tool_call>"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time", "arguments": [1]}</tool_call>'),
        (HERMES, ' <tool_call>{"name": "time", "arguments": {"a'),
        (HERMES, '<tool_call>{"name": "time"} and more</tool_call>'),
        (LLAMA, '<|python_tag|>search.call(query="x")'),
        (MISTRAL, "[TOOL_CALLS] nothing"),
        (HERMES, "<tool_call>" + "[" * 100_000),
    ],
)
def test_what_only_looks_like_a_call_is_text_with_nothing_lost(template, text):
    assert read(template, text) == (text, "", [])


def test_arguments_are_valid_json_whatever_the_model_makes_of_line_breaks_or_quotes():
    text = '<tool_call>{"name": "time", "arguments": {"x": "a\nb"}}</tool_call>'
    assert json.loads(read(HERMES, text)[2][0][1]) == {"x": "a\nb"}
    text = '<tool_call>{"name": "time", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert read(HERMES, text)[2][0][1] == '{"x": 1}'
    assert read(HERMES, '<tool_call>{"name": "time"}</tool_call>')[2][0][1] == "{}"


def test_a_call_whose_closing_marker_never_came_counts_when_it_is_complete():
    assert read(HERMES, f"<tool_call>\n{WEATHER}\n")[2][0][0] == "weather"


def test_no_calls_are_looked_for_when_no_tools_are_offered():
    text = f"<tool_call>{WEATHER}</tool_call>\n"
    assert read(HERMES, text, tool_names=()) == (text, "", [])


def test_markers_that_are_control_tokens_must_be_kept_by_the_detokenizer(byte_level_metadata):
    special = {"[TOOL_CALLS]": 3, "[ARGS]": 3, "</s>": 3, "<think>": 4, "</think>": 3}
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(special=special))
    mistral = parser_for(MISTRAL, tool_names=TOOLS).marker_ids(tokenizer)
    assert mistral == {tokenizer.id_of("[TOOL_CALLS]"), tokenizer.id_of("[ARGS]")}
    assert parser_for(QWEN).marker_ids(tokenizer) == {tokenizer.id_of("</think>")}
    assert parser_for(MISTRAL).marker_ids(tokenizer) == frozenset()
