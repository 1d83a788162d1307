"""Tokenizers, detokenizers, chat templates and the reading of replies."""

from .detokenizer import StreamingDetokenizer
from .tokenizer import Tokenizer

__all__ = ["StreamingDetokenizer", "Tokenizer"]
