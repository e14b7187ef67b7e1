"""The token shift in plain torch: its equation, derivatives of any order, torch.func, and errors that name shapes."""

import pytest
import torch
from torch import Tensor

from rebased.ops import token_shift
from tolerances import assert_near

B, T, D, M = 2, 5, 3, 4


def inputs(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (*lead, B, T, D), (*lead, B, D), (*lead, M, D)
    x, last, mixes = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return x, last, mixes


def test_is_its_equation() -> None:
    x, last, mixes = inputs()
    for y, mix in zip(token_shift(x, last, mixes), mixes, strict=True):
        for t in range(T):
            before = x[:, t - 1] if t else last
            assert_near(y[:, t], mix * x[:, t] + (1 - mix) * before, 2, size=float(mixes.abs().max()))


def test_first_and_second_derivatives() -> None:
    leaves = [each.requires_grad_() for each in inputs()]
    assert torch.autograd.gradcheck(token_shift, leaves)
    assert torch.autograd.gradgradcheck(token_shift, leaves)


def test_vmap() -> None:
    several = inputs(3)
    got = torch.func.vmap(token_shift)(*several)
    for i in range(3):
        for y, want in zip(got, token_shift(*(each[i] for each in several)), strict=True):
            assert torch.equal(y[i], want)


def test_bad_shapes_are_named() -> None:
    x, last, mixes = inputs()
    for wrong in ((x[0], last, mixes), (x, last[:1], mixes), (x, last, mixes[0]), (x, last, mixes[:, :1])):
        with pytest.raises(ValueError, match=r"x must be \[B,T,D\], last \[B,D\] and mixes \[M,D\]; they are \["):
            token_shift(*wrong)
