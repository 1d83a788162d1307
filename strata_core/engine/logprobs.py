"""Log probabilities as they are reported with a token."""

from __future__ import annotations

import numpy as np

from strata_core.engine.requests import TokenInfo, TokenLogprob
from strata_core.engine.sampling import log_softmax
from strata_core.tokens.tokenizer import Tokenizer


def token_info(logits: np.ndarray, token: int, top: int, tokenizer: Tokenizer) -> TokenInfo:
    """The log probability of a generated token and of the ``top`` most likely ones (ties by id).

    :param logits: float32 ``(vocab,)``, the model's own.
    """
    logprobs = log_softmax(logits)
    best: list[int] = []
    if top:
        threshold = np.partition(logprobs, len(logprobs) - top)[len(logprobs) - top]
        candidates = np.flatnonzero(logprobs >= threshold)
        best = [int(i) for i in candidates[np.argsort(-logprobs[candidates], kind="stable")][:top]]

    def describe(index: int) -> TokenLogprob:
        raw = tokenizer.token_bytes(index)
        return TokenLogprob(index, float(logprobs[index]), raw.decode("utf-8", "replace"), raw)

    return TokenInfo(describe(token), tuple(describe(index) for index in best))
