"""Replays a trace of requests against level budgets, floors and rates, without a model: ``strata simulate``."""
