"""Out of GPU memory: the same batch is computed with fewer sequences at once."""

import torch
from torch.optim import Optimizer

OUT_OF_MEMORY = "out_of_memory"  # type of the record's line that reports it


def half(rows: int) -> int:
    """Half the number of sequences, rounded down. Raises ValueError, with the remedy, if it is 1 already."""
    if rows == 1:
        raise ValueError(
            "the GPU's memory is too small for one sequence at a time; use shorter sequences (seq_len), a smaller "
            "model.d_model, or a GPU with more free memory"
        )
    return rows // 2


def update(optimiser: Optimizer) -> None:
    """Take a step of the optimiser. Raises ValueError if memory runs out.

    Such a step cannot be repeated with fewer sequences: some weights have changed already.
    """
    try:
        optimiser.step()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory is too small for the optimiser's state; use a smaller model.d_model, or a GPU with more "
            "free memory"
        ) from error
