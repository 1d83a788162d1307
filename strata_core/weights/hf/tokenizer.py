"""What a folder says about its tokenizer and chat template, as the metadata of a GGUF file.

``tokenizer.json`` has the rules; the vocabulary is spread out of it so that ids, control tokens and bytes are known,
and the file's text goes along as ``tokenizer.huggingface.json``, the key that the GGUF specification has for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strata_core.errors import ModelFileError, UnsupportedModel
from strata_core.tokens.vocabulary import DEFINITION, HUGGINGFACE, PREFIX, TokenType
from strata_core.weights.hf.config import Config, read_json

_TOKENIZER = "tokenizer.json"
_TEMPLATE_KEY = "tokenizer.chat_template"
#: Far more tokens than any model knows; it bounds what a number in a file makes us allocate.
_LARGEST = 1 << 24
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_metadata(folder: Path, config: Config) -> dict[str, object]:
    """The ``tokenizer.*`` keys; none of the vocabulary where the folder has no ``tokenizer.json``.

    :param config: of the model: how many tokens it knows, and which end a reply.
    :raises ModelFileError: a file is damaged; ``param`` names the key.
    :raises UnsupportedModel: a kind of tokenizer that cannot be used.
    """
    settings = _optional(folder / "tokenizer_config.json")
    keys = _templates(folder, settings)
    path = folder / _TOKENIZER
    if not path.is_file():
        return keys
    rules = Config(path, read_json(path))
    tokens, types = _vocabulary(rules, config)
    ids = {text: number for number, text in enumerate(tokens)}
    special = _optional(folder / "special_tokens_map.json")
    for role, name in _ROLES.items():
        text = _text(settings.any(name)) or _text(special.any(name))
        if text in ids:
            keys[f"{PREFIX}{role}_token_id"] = ids[text]
            if role in ("bos", "eos"):
                types[ids[text]] = TokenType.CONTROL
    before, after = _around(rules)
    # Flags in tokenizer_config.json do not count: they are for tokenizers that are built without a tokenizer.json.
    keys |= _added(rules, "bos", before, ids) | _added(rules, "eos", after, ids)
    ends = {*_ends(config), *_ends(_optional(folder / "generation_config.json"))}
    return {
        **keys,
        PREFIX + "model": HUGGINGFACE,
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": np.array(types, np.int32),
        PREFIX + "eog_token_ids": np.array(sorted(end for end in ends if end < len(tokens)), np.int32),
        DEFINITION: path.read_text(encoding="utf-8-sig"),
    }


def _optional(path: Path) -> Config:
    return Config(path, read_json(path) if path.is_file() else {})


def _text(value: object) -> str:
    """A token is written as its text, or as an object that describes it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ends(config: Config) -> Iterator[int]:
    value = config.any("eos_token_id")
    for end in value if isinstance(value, list) else [value]:
        if end is not None and (type(end) is not int or end < 0):
            raise ModelFileError(f"{config.path}: key eos_token_id is {value!r:.80}, no ids", param="eos_token_id")
        if end is not None:
            yield end


def _vocabulary(rules: Config, config: Config) -> tuple[list[str], list[TokenType]]:
    """Text and type of every token that the model knows; where the file has none, a stand-in that no text becomes."""
    model = rules.part("model")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise UnsupportedModel(f"{rules.path}: model type {kind!r} is not supported, only 'BPE'", param="model.type")
    count = config.size("vocab_size")
    if count > _LARGEST:
        raise ModelFileError(f"{config.path}: vocab_size is {count}, more than {_LARGEST}", param="vocab_size")
    tokens: list[str | None] = [None] * count
    types = [TokenType.UNUSED] * count
    as_bytes = model.get("byte_fallback", False)
    for text, number in model.require("vocab", dict).items():
        if type(number) is not int or not 0 <= number < count:
            problem = f"token {text!r:.80} has id {number!r:.20}, but the model knows {count} tokens"
            raise ModelFileError(f"{rules.path}: {problem}", param="model.vocab")
        tokens[number] = text
        is_byte = as_bytes and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        types[number] = TokenType.BYTE if is_byte else TokenType.NORMAL
    added: list[Any] = rules.get("added_tokens", [])
    for entry in added:
        try:
            number, text, special = int(entry["id"]), str(entry["content"]), bool(entry.get("special", False))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"an added token is malformed: {entry!r:.80}"
            raise ModelFileError(f"{rules.path}: {problem}", param="added_tokens") from error
        if 0 <= number < count:  # text models leave out what only a larger model knows, such as a token for images
            tokens[number] = text
            types[number] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    return [f"[PAD{number}]" if text is None else text for number, text in enumerate(tokens)], types


def _around(rules: Config) -> tuple[list[str], list[str]]:
    """The tokens that the file puts before and after a text."""
    try:
        return _template(rules)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ModelFileError(f"{rules.path}: post_processor is malformed", param="post_processor") from error


def _template(rules: Config) -> tuple[list[str], list[str]]:
    before: list[str] = []
    after: list[str] = []
    for step in _steps(rules.any("post_processor")):
        if step.get("type") == "TemplateProcessing":
            target = before
            for part in step.get("single", []):
                if "Sequence" in part:
                    target = after
                elif "SpecialToken" in part:
                    target.append(str(part["SpecialToken"].get("id")))
        elif step.get("type") in ("BertProcessing", "RobertaProcessing"):
            before.append(str(step["cls"][0]))
            after.append(str(step["sep"][0]))
    return before, after


def _steps(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for step in value.get("processors", []):
            yield from _steps(step)


def _added(rules: Config, role: str, texts: list[str], ids: Mapping[str, int]) -> dict[str, object]:
    """Keys that say that a token is put before or after a text, and which."""
    if len(texts) > 1:
        problem = f"puts {', '.join(texts)} beside a text, not one token"
        raise UnsupportedModel(f"{rules.path}: {problem}", param="post_processor")
    if not texts:
        return {f"{PREFIX}add_{role}_token": False}
    if texts[0] not in ids:
        problem = f"post_processor names token {texts[0]!r}, which is absent"
        raise ModelFileError(f"{rules.path}: {problem}", param="post_processor")
    return {f"{PREFIX}add_{role}_token": True, f"{PREFIX}{role}_token_id": ids[texts[0]]}


def _templates(folder: Path, settings: Config) -> dict[str, object]:
    """Chat templates, from the first of the places that have one: a file, the processor's file, the tokenizer's."""
    found: dict[str, str] = {}
    for value in (settings.any("chat_template"), _optional(folder / "chat_template.json").any("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        for entry in value if isinstance(value, list) else []:
            if not isinstance(entry, dict):
                raise ModelFileError(f"{settings.path}: key chat_template is malformed", param="chat_template")
            found[_text({"content": entry.get("name")})] = _text({"content": entry.get("template")})
    for path in [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            try:
                found[name] = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(f"{path}: cannot be read: {error}", param=_TEMPLATE_KEY) from error
    names = {"default": _TEMPLATE_KEY, "tool_use": _TEMPLATE_KEY + ".tool_use"}
    return {key: found[name] for name, key in names.items() if found.get(name)}
