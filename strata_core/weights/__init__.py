"""Weights: model files, tensors as stored and their dequantisers, the catalogue of installed models."""

from strata_core.weights.gguf import GGUFFile
from strata_core.weights.shards import open_model
from strata_core.weights.source import WeightSource
from strata_core.weights.tensor import StoredTensor

__all__ = ["GGUFFile", "StoredTensor", "WeightSource", "open_model"]
