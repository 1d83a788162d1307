"""Tokenizers, detokenizers, chat templates and the reading of replies."""

from .detokenizer import StreamingDetokenizer
from .events import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta, ToolCallEnd, ToolCallStart
from .prompt import RenderedPrompt, render_tokens
from .replies import ReplyParser, parser_for
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .turns import turn_opener_ids

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
