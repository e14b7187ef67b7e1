"""The language model, its config, the presets of the paper, and generation."""

from rebased.models.causality import check_causality
from rebased.models.config import LMConfig, MixerConfig
from rebased.models.decoder import Decoder
from rebased.models.generation import FinishReason, Generated, Generation, Token
from rebased.models.generation_file import load_generation, save_generation
from rebased.models.language_model import IGNORE, LanguageModel, LMState, Shard
from rebased.models.presets import preset, preset_names
from rebased.models.sampling import Sampling
from rebased.models.shapes import shape_of
from rebased.models.step_graph import Stepped

__all__ = [
    "IGNORE",
    "Decoder",
    "FinishReason",
    "Generated",
    "Generation",
    "LMConfig",
    "LMState",
    "LanguageModel",
    "MixerConfig",
    "Sampling",
    "Shard",
    "Stepped",
    "Token",
    "check_causality",
    "load_generation",
    "preset",
    "preset_names",
    "save_generation",
    "shape_of",
]
