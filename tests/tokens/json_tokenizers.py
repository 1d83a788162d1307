"""Small tokenizers of the kinds that ``tokenizer.json`` files hold, trained on a text of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = (Path(__file__).parents[1] / "oracle" / "lighthouse.txt").read_text(encoding="utf-8").splitlines()[:200]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """As Qwen's and Llama 3's: bytes as letters, a begin token by template, tokens that are no control tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(split))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|im_start|>", "<|im_end|>", "<bos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("the sea", single_word=True)])
    tokenizer.add_special_tokens([AddedToken("<mask>", rstrip=True)])
    first = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", first)])
    return tokenizer


def sentence_piece(scheme: str) -> Tokenizer:
    """As Llama 2's and Gemma's: ``▁`` for spaces, bytes of what is not known.

    :param scheme: before which parts of a text a space is put: ``first``, ``always`` or ``never``.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    specials = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([*steps, *strip])
    rules = json.loads(tokenizer.to_str())
    rules["added_tokens"] = [entry for entry in rules["added_tokens"] if entry["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(rules))


def write(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], **more: object) -> Path:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and other JSON files by their stem."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for stem, content in {"tokenizer_config": settings, **more}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


CHAT = {"bos_token": "<bos>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}}
PLAIN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "byte-level": (byte_level, CHAT),
    "first": (lambda: sentence_piece("first"), PLAIN),
    "always": (lambda: sentence_piece("always"), PLAIN),
    "never": (lambda: sentence_piece("never"), PLAIN),
}
TEXTS = (
    "", " ", "Hello the sea <think>x</think>  12345 the sea, the seaside", "  leading", "naïve 🙂 漢字\n\n\tend ",
    "<|im_start|>user\nhi<|im_end|>\n", "<s>[INST] hi </s> there", "a<s> b</s>c <mask>  d", "x " * 5,
    "\x00\u00a0\u2028",
)  # fmt: skip
