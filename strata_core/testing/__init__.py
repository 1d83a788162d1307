"""Fixtures, conformance suites and builders for Strata's own tests and for plugin authors."""
