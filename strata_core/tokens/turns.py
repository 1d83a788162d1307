"""Finds out which tokens open a turn in a model's conversations."""

from __future__ import annotations

from strata_core.errors import StrataError
from strata_core.tokens.template import ChatTemplate
from strata_core.tokens.tokenizer import Tokenizer

#: Contents of the probe: words that no template contains.
_WORDS = ("zqfirst", "zqsecond", "zqthird")


def turn_opener_ids(template: ChatTemplate | None, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens with which turns begin: ``<|im_start|>`` in ChatML, ``<start_of_turn>``, ``[INST]``, ``<|user|>`` …

    A small conversation is rendered, and the special tokens are looked at that stand between the contents of two
    messages. Those that can also stand at the end of a conversation close a turn; the first of the others opens the
    next. The begin token opens a turn only where nothing else does, and the template repeats it.

    Empty when there is no template, when it fails, or when its turns begin with plain text.
    """
    if template is None:
        return frozenset()
    whole = _gaps(template, tokenizer, 3)
    if whole is None:
        return frozenset()
    closers = set(tokenizer.end_ids)
    for length in (1, 2):
        shorter = _gaps(template, tokenizer, length)
        if shorter is not None:
            closers.update(shorter[-1])
    openers = set()
    for number, gap in enumerate(whole[:-1]):
        opening = [token for token in gap if token not in closers]
        named = [token for token in opening if token != tokenizer.bos_id]
        openers.update(named[:1] or (opening[:1] if number else []))
    return frozenset(openers)


def _gaps(template: ChatTemplate, tokenizer: Tokenizer, length: int) -> list[list[int]] | None:
    """Special tokens before the first, between, and after the last of the messages' contents."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(_WORDS[:length])]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except StrataError:
        return None
    gaps = []
    for message in messages:
        before, found, text = text.partition(message["content"])
        if not found:
            return None
        gaps.append(tokenizer.special_ids(before))
    return [*gaps, tokenizer.special_ids(text)]
