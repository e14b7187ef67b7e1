"""Inputs of the linear cross-entropy, and torch's own as the law."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops import linear_cross_entropy
from tolerances import assert_near, assert_small_error

NAMES = ("hidden", "weight")


def case(N: int, D: int, vocab: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, ...]:
    """hidden and weight that want gradients, and targets of which every third is ignored."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, D, dtype=torch.float64).to(device, dtype).requires_grad_() for n in (N, vocab))
    targets = torch.randint(vocab, (N,))
    targets[1::3] = -100
    return hidden, weight, targets.to(device)


def by_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).double(), targets, reduction="sum")


def assert_is_the_law(
    hidden: Tensor, weight: Tensor, targets: Tensor, law: Any = by_logits, rounded_to: torch.dtype | None = None
) -> None:
    """Loss and gradients, scaled by 0.5 on their way back, by the norm of the difference: as small as befits
    `rounded_to`, by default the inputs' dtype."""
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = law(*exact, targets)
    wanted = torch.autograd.grad(expected / 2, exact)
    loss = linear_cross_entropy(hidden, weight, targets)
    gradients = torch.autograd.grad(loss / 2, [hidden, weight])
    assert loss.dtype == (torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    assert [x.dtype for x in gradients] == [hidden.dtype, weight.dtype]
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, targets)
    N, vocab = len(hidden), len(weight)
    assert_near(alone, loss.detach(), N, vocab, dtype=loss.dtype)
    if hidden.dtype == torch.float64:
        lengths = hidden.shape[1], vocab, N  # a logit, the sum of exponentials, rows
        largest = float((hidden @ weight.T).detach().abs().max())  # exp(x) is off by x u where x is rounded
        for a, b in zip((loss, *gradients), (expected, *wanted), strict=True):
            assert_near(a, b, *lengths, condition=max(1.0, largest))
    else:
        assert_small_error((loss, *gradients), (expected, *wanted), ("loss", *NAMES), rounded_to or hidden.dtype)
