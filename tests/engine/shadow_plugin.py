"""Registers the shadow backend for the tests of this folder."""
