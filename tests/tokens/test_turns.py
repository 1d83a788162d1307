"""Which tokens open a turn, found by probing templates of the common families."""

from __future__ import annotations

import pytest

from strata_core.tokens import ChatTemplate, Tokenizer, turn_opener_ids

LOOP = "{% for m in messages %}BODY{% endfor %}"
FAMILIES = {
    "ChatML": (
        LOOP.replace("BODY", "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"),
        ["<|im_start|>", "<|im_end|>"], {}, ["<|im_start|>"],
    ),
    "ChatML with a system turn of its own": (
        "<|im_start|>system\nbe good<|im_end|>\n"
        + LOOP.replace("BODY", "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"),
        ["<|im_start|>", "<|im_end|>"], {}, ["<|im_start|>"],
    ),
    "Llama 3": (
        "{{ bos_token }}" + LOOP.replace("BODY", "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'"
                                                 " + m.content | trim + '<|eot_id|>' }}"),
        ["<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], {"bos": "<bos>"}, ["<|start_header_id|>"],
    ),
    "Gemma": (
        "{{ bos_token }}" + LOOP.replace("BODY", "<start_of_turn>{{ m.role + '\\n' + m.content }}<end_of_turn>\n"),
        ["<bos>", "<start_of_turn>", "<end_of_turn>"], {"bos": "<bos>"}, ["<start_of_turn>"],
    ),
    "Phi": (
        LOOP.replace("BODY", "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"),
        ["<|user|>", "<|assistant|>", "<|end|>"], {}, ["<|user|>", "<|assistant|>"],
    ),
    "Mistral": (
        "{{ bos_token }}" + LOOP.replace("BODY", "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
                                                 "{% else %}{{ m.content + eos_token }}{% endif %}"),
        ["<s>", "</s>", "[INST]", "[/INST]"], {"bos": "<s>", "eos": "</s>"}, ["[INST]"],
    ),
    "Llama 2": (
        LOOP.replace("BODY", "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
                             "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}"),
        ["<s>", "</s>"], {"bos": "<s>", "eos": "</s>"}, ["<s>"],
    ),
    "DeepSeek": (
        "{{ bos_token }}" + LOOP.replace("BODY", "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
                                                 "{% else %}<｜Assistant｜>{{ m.content + eos_token }}{% endif %}"),
        ["<bos>", "<eos>", "<｜User｜>", "<｜Assistant｜>"], {"bos": "<bos>", "eos": "<eos>"},
        ["<｜User｜>", "<｜Assistant｜>"],
    ),
    "harmony": (
        LOOP.replace("BODY", "<|start|>{{ m.role }}<|message|>{{ m.content }}{{ '<|return|>' if loop.last and"
                             " m.role == 'assistant' else '<|end|>' }}"),
        ["<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"], {}, ["<|start|>"],
    ),
    "plain text": (LOOP.replace("BODY", "{{ m.role + ': ' + m.content + '\\n' }}"), ["<|im_end|>"], {}, []),
    "refuses everything": ("{{ raise_exception('no') }}", ["<|im_start|>"], {}, []),
    "drops contents": (LOOP.replace("BODY", "<|im_start|>{{ m.role }}"), ["<|im_start|>"], {}, []),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_that_open_a_turn_are_found(byte_level_metadata, family):
    source, special, roles, openers = FAMILIES[family]
    metadata = byte_level_metadata(special=dict.fromkeys(special, 3))
    for role, text in roles.items():
        metadata[f"tokenizer.ggml.{role}_token_id"] = metadata["tokenizer.ggml.tokens"].index(text)
    tokenizer = Tokenizer.from_metadata({**metadata, "tokenizer.chat_template": source})
    template = ChatTemplate.from_metadata({"tokenizer.chat_template": source}, tokenizer)
    assert turn_opener_ids(template, tokenizer) == {tokenizer.id_of(text) for text in openers}


def test_no_template_has_no_openers(tokenizer):
    assert turn_opener_ids(None, tokenizer) == frozenset()


@pytest.mark.model
def test_the_default_model_opens_turns_with_im_start(smollm, smollm_metadata):
    template = ChatTemplate.from_metadata(smollm_metadata, smollm)
    assert turn_opener_ids(template, smollm) == {smollm.id_of("<|im_start|>")}
