"""Compute backends: the contract (base.py) and the numpy reference."""
