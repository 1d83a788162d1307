"""Tokenizers of folders give the ids and texts of ``transformers``' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_tokenizers import KINDS, TEXT, TEXTS, write
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from strata_core.tokens import Tokenizer
from strata_core.tokens.pretokenizers import pre_tokenizer
from strata_core.weights.gguf import GGUFFile
from strata_core.weights.hf.config import Config
from strata_core.weights.hf.tokenizer import tokenizer_metadata

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]


def same(folder: Path, count: int, texts: tuple[str, ...]) -> Tokenizer:
    ours = Tokenizer.from_metadata(tokenizer_metadata(folder, Config(folder / "config.json", {"vocab_size": count})))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in texts:
        for special in True, False:
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, parse_special=True, add_special=special).tolist() == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_trained_tokenizers_agree(tmp_path: Path, kind: str) -> None:
    make, settings = KINDS[kind]
    library = make()
    write(tmp_path, library, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    same(tmp_path, library.get_vocab_size(), TEXTS)


@pytest.mark.model
def test_the_default_models_vocabulary_agrees_as_a_folder_and_as_a_file(
    tmp_path: Path, default_model_path: Path
) -> None:
    keys = GGUFFile.open(default_model_path).metadata
    tokens, merges = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"]
    pairs = [tuple(line.split(" ")) for line in merges]
    library = Library(models.BPE({text: number for number, text in enumerate(tokens)}, pairs))
    library.pre_tokenizer, library.decoder = pre_tokenizer("smollm").build(), decoders.ByteLevel()
    control = [text for text, kind in zip(tokens, keys["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    library.add_special_tokens(control)
    write(tmp_path, library, {"bos_token": tokens[1], "eos_token": tokens[2], "chat_template": "x"})
    texts = (*TEXTS, *TEXT[:60], json.dumps({"a": [1, 22, 333]}), "def f(x):\n    return x ** 2\n")
    folder, file = same(tmp_path, len(tokens), texts), Tokenizer.from_metadata(keys)
    for text in texts:
        assert folder.encode(text).tolist() == file.encode(text).tolist()
