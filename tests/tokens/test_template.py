"""Chat templates: what they see, and how they fail."""

from __future__ import annotations

import datetime
import threading

import pytest

from strata_core.errors import InvalidRequest, ModelFileError, SettingsError, TemplateError
from strata_core.tokens import ChatTemplate, Tokenizer, render_tokens

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def template(source: str, **options: str) -> ChatTemplate:
    return ChatTemplate(source, **{"bos_token": "<s>", "eos_token": "</s>", **options})


def render(source: str, messages=HELLO, **options) -> str:
    return template(source).render(messages, **options)


def test_chatml_renders_with_and_without_the_opening_of_a_reply():
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_blocks_leave_no_blank_lines_behind():
    assert render("{% if true %}\n  {% for m in messages %}\nx\n  {% endfor %}\n{% endif %}\ny") == "x\ny"


def test_tojson_writes_letters_as_they_are_and_takes_the_options_of_transformers():
    assert render("{{ {'b': '<é>', 'a': [1, none]} | tojson }}") == '{"b": "<é>", "a": [1, null]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":2,"b":1}'
    assert render("{{ ['é'] | tojson(indent=2) }}") == '[\n  "é"\n]'
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


def test_templates_have_the_date_loop_controls_and_the_generation_tag():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
                  "{% if i > 2 %}{% break %}{% endif %}{% endfor %}") == "023"  # fmt: skip
    assert render("a{% generation %}{{ 1 + 1 }}{% endgeneration %}b") == "a2b"


def test_templates_see_tools_documents_arguments_and_the_special_tokens():
    assert render("{{ tools[0].name }}{{ documents[0].text }}{{ deep }}{{ bos_token }}{{ eos_token }}",
                  tools=[{"name": "t"}], documents=[{"text": "d"}], deep=3) == "td3<s></s>"  # fmt: skip
    assert render("{% if tools is none %}none{% endif %}", tools=[]) == "none"


def test_arguments_may_not_replace_what_the_rendering_sets():
    with pytest.raises(InvalidRequest, match="bos_token") as caught:
        render(CHATML, bos_token="<|im_start|>")
    assert caught.value.param == "chat_template_kwargs"


def test_a_second_template_is_used_when_there_are_tools(tokenizer):
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    chosen = ChatTemplate.from_metadata(metadata, tokenizer)
    assert chosen.render(HELLO) == "plain"
    assert chosen.render(HELLO, tools=[{"name": "t"}]) == "tools"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% for x in %}", "line 2"),
        ("{{ raise_exception('System role not supported') }}", "^System role not supported$"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1,000,000 passes"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{{ 'a' * 10 ** 10 }}", "text of more than"),
        ("{{ 10 ** 9999999999 }}", "text of more than"),
        ("{{ '%999999999d' % 1 }}", "too wide"),
        ("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more than"),
        ("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", "more than"),
        ("{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}", "text of more than"),
    ],
)  # fmt: skip
def test_a_failing_template_is_an_error_of_the_request_in_its_own_words(source, words):
    with pytest.raises(TemplateError, match=words) as caught:
        render(source)
    assert caught.value.http_status == 400


def test_a_broken_template_fails_only_when_it_is_used(tokenizer):
    broken = ChatTemplate.from_metadata({"tokenizer.chat_template": "{% for %}"}, tokenizer)
    assert "line 1" in str(broken.error)
    with pytest.raises(TemplateError, match="line 1"):
        broken.render(HELLO)
    assert template(CHATML).error is None


def test_without_a_template_rendering_says_what_to_do(tokenizer):
    assert ChatTemplate.from_metadata({}, tokenizer) is None
    assert ChatTemplate.from_metadata({"tokenizer.chat_template": ""}, tokenizer) is None
    with pytest.raises(TemplateError, match="no chat template; pass --chat-template-file"):
        render_tokens(None, tokenizer, HELLO)


def test_a_named_file_replaces_the_models_template_and_must_be_readable(tokenizer, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("own {{ messages[0].content }}", encoding="utf-8")
    metadata = {"tokenizer.chat_template": "model's", "tokenizer.chat_template.tool_use": "model's for tools"}
    own = ChatTemplate.from_metadata(metadata, tokenizer, file)
    assert own.render(HELLO, tools=[{"name": "t"}]) == "own hello"
    assert ChatTemplate.from_metadata({}, tokenizer, str(file)).render(HELLO) == "own hello"
    with pytest.raises(SettingsError, match=r"absent\.jinja"):
        ChatTemplate.from_metadata(metadata, tokenizer, tmp_path / "absent.jinja")


def test_a_template_that_is_no_text_is_a_damaged_file(tokenizer):
    with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template is not a text"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 3}, tokenizer)


def test_the_special_tokens_come_from_the_tokenizer(byte_level_metadata):
    metadata = {**byte_level_metadata(bos_token_id=262), "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert ChatTemplate.from_metadata(metadata, tokenizer).render(HELLO) == "<|endoftext|>|"


def test_renderings_of_several_threads_do_not_share_a_budget():
    loops = template("{% for i in range(90000) %}{% for j in range(5) %}{% endfor %}{% endfor %}done")
    results = []
    threads = [threading.Thread(target=lambda: results.append(loops.render(HELLO))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 3


@pytest.mark.oracle
@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{%- for m in messages %}\n  {%- if m.role == 'user' and loop.last %}\n{{ m.content | trim | tojson }}\n"
        "  {%- endif %}\n{%- endfor %}\n{{ tools | tojson(indent=4) if tools }}",
        "{% macro box(x) %}[{{ x }}]{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}"
        "{% set ns.n = ns.n + 1 %}{{ box(m.content) ~ ns.n }}{% endfor %}",
        "{% generation %}{{ messages | map(attribute='content') | join('|') }}{% endgeneration %}",
    ],
)  # fmt: skip
def test_rendering_equals_that_of_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [*HELLO, {"role": "assistant", "content": " <é>\n"}, {"role": "user", "content": "  a  "}]
    tools = [{"type": "function", "function": {"name": "t", "parameters": {"ü": "<x>"}}}]
    theirs, _ = render_jinja_template([conversation], tools=tools, chat_template=source, add_generation_prompt=True)
    assert render(source, conversation, tools=tools) == theirs[0]


def test_a_byte_order_mark_before_a_template_file_is_no_part_of_the_prompt(tokenizer, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    template = ChatTemplate.from_metadata({}, tokenizer, path)
    assert template is not None and template.source == "{{ messages[0].content }}"
