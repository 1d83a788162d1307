"""Weights: model files, tensors as stored and their dequantisers, the catalogue of installed models."""

from .gguf import GGUFFile
from .shards import open_model
from .source import WeightSource
from .tensor import StoredTensor

__all__ = ["GGUFFile", "StoredTensor", "WeightSource", "open_model"]
