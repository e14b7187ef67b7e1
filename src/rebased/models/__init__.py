"""The language model, its config, the presets of the paper, and generation."""

from rebased.models.config import LMConfig, MixerConfig
from rebased.models.decoder import Decoder
from rebased.models.generation import Generated, Generation, Token
from rebased.models.job import FinishReason, GenerateOptions
from rebased.models.language_model import LanguageModel
from rebased.models.network import IGNORE, LMState, Network, check_causality
from rebased.models.presets import preset, preset_names
from rebased.models.sampling import Sampling
from rebased.models.shapes import check_model_fits, shape_of
from rebased.models.step_graph import Stepped

__all__ = [
    "IGNORE",
    "Decoder",
    "FinishReason",
    "GenerateOptions",
    "Generated",
    "Generation",
    "LMConfig",
    "LMState",
    "LanguageModel",
    "MixerConfig",
    "Network",
    "Sampling",
    "Stepped",
    "Token",
    "check_causality",
    "check_model_fits",
    "preset",
    "preset_names",
    "shape_of",
]
