"""The language model, its config, and the presets of the paper."""

from rebased.models.causality import check_causality
from rebased.models.config import LMConfig, MixerConfig
from rebased.models.language_model import IGNORE, LanguageModel, LMState, Shard
from rebased.models.presets import preset, preset_names
from rebased.models.shapes import check_model_fits, shape_of

__all__ = [
    "IGNORE",
    "LMConfig",
    "LMState",
    "LanguageModel",
    "MixerConfig",
    "Shard",
    "check_causality",
    "check_model_fits",
    "preset",
    "preset_names",
    "shape_of",
]
