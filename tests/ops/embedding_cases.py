"""Tokens of which most are one and the same, and torch's embedding in fp64 as the law."""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops import embed
from tolerances import assert_near, in_chunks


def mostly_filler(shape: tuple[int, ...], vocab: int, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    tokens = torch.randint(vocab, shape)
    return torch.where(torch.rand(shape) < 0.6, 0, tokens).to(device)


def assert_is_the_law(tokens: Tensor, vocab: int, D: int) -> None:
    weight = torch.randn(vocab, D, device=tokens.device, requires_grad=True)
    dy = torch.randn(*tokens.shape, D, device=tokens.device)
    exact = weight.detach().double().requires_grad_()
    functional.embedding(tokens, exact).backward(dy.double())
    y = embed(tokens, weight)
    y.backward(dy)
    assert torch.equal(y, weight[tokens])
    assert weight.grad is not None
    assert exact.grad is not None
    assert_near(weight.grad, exact.grad, *in_chunks(tokens.numel()))  # most tokens are summed into one row
    unseen = torch.bincount(tokens.flatten(), minlength=vocab) == 0
    assert (weight.grad[unseen] == 0).all()


def assert_adds_positions(tokens: Tensor, vocab: int, D: int, dtype: torch.dtype = torch.float32) -> None:
    """The same bits as a sum in torch, forward and backward."""
    weight, table = (torch.randn(n, D, device=tokens.device).to(dtype) for n in (vocab, tokens.shape[-1] + 3))
    weight.requires_grad_()
    table.requires_grad_()
    positions = table[2:-1]
    dy = torch.randn(*tokens.shape, D, device=tokens.device).to(dtype)
    y, wanted = embed(tokens, weight, positions), embed(tokens, weight) + positions
    assert torch.equal(y, wanted)
    assert y.dtype == dtype
    for found, expected in zip(*(torch.autograd.grad(x, (weight, table), dy) for x in (y, wanted)), strict=True):
        assert torch.equal(found, expected)
