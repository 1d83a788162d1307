#!/usr/bin/env python3
"""Compares our token ids with llama.cpp's for tokenizers whose models are not at hand.

    bench/pretokenizers_vs_llama_cpp.py [NAME ...] [--peer PATH] [--golden OUT.json]

For each pre-tokeniser NAME (all by default), and for SentencePiece with and without the space in front (``spm``,
``spm-plain``), a small vocabulary is trained on the texts of ``tokenizer_vs_llama_cpp.py``, put into a tiny model file
and given to both. Differences that are meant and not counted as wrong, but shown: ``gpt-4o`` and ``tekken`` (and their
aliases), where llama.cpp approximates the models' expressions; and, with ``spm``, plain text that llama.cpp merges into
a control token. Exit status 1 when there is another difference. Needs the ``gguf`` package.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from tokenizer_vs_llama_cpp import DEFAULT_PEER, peer_ids, texts
from tokenizers import Tokenizer as Trainee
from tokenizers import models, pre_tokenizers, trainers

from strata_core.tokens import Tokenizer
from strata_core.tokens.pretokenizers import PRE_TOKENIZERS
from strata_core.tokens.vocabulary import TokenType

SPECIAL = {
    "<|endoftext|>": TokenType.CONTROL, "<|im_start|>": TokenType.CONTROL, "<|im_end|>": TokenType.CONTROL,
    "<|eot_id|>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED, "</think>": TokenType.USER_DEFINED,
}  # fmt: skip
SPM = {"spm": True, "spm-plain": False}
#: Where llama.cpp's expressions stand in for the models' own.
APPROXIMATED = {PRE_TOKENIZERS["gpt-4o"], PRE_TOKENIZERS["tekken"]}
GOLDEN = ("qwen2", "qwen35", "llama-bpe", "deepseek-v3", "spm", "spm-plain")


def train(pre_tokenizer: pre_tokenizers.PreTokenizer, alphabet: list[str], size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges (``a b``) of a vocabulary."""
    trainee = Trainee(models.BPE())
    trainee.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    trainee.train_from_iterator(texts(), trainer)
    model = json.loads(trainee.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), merges


def bpe_metadata(name: str, size: int) -> dict[str, object]:
    """Metadata of a byte-level BPE tokenizer with the pre-tokeniser ``name``."""
    tokens, merges = train(PRE_TOKENIZERS[name].build(), pre_tokenizers.ByteLevel.alphabet(), size)
    types = [int(TokenType.NORMAL)] * len(tokens) + [int(kind) for kind in SPECIAL.values()]
    keys = {"model": "gpt2", "pre": name, "tokens": [*tokens, *SPECIAL], "token_type": types, "merges": merges}
    keys |= {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 2}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def spm_metadata(name: str, size: int) -> dict[str, object]:
    """Metadata of a SentencePiece tokenizer: control tokens, bytes, then pieces, best first."""
    tokens, merges = train(pre_tokenizers.Metaspace(prepend_scheme="always"), [], size + 600)
    runs = ["▁" * n for n in (2, 4, 8, 16, 3, 5, 6, 7)]
    letters = [token for token in tokens if len(token) == 1]
    pieces = [*runs, *(merge.replace(" ", "") for merge in merges), *letters, "▁"]
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in SPECIAL]
    first = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    first |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    types = [*first.values(), *[TokenType.NORMAL] * len(pieces), *SPECIAL.values()]
    scores = [0.0] * len(first) + [-float(n) for n in range(len(pieces))] + [-1000.0] * len(SPECIAL)
    keys = {"model": "llama", "tokens": [*first, *pieces, *SPECIAL], "token_type": [int(kind) for kind in types]}
    keys |= {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": SPM[name]}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def write_model(path: Path, metadata: dict[str, object]) -> None:
    """A model of one layer, all zeros, with this tokenizer: the least that llama.cpp opens."""
    width, count = 32, len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    writer = gguf.GGUFWriter(str(path), "llama")
    numbers = {"context_length": 64, "embedding_length": width, "block_count": 1, "feed_forward_length": width}
    for key, number in (numbers | {"attention.head_count": 2, "rope.dimension_count": 16}).items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (count, width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}_norm": (width,) for name in ("attn", "ffn")}
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (width, width) for name in squares}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def more_texts() -> list[str]:
    """The common texts, and letter soup that mixes every class that the expressions know."""
    rng = random.Random(7)
    soup = "abAB 019'\n\r\t!._-éßſñ中日カ한ก्हा\u0301😊½²Ⅷ٣\u00a0\u3000ǅʰ/\\(){}[]<>|~^$+="
    return texts() + ["".join(rng.choices(soup, k=rng.randint(1, 25))) for _ in range(1500)]


def meant(name: str, tokenizer: Tokenizer, ours: list[int], theirs: list[int], *, parse_special: bool) -> bool:
    """Whether a difference is one that the module's text names."""
    if name in SPM:
        made = {token for token in theirs if tokenizer.is_control(token)}
        return not parse_special and bool(made) and not made & set(ours)
    return PRE_TOKENIZERS[name] in APPROXIMATED and tokenizer.decode(ours) == tokenizer.decode(theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--peer", type=Path, default=DEFAULT_PEER)
    parser.add_argument("--size", type=int, default=2000, help="tokens of a vocabulary, about")
    parser.add_argument("--golden", type=Path, help="write small vocabularies and the peer's ids of some texts")
    args = parser.parse_args()
    names = list(GOLDEN) if args.golden else args.names or [*PRE_TOKENIZERS, *SPM]
    wanted = texts()[::24] if args.golden else more_texts()
    golden, failed = [], 0
    for name in names:
        size = 450 if args.golden else args.size
        metadata = spm_metadata(name, size) if name in SPM else bpe_metadata(name, size)
        tokenizer = Tokenizer.from_metadata(metadata)
        for parse_special in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder) / "tiny.gguf", metadata)
                theirs = peer_ids(args.peer, Path(folder) / "tiny.gguf", wanted, parse_special=parse_special)
            ours = [tokenizer.encode(text, parse_special=parse_special).tolist() for text in wanted]
            pairs = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if mine != other]
            wrong = sum(not meant(name, tokenizer, *pair, parse_special=parse_special) for pair in pairs)
            failed += wrong
            counts = f"{len(wanted)} texts, {wrong} differences, {len(pairs) - wrong} meant"
            print(f"{name:20} parse_special={parse_special!s:5}: {counts}", flush=True)
            if parse_special:
                golden.append({"name": name, "metadata": metadata, "texts": wanted, "ids": theirs})
    if args.golden:
        args.golden.write_text(json.dumps(golden, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
