"""Inputs of the norms, and their formulas in fp64 as the law."""

import torch
from torch import Tensor

from rebased.ops import layer_norm, linear_layer_norm, rms_norm
from tolerances import KERNEL_ERRORS, limit, relative_error

KINDS = ("layer", "residual", "bare", "rms")


def by_formula(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x if kind == "rms" else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = y if kind == "bare" else y * weight
    y = y if kind in ("bare", "rms") else y + bias
    return x + y if kind == "residual" else y


def by_us(kind: str, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    if kind == "rms":
        return rms_norm(x, weight, dtype=dtype)
    if kind == "bare":
        return layer_norm(x, None, None, dtype=dtype)
    return layer_norm(x, weight, bias, dtype=dtype, residual=kind == "residual")


def assert_is_the_law(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, device: str = "cpu"
) -> None:
    """Value and gradients, rows far from zero; x in one dtype, the answer in another, weights in fp32 or fp64."""
    torch.manual_seed(0)
    N, weights = shape[-1], torch.float64 if dtype == torch.float64 else torch.float32
    x = (3 + 2 * torch.randn(shape, dtype=torch.float64)).to(device, dtype).requires_grad_()
    weight, bias = (torch.randn(N, dtype=torch.float64).to(device, weights).requires_grad_() for _ in "wb")
    dy = torch.randn(shape, dtype=torch.float64).to(device, out)
    y = by_us(kind, x, weight, bias, out)
    assert y.dtype == out
    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    law = by_formula(kind, *exact)
    y.backward(dy)
    law.backward(dy.double())
    if dtype == torch.float64:  # a row's mean, its variance, then the rows; rows are three times as far from zero as
        error = limit(dtype, N, N, x.numel() // N, condition=3)  # they are wide, and are centred
    else:
        error = max(KERNEL_ERRORS[dtype], KERNEL_ERRORS[out])
    assert relative_error(y, law) < error
    for ours, theirs in zip((x, weight, bias), exact, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert ours.grad.dtype == ours.dtype
            assert relative_error(ours.grad, theirs.grad) < error


def assert_linear_norm_is_the_law(
    rows: tuple[int, ...],
    D: int,
    N: int,
    dtype: torch.dtype,
    affine: bool = True,
    device: str = "cpu",
    error: float = 0,
) -> None:
    """Value and gradients of the norm of a projection; x and the projection in one dtype, weights in fp32."""
    torch.manual_seed(0)
    x, projection = (torch.randn(*shape, D, dtype=torch.float64).to(device, dtype) for shape in (rows, (N,)))
    weight, bias = (torch.randn(N, dtype=torch.float64).to(device, torch.float32) for _ in "wb")
    inputs = [each.requires_grad_() for each in (x, projection, weight, bias)]
    dy = torch.randn(*rows, N, dtype=torch.float64).to(device, dtype)
    y = linear_layer_norm(x, projection, *((weight, bias) if affine else (None, None)))
    assert y.dtype == dtype
    exact = [each.detach().double().requires_grad_() for each in inputs]
    law = by_formula("layer" if affine else "bare", exact[0] @ exact[1].T, *exact[2:])
    y.backward(dy)
    law.backward(dy.double())
    error = error or KERNEL_ERRORS[dtype]
    assert relative_error(y, law) < error
    for ours, theirs in zip(inputs, exact, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert ours.grad.dtype == ours.dtype
            assert relative_error(ours.grad, theirs.grad) < error
