"""Configuration: settings with their origins, and the facts of a model."""

from runnerctl.config.engine_config import EngineConfig, Origin
from runnerctl.config.fact_overrides import FactOverrides
from runnerctl.config.facts import ModelFacts

__all__ = ["EngineConfig", "FactOverrides", "ModelFacts", "Origin"]
