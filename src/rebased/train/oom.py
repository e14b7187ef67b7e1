"""When the GPU's memory is too small: fewer sequences at once, the same batch."""

import torch
from torch.optim import Optimizer

OUT_OF_MEMORY = "out_of_memory"  # the type of the line that a run's record has about it


def half(rows: int) -> int:
    if rows == 1:
        raise ValueError(
            "the GPU's memory is too small for one sequence at a time; use shorter sequences (seq_len), a smaller "
            "model.d_model, or a GPU with more memory or less else on it"
        )
    return rows // 2


def forget_unused(device: torch.device) -> None:
    """Give back what torch keeps for later, in pieces that may be too small for what comes now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def update(optimiser: Optimizer) -> None:
    """A step of the optimiser, which cannot be taken again when memory runs out halfway: some weights have changed."""
    try:
        optimiser.step()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory is too small for the optimiser's state; use a smaller model.d_model, or a GPU with more "
            "memory or less else on it"
        ) from error
