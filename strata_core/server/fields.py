"""The request fields of every endpoint, and the ones that all generating endpoints share.

The tables are what :class:`strata_core.server.body.Body` lets an endpoint read and what ``docs/http-api.md`` is
tested against.
"""

from __future__ import annotations

from typing import Any

import attrs

from strata_core.engine.requests import Sampling
from strata_core.errors import InvalidRequest
from strata_core.server.body import Body, as_number, kind_of, refuse
from strata_core.settings.core import Settings

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "repeat_penalty",
    "penalty_window",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
GENERATING = (
    "model",
    "n",
    "stop",
    "max_tokens",
    *SAMPLING,
    "ignore_eos",
    "logprobs",
    "stream",
    "stream_options",
    "return_progress",
    "response_format",
    "strata",
    "strata_cache",
    "strata_pin",
    "user",
)
PROMPTING = ("messages", "tools", "tool_choice", "chat_template_kwargs")
RENDER = ("model", *PROMPTING)
CHAT = (*GENERATING, *PROMPTING, "max_completion_tokens", "top_logprobs", "parallel_tool_calls", "strata_prefix")
COMPLETIONS = (*GENERATING, "prompt", "echo", "suffix", "best_of")
TOKENIZE = ("model", "content", "add_special", "parse_special", "with_pieces")
DETOKENIZE = ("model", "tokens")

REQUEST_FIELDS = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": RENDER,
    "/v1/completions": COMPLETIONS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/conversations/import": (),  # the body is a file
}
"""Every field that is read, by route."""

UNSUPPORTED = (
    "audio",
    "function_call",
    "functions",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "prediction",
    "structured_outputs",
    "web_search_options",
)
"""Fields of other servers that change what a reply is. Dropping them would answer something that was not asked."""


def refuse_unsupported(data: dict[str, Any]) -> None:
    """:raises InvalidRequest: a field of :data:`UNSUPPORTED` is given."""
    for name in UNSUPPORTED:
        if data.get(name) is not None:
            hint = "; use tools and tool_choice" if name.startswith("function") else ""
            raise InvalidRequest(f"{name} is not supported{hint}", param=name)


@attrs.frozen
class Options:
    """What a generating request asks for beside its prompt.

    :ivar n: choices per prompt. :ivar usage_chunk: whether a stream ends with a usage chunk.
    :ivar max_tokens: what the request asks for; :ivar default_tokens: the operator's limit for one that does not.
    :ivar ledger: whether the reply carries the ``strata`` object.
    """

    model: str | None
    n: int
    stop: tuple[str, ...]
    max_tokens: int | None
    default_tokens: int | None
    sampling: Sampling
    ignore_eos: bool
    stream: bool
    usage_chunk: bool
    progress: bool
    cache: bool
    pin: bool
    ledger: bool

    def limit(self, room: int) -> int | None:
        """Most tokens to generate where the context has room for so many. A request that asks for more than fits is
        refused by the engine; the operator's default, of which its client knows nothing, is cut."""
        if self.max_tokens is not None or self.default_tokens is None:
            return self.max_tokens
        return min(self.default_tokens, room) if room > 0 else None


def read_options(body: Body, settings: Settings, *, max_tokens: str, logprobs: int | None) -> Options:
    """The shared fields of a generating request; what it leaves open comes from the settings.

    :param max_tokens: the field in which this request gives its limit.
    :param logprobs: what the dialect's own fields ask for.
    :raises InvalidRequest: a field is malformed, out of range or not supported.
    """
    stream = body.boolean("stream")
    _read_response_format(body)
    return Options(
        model=body.text("model"),
        n=body.integer("n", low=1, high=MOST_CHOICES) or 1,
        stop=_read_stop(body),
        max_tokens=body.integer(max_tokens, low=1),
        default_tokens=settings.max_tokens or None,
        sampling=read_sampling(body, settings, logprobs),
        ignore_eos=body.boolean("ignore_eos"),
        stream=stream,
        usage_chunk=_read_stream_options(body, stream),
        progress=_only_streaming(body, "return_progress", stream) and body.boolean("return_progress"),
        cache=body.boolean("strata_cache", True),
        pin=body.boolean("strata_pin"),
        ledger=body.boolean("strata"),
    )


def read_sampling(body: Body, settings: Settings, logprobs: int | None) -> Sampling:
    """:raises InvalidRequest: from here or from :class:`Sampling`, naming the field."""
    seed = body.integer("seed", low=-(2**63), high=2**63 - 1)
    if seed is None and settings.seed >= 0:
        seed = settings.seed
    repetition = body.one_of("repetition_penalty", "repeat_penalty")
    window = body.one_of("penalty_window", "repeat_last_n")
    plain = Sampling()
    return Sampling(
        temperature=_or(body.number("temperature"), settings.temperature),
        top_k=int(_or(body.integer("top_k", low=0), settings.top_k)),
        top_p=_or(body.number("top_p"), settings.top_p),
        min_p=_or(body.number("min_p"), settings.min_p),
        typical_p=_or(body.number("typical_p"), plain.typical_p),
        repetition_penalty=_or(body.number(repetition), plain.repetition_penalty),
        presence_penalty=_or(body.number("presence_penalty"), plain.presence_penalty),
        frequency_penalty=_or(body.number("frequency_penalty"), plain.frequency_penalty),
        penalty_window=int(_or(body.integer(window, low=0), plain.penalty_window)),
        logit_bias=_read_logit_bias(body),
        seed=seed,
        logprobs=logprobs,
    )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _read_logit_bias(body: Body) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (body.mapping("logit_bias") or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        number = as_number("logit_bias", value)
        if not -100 <= number <= 100:
            raise InvalidRequest(f"logit_bias: {number:g} is not between -100 and 100", param="logit_bias")
        bias[int(key)] = number
    return bias


def check_logit_bias(sampling: Sampling, vocabulary: int) -> None:
    """:raises InvalidRequest: a biased token does not exist in a vocabulary of that size."""
    unknown = next((token for token in sampling.logit_bias if token >= vocabulary), None)
    if unknown is not None:
        raise InvalidRequest(
            f"logit_bias: token {unknown} does not exist; the vocabulary has {vocabulary}", param="logit_bias"
        )


def _read_stop(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        refuse("stop", "a string or an array of strings", value)
    if len(texts) > MOST_STOPS:
        raise InvalidRequest(f"stop may have at most {MOST_STOPS} texts, not {len(texts)}", param="stop")
    for text in texts:
        if not isinstance(text, str) or not text:
            described = "an empty one" if text == "" else kind_of(text)
            raise InvalidRequest(f"stop must hold non-empty strings, not {described}", param="stop")
    return tuple(texts)


def _only_streaming(body: Body, name: str, stream: bool) -> bool:
    if not stream and body.get(name):
        raise InvalidRequest(f"{name} is only for streams: set stream to true", param=name)
    return stream


def _read_stream_options(body: Body, stream: bool) -> bool:
    options = body.mapping("stream_options")
    _only_streaming(body, "stream_options", stream)
    wanted = (options or {}).get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        refuse("stream_options.include_usage", "true or false", wanted)
    return bool(wanted)


def _read_response_format(body: Body) -> None:
    wanted = body.mapping("response_format")
    if wanted is not None and wanted.get("type") != "text":
        raise InvalidRequest(
            f"response_format {wanted.get('type')!r} is not supported: replies are plain text", param="response_format"
        )
