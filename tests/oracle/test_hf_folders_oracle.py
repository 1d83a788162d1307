"""Models that ``transformers`` saved as folders give its logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata_core.compute.reference.backend import NumpyBackend
from strata_core.models.base import ModelOptions
from strata_core.models.llama import FAMILY
from strata_core.models.load import load_model
from strata_core.testing.runner import ModelRunner
from strata_core.weights import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "shards"),
    [
        ({}, None),
        ({}, "20KB"),
        ({"head_dim": 16, "tie_word_embeddings": True}, None),
        ({"attention_bias": True, "mlp_bias": False, "rope_parameters": YARN}, None),
        ({"rope_parameters": {**YARN, "attention_factor": 0.7}}, None),
        ({"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}, None),
        ({"rope_parameters": LLAMA3}, None),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}, None),
    ],
    ids=["plain", "shards", "tied", "biases", "yarn-factor", "yarn-mscale", "llama3", "linear"],
)
def test_a_saved_llama_gives_the_logits_of_transformers(tmp_path: Path, options: dict, shards: str | None) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms begin as zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shards)
    tokens = np.random.default_rng(1).integers(0, 96, 70).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    backend = NumpyBackend()
    with open_model(tmp_path) as source:
        runner = ModelRunner(load_model(source, backend, [FAMILY], ModelOptions()), backend, length=128)
        found = runner.logits(tokens)
        runner.close()
    assert np.abs(found - expected).max() < 1e-4
