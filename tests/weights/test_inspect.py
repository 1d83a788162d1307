"""What is told about a model file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from strata_core.cli import main
from strata_core.errors import ModelFileError, NotFound
from strata_core.testing.gguf_build import write_gguf
from strata_core.testing.tiny import CHATML, tiny_llama
from strata_core.weights.inspect import describe, render


def shown(path: Path, architectures: set[str]) -> str:
    output = io.StringIO()
    render(describe(path, architectures), Console(file=output, width=120))
    return output.getvalue()


def test_a_complete_model_is_described(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", weights="Q8_0", rope_freqs=np.ones(8, np.float32))
    inspection = describe(path, {"llama", "qwen3"})
    embedding, layer, norms = 384 * 64, 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64, 5 * 64
    assert inspection.parameters == embedding + 2 * layer + norms + 8
    assert {share.type: share.tensors for share in inspection.types} == {"Q8_0": 15, "F32": 6}
    assert inspection.nbytes == sum(share.nbytes for share in inspection.types)
    assert (inspection.architecture, inspection.tied, inspection.vocab) == ("llama", True, 384)
    assert inspection.geometry["attention.head_count_kv"] == 2
    assert inspection.rope == {"dimension_count": 16, "freq_base": 10_000.0, "rope_freqs": "rope_freqs.weight"}
    assert inspection.specials == {"bos": (0, "<|endoftext|>"), "eos": (2, "<|im_end|>")}
    assert inspection.template == CHATML
    assert inspection.unsupported == ()
    text = shown(path, {"llama"})
    for part in ("llama", "gpt2, pre-tokenizer smollm", "384", "Q8_0", "512", "<|im_end|>", "nothing unsupported"):
        assert part in text


def test_what_nothing_can_run_is_listed(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "odd.gguf", {"general.architecture": "mamba9"}, {"w": ("IQ2_XXS", bytes(66), (1, 256))}
    )
    assert describe(path, {"llama"}).unsupported == (
        "no model family for architecture mamba9 is installed (there is: llama)",
        "type IQ2_XXS cannot be read (tensors of it: 1)",
    )
    text = shown(path, {"llama"})
    assert "unsupported: no model family for architecture mamba9" in text
    assert "no chat template" in text


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (dict(pre="cuneiform"), "tokenizer.ggml.pre is 'cuneiform'"),
        (dict(metadata={"tokenizer.ggml.model": "t5"}), "tokenizer.ggml.model is 't5'"),
        (dict(template="{% for %}"), "the chat template has an error in line 1"),
    ],
)
def test_a_tokenizer_or_template_that_cannot_be_used_is_listed(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", **fields)
    result = CliRunner().invoke(main, ["inspect", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"unsupported: {problem}" in result.stdout
    assert "nothing unsupported" not in result.stdout


def test_a_file_without_metadata_is_described_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bare.gguf", {}, {})
    assert "does not say its architecture" in shown(path, {"llama"})


def test_text_from_the_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    hostile = "[red]x[/red]\x1b[2J\x07"
    path = tiny_llama(tmp_path / "tiny.gguf", template=hostile, metadata={"general.name": hostile})
    text = shown(path, set())
    assert "\x1b" not in text and "\x07" not in text
    assert text.count(r"[red]x[/red]\x1b[2J\x07") == 2


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="cut short"):
        describe(path, set())


def strata(*arguments: str) -> str:
    return CliRunner().invoke(main, arguments, standalone_mode=False, catch_exceptions=False).output


def test_the_commands_list_and_inspect_installed_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    assert "strata models pull default" in strata("models", "list")
    (tmp_path / "models").mkdir()
    tiny_llama(tmp_path / "models" / "tiny.gguf")
    assert strata("models", "list").split() == ["tiny", "0.4", "MiB", "llama"]
    assert strata("models") == strata("models", "list")
    assert "tied output" in strata("inspect", "tiny")
    with pytest.raises(NotFound, match="no model 'other'"):
        strata("inspect", "other")
    with pytest.raises(NotFound, match="to fetch"):
        strata("models", "pull", "other")
