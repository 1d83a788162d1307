"""``POST /v1/completions``: text that continues a prompt as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import flask
import numpy as np

from strata_core.engine.requests import Delta, Finished, Progress, TokenInfo
from strata_core.errors import ContextLengthExceeded, InvalidRequest
from strata_core.server import common, fields, generation, replies
from strata_core.server.body import Body, read_json, refuse
from strata_core.server.running import ChoiceEvent, Running
from strata_core.server.tokens import read_tokens

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine

blueprint = flask.Blueprint("openai_completions", __name__)

MOST_PROMPTS = 128


@blueprint.post("/v1/completions")
def completions() -> flask.Response:
    """Continue one or several prompts."""
    arrived = time.monotonic()
    here = common.parts()
    engine = here.holder.accepting()
    data = read_json()
    fields.refuse_unsupported(data)
    body = Body(data, fields.COMPLETIONS)
    _refuse_legacy(body)
    options = fields.read_options(
        body,
        here.settings,
        max_tokens="max_tokens",
        logprobs=body.integer("logprobs", low=0, high=fields.MOST_TOP_LOGPROBS),
    )
    common.check_model(engine, options.model)
    echo = body.boolean("echo")
    if echo and options.sampling.logprobs is not None:
        raise InvalidRequest("logprobs of an echoed prompt are not supported", param="logprobs")
    prompts = _read_prompts(body.required("prompt"), engine)
    try:
        running = generation.submit(engine, [ids for ids, _ in prompts], options)
    except ContextLengthExceeded as error:
        # The engine does not know what the dialect calls its prompt.
        param = "max_tokens" if error.param == "max_tokens" else "prompt"
        raise ContextLengthExceeded(error.message, param=param) from None
    reply = TextReply(engine.name, running, options, [text if echo else "" for _, text in prompts])
    return generation.reply(engine, running, reply, options, arrived)


def _refuse_legacy(body: Body) -> None:
    if body.text("suffix"):
        raise InvalidRequest("suffix is not supported", param="suffix")
    best_of = body.integer("best_of", low=1)
    if best_of is not None and best_of > 1 and best_of != body.integer("n"):
        # With best_of equal to n all candidates are returned, which is what n alone means.
        raise InvalidRequest("best_of greater than n is not supported", param="best_of")


def _read_prompts(value: Any, engine: Engine) -> list[tuple[np.ndarray, str]]:
    """Token ids (int32) and text of every prompt."""
    several = isinstance(value, list) and value and not isinstance(value[0], int)
    prompts = value if several else [value]
    if len(prompts) > MOST_PROMPTS:
        raise InvalidRequest(f"prompt may hold at most {MOST_PROMPTS} prompts, not {len(prompts)}", param="prompt")
    return [_read_prompt(prompt, engine) for prompt in prompts]


def _read_prompt(prompt: Any, engine: Engine) -> tuple[np.ndarray, str]:
    tokenizer = engine.tokenizer
    if isinstance(prompt, str):
        ids, text = tokenizer.encode_prompt(prompt), prompt
    elif isinstance(prompt, list):
        tokens = read_tokens("prompt", prompt, tokenizer.vocab_size)
        ids, text = np.array(tokens, np.int32), tokenizer.decode(tokens, skip_special=False)
    else:
        refuse("prompt", "a string, an array of token ids, or an array of either", prompt)
    if not len(ids):
        raise InvalidRequest("prompt is empty, and the model has no token that begins a text", param="prompt")
    return ids, text


@attrs.define
class _Choice:
    """What choice has been told so far. ``echo``: the prompt, until it has been sent."""

    echo: str
    texts: list[str] = attrs.field(factory=list)
    logprobs: list[TokenInfo] = attrs.field(factory=list)
    length: int = 0
    reason: str | None = None


class TextReply:
    """Chunks and whole replies of ``text_completion``."""

    def __init__(self, model: str, running: Running, options: fields.Options, echoes: Sequence[str]):
        self._running = running
        self._options = options
        self._choices = [_Choice(echo) for echo in echoes for _ in range(options.n)]
        self._frame = {
            "id": f"cmpl-{running.ids[0]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": replies.FINGERPRINT,
        }

    def chunks(self, item: ChoiceEvent) -> Iterator[dict[str, Any]]:
        choice, event = self._choices[item.index], item.event
        if isinstance(event, Progress):
            yield self._chunk(item.index, "") | {"prompt_progress": attrs.asdict(event)}
        elif isinstance(event, Delta):
            text = choice.echo + event.text
            choice.echo = ""
            shown = self._logprobs(event.logprobs, choice.length)
            choice.texts.append(text)
            choice.length += len(text)
            choice.logprobs.extend(event.logprobs)
            if text or event.logprobs:
                yield self._chunk(item.index, text, shown)
        elif isinstance(event, Finished):
            text, choice.echo, choice.reason = choice.echo, "", event.reason
            choice.texts.append(text)
            yield self._chunk(item.index, text, reason=event.reason)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        extra = replies.extras(self._running, self._options, in_stream=True)
        if extra:
            yield self._frame | {"choices": []} | extra

    def whole(self) -> dict[str, Any]:
        found = self._frame | {
            "choices": [
                _choice_object(
                    index, "".join(choice.texts), self._logprobs(choice.logprobs, 0), choice.reason
                )
                for index, choice in enumerate(self._choices)
            ],
        }
        return found | replies.extras(self._running, self._options, in_stream=False)

    def _logprobs(self, infos: Sequence[TokenInfo], offset: int) -> dict[str, Any] | None:
        return None if self._options.sampling.logprobs is None else replies.legacy_logprobs(infos, offset)

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return self._frame | {"choices": [_choice_object(index, text, logprobs, reason)]}


def _choice_object(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
