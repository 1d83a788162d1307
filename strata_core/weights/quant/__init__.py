"""Tensor types and their dequantisers: from bytes as stored in a model file to float32."""

from strata_core.weights.quant.base import TensorType
from strata_core.weights.quant.table import BY_CODE, TYPES, dequantise

__all__ = ["BY_CODE", "TYPES", "TensorType", "dequantise"]
