"""Rows of a table by number, with a gradient that stays fast if most numbers are the same."""

from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import kernel_path


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """The rows weight[tokens].

    On a GPU the gradient is summed in chunks of equal length, always in the same order. torch adds all positions of one
    token in one loop: a quarter of an MQAR batch is filler, 262,144 positions at T = 2,048.

    Args:
        tokens: [...], integers from 0 to vocab - 1.
        weight: [vocab, D], any float dtype.

    Returns:
        [..., D] in the dtype of weight.
    """
    if kernel_path("auto", weight) == "triton" and tokens.numel() > 0:
        from rebased.ops.embedding.gpu import MAX_WIDTH, gather

        if weight.shape[1] <= MAX_WIDTH:
            return gather(weight, tokens)
    return functional.embedding(tokens, weight)
