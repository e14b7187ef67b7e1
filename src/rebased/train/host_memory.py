"""What a run needs of the main memory, at least: asked before anything is built."""

import torch

from rebased.models import check_model_fits
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.run_config import RunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig, longest

TRAINED = 4  # weights, gradients and AdamW's two moments


def check_run_fits(config: RunConfig, device: torch.device, processes: int = 1) -> None:
    """Raise ValueError if a run certainly needs more main memory than there is.

    On a CPU these are counted: the weights with their gradients and moments, the input of every block of one micro
    batch, which the backward pass needs, and the examples of a synthetic task. On a GPU the weights alone, because
    they are made on the CPU. Each process of several has its own.
    """
    if device.type != "cpu":
        check_model_fits(config.model)
        return
    model, batch = config.model, config.train.batch_size
    rows = config.train.micro_batch or batch
    more = 8 * batch
    if isinstance(config, SyntheticRunConfig):
        seq_len = longest(config.task)
        rows = min(rows, max(segment.examples for segment in config.task.train))
        config.task.check_fits()  # first: where the examples alone are too many, the model is not to blame
        more = config.task.data_bytes()
    else:
        assert isinstance(config, LMRunConfig)
        seq_len, rows = config.data.seq_len, -(-rows // processes)
    more += 4 * rows * seq_len * model.d_model * (model.n_layers + 1)
    check_model_fits(model, TRAINED, more)
