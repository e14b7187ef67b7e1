"""Rows of a table by number, and a gradient that does not mind if most numbers are the same."""

from torch import Tensor
from torch.nn import functional

from rebased.ops.linear_scan import scan_path


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [...] of whole numbers, weight [vocab,D] -> [...,D]: weight[tokens].

    On a GPU the gradient is summed in pieces of equal length, always in the same order. torch adds up all places of one
    token in a row, however many: a quarter of an MQAR batch is filler, 262,144 places at T = 2,048.
    """
    if scan_path("auto", weight) == "triton":
        from rebased.ops.embedding_triton import MAX_WIDTH, gather

        if weight.shape[1] <= MAX_WIDTH:
            return gather(weight, tokens)
    return functional.embedding(tokens, weight)
