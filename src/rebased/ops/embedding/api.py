"""Rows of a table by number, with a gradient that stays fast if most numbers are the same."""

from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import kernel_path


def embed(tokens: Tensor, weight: Tensor, positions: Tensor | None = None) -> Tensor:
    """The rows weight[tokens], plus a row for each position if positions are given.

    On a GPU the gradient is summed in chunks of equal length, always in the same order. torch adds all positions of one
    token in one loop: a quarter of an MQAR batch is filler, 262,144 positions at T = 2,048.

    Args:
        tokens: [..., T], integers from 0 to vocab - 1.
        weight: [vocab, D], any float dtype.
        positions: [T, D] in the dtype of weight, or None.

    Returns:
        [..., T, D] in the dtype of weight.

    Raises ValueError if positions have another shape.
    """
    if positions is not None and positions.shape != (tokens.shape[-1], weight.shape[1]):
        wanted = [tokens.shape[-1], weight.shape[1]]
        raise ValueError(f"positions must be {wanted}, a row for each position; their shape is {list(positions.shape)}")
    if kernel_path("auto", weight) == "triton" and tokens.numel() > 0:
        from rebased.ops.embedding.gpu import MAX_WIDTH, gather

        if weight.shape[1] <= MAX_WIDTH:
            return gather(weight, tokens, positions)
    rows = functional.embedding(tokens, weight)
    return rows if positions is None else rows + positions
