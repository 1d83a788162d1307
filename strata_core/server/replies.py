"""Parts of OpenAI-shaped replies: usage, log probabilities, and the ``strata`` object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

import strata_core
from strata_core.engine.requests import RequestRecord, Started, TokenInfo, TokenLogprob
from strata_core.server.fields import Options
from strata_core.server.running import Running

FINGERPRINT = f"strata-{strata_core.__version__}"
"""``system_fingerprint``: what besides the request decides a seeded reply."""


def extras(running: Running, options: Options, *, in_stream: bool) -> dict[str, Any]:
    """What a reply has beside its choices: ``usage`` (in streams only if asked for) and, if asked for, ``strata``."""
    found: dict[str, Any] = {}
    if options.usage_chunk or not in_stream:
        found["usage"] = usage_of(running.started, running.records, options.n)
    if options.ledger:
        found["strata"] = {"requests": [record_object(running.records[index]) for index in sorted(running.records)]}
    return found


def usage_of(
    started: Mapping[int, Started], records: Mapping[int, RequestRecord], choices_per_prompt: int
) -> dict[str, Any]:
    """Tokens of a whole HTTP request.

    A prompt counts once however many choices it has, and so do the tokens of it that were not read: further choices
    share what the first one read, which is no reuse of earlier work.
    """
    first = [started[index] for index in sorted(started) if index % choices_per_prompt == 0]
    prompt = sum(event.prompt_tokens for event in first)
    generated = sum(record.generated_tokens for record in records.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(event.cached_tokens for event in first)},
    }


def record_object(record: RequestRecord) -> dict[str, Any]:
    """The why-ledger of one request as JSON; times that were not reached are null. The tenant is not shown."""
    shown = attrs.asdict(record, recurse=False, filter=lambda field, _: field.name != "tenant")
    shown["reused"] = dict(record.reused)
    shown["reread"] = [{"tokens": item.tokens, "reason": item.reason} for item in record.reread]
    return shown


def chat_logprobs(infos: Iterable[TokenInfo]) -> dict[str, Any]:
    """``choices[].logprobs`` of chat replies."""
    content = [{**_chat_token(info.chosen), "top_logprobs": [_chat_token(item) for item in info.top]} for info in infos]
    return {"content": content, "refusal": None}


def _chat_token(item: TokenLogprob) -> dict[str, Any]:
    return {"token": item.text, "logprob": item.logprob, "bytes": list(item.raw)}


def legacy_logprobs(infos: Sequence[TokenInfo], offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of completions.

    :param offset: characters of the reply before the first of these tokens.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for info in infos:
        found["tokens"].append(_legacy_text(info.chosen))
        found["token_logprobs"].append(info.chosen.logprob)
        found["top_logprobs"].append({_legacy_text(item): item.logprob for item in info.top})
        found["text_offset"].append(offset)
        offset += len(info.chosen.text)
    return found


def _legacy_text(item: TokenLogprob) -> str:
    """Text of a token as a dictionary key: parts of characters, which would all be alike, as ``bytes:\\xe2\\x80``."""
    try:
        return item.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in item.raw)
