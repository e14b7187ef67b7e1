"""How runs of each kind are trained, and whether this machine has the memory."""

import torch

from rebased.models import check_model_fits
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.run_config import RunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train.lm.kind import LMTraining
from rebased.train.synthetic.kind import SyntheticTraining
from rebased.train.training_kind import TrainingKind

KINDS: dict[type[RunConfig], TrainingKind] = {SyntheticRunConfig: SyntheticTraining(), LMRunConfig: LMTraining()}
TRAINED = 4  # weights, gradients and AdamW's two moments


def training_of(config: RunConfig) -> TrainingKind:
    """How a run is trained."""
    return KINDS[type(config)]


def check_run_fits(config: RunConfig, device: torch.device, processes: int = 1) -> None:
    """Raise ValueError if a run certainly needs more main memory than there is.

    On a GPU the weights alone are counted, because they are made on the CPU. Each process of several has its own.
    """
    if device.type == "cpu":
        check_model_fits(config.model, TRAINED, training_of(config).memory(config, processes))
    else:
        check_model_fits(config.model)
