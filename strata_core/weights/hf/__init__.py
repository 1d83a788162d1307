"""Hugging Face folders, read as if they were GGUF files."""

from strata_core.weights.hf.folder import HFFolder, is_model_folder

__all__ = ["HFFolder", "is_model_folder"]
