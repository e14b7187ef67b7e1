"""The workload of each kind of run, and whether this machine has the memory."""

import torch

from rebased.models import check_model_fits
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.run_config import RunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train.lm.workload import LMWorkload
from rebased.train.synthetic.workload import SyntheticWorkload
from rebased.train.workload import Workload

WORKLOADS: dict[type[RunConfig], type[Workload]] = {SyntheticRunConfig: SyntheticWorkload, LMRunConfig: LMWorkload}
TRAINED = 4  # weights, gradients and AdamW's two moments


def workload_of(config: RunConfig) -> type[Workload]:
    """What trains a run."""
    return WORKLOADS[type(config)]


def check_run_fits(config: RunConfig, device: torch.device, processes: int = 1) -> None:
    """Raise ValueError if a run certainly needs more main memory than there is.

    On a GPU the weights alone are counted, because they are made on the CPU. Each process of several has its own.
    """
    if device.type == "cpu":
        check_model_fits(config.model, TRAINED, workload_of(config).memory(config, processes))
    else:
        check_model_fits(config.model)
