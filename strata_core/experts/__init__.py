"""Where a model's experts are, and how a step gets those that it needs."""

from strata_core.experts.base import ExpertSource, ExpertTensors
from strata_core.experts.resident import ResidentExperts

__all__ = ["ExpertSource", "ExpertTensors", "ResidentExperts"]
