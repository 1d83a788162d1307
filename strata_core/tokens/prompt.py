"""Messages to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from strata_core.errors import InvalidRequest, TemplateError
from strata_core.tokens.standins import StandIns, characters
from strata_core.tokens.template import NO_TEMPLATE, ChatTemplate, Message
from strata_core.tokens.tokenizer import Tokenizer


@attrs.frozen(eq=False)
class RenderedPrompt:
    """A rendered conversation.

    :ivar tokens: int32 (n,).
    :ivar text: the text that they stand for, control tokens as their texts; without a begin token that the template did
        not write.
    :ivar pieces: the same, cut at the control tokens: plain texts and ids. To tokenise a part of the text again, take
        these (:meth:`Tokenizer.encode_pieces`); parsed from ``text``, a caller's words could become control tokens.
    """

    tokens: np.ndarray
    text: str
    pieces: tuple[str | int, ...]


def render_tokens(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **template_kwargs: Any,
) -> RenderedPrompt:
    """Render a conversation and tokenise it; only the template writes control tokens, never the caller.

    What holds:

    * Where no string of the caller has (a part of) a control token's text in it, the ids are those of the rendered text
      with control tokens parsed.
    * A control token's text anywhere in what the caller gave (contents, names, tool schemas and their keys, arguments,
      documents, template arguments) is tokenised as plain text. So is one that would come about because the caller's
      string ends with its begin, or begins with its end, next to other text.
    * That survives what templates do to strings: trimming, changing case, slicing, joining, splitting, ``tojson``.
      While the template runs, such texts are single private-use characters; they are turned back afterwards, in their
      original case. So a template that looks for a control token in a message does not find it, and ``length`` counts
      it as one.
    * User-defined tokens (``<think>`` in many models) are whole wherever they come from.
    * The begin token is there exactly once if the model wants one, whether the template writes it or not. What the
      template writes is never taken away.

    :raises TemplateError: there is no template (``template`` is None), or it failed.
    :raises InvalidRequest: a string has an unpaired surrogate, or a template argument a reserved name.
    """
    if template is None:
        raise TemplateError(NO_TEMPLATE)
    variables = template.variables(messages, tools, add_generation_prompt, documents, template_kwargs)
    try:
        used = characters(variables) | characters(template.source) | characters(template.with_tools)
        stand_ins = StandIns(tokenizer.control, used)
        protected = {name: stand_ins.protect(value) for name, value in variables.items()}
    except RecursionError as error:
        raise InvalidRequest("the messages or tools are nested too deeply", param="messages") from error
    try:
        text = template.render_variables(protected, stand_ins.escape_json)
    except TemplateError as error:
        raise TemplateError(stand_ins.restore(error.message)) from error
    pieces = [p if isinstance(p, int) else stand_ins.restore(p) for p in tokenizer.split_special(text)]
    tokens = tokenizer.with_bos(tokenizer.encode_pieces(pieces))
    return RenderedPrompt(tokens, stand_ins.restore(text), tuple(pieces))
