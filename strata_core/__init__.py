"""Strata: serves large language models; conversations outlive memory."""

__version__ = "0.1.0"
