"""Tokenizers, detokenizers, chat templates and the reading of replies."""

from strata_core.tokens.detokenizer import StreamingDetokenizer
from strata_core.tokens.events import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from strata_core.tokens.prompt import RenderedPrompt, render_tokens
from strata_core.tokens.replies import ReplyParser, parser_for
from strata_core.tokens.template import ChatTemplate
from strata_core.tokens.tokenizer import Tokenizer
from strata_core.tokens.turns import turn_opener_ids

__all__ = [
    "ChatTemplate",
    "ContentDelta",
    "ReasoningDelta",
    "RenderedPrompt",
    "ReplyEvent",
    "ReplyParser",
    "StreamingDetokenizer",
    "Tokenizer",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "parser_for",
    "render_tokens",
    "turn_opener_ids",
]
