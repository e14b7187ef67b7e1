"""The language model and the paper's shapes of it."""

from rebased.models.config import LMConfig, MixerConfig
from rebased.models.language_model import IGNORE, LanguageModel, LMState, Part
from rebased.models.presets import preset, preset_names
from rebased.models.shapes import shape_of

__all__ = [
    "IGNORE",
    "LMConfig",
    "LMState",
    "LanguageModel",
    "MixerConfig",
    "Part",
    "preset",
    "preset_names",
    "shape_of",
]
