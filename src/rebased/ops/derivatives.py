"""Errors for derivatives that an operator does not have: they are never a wrong number.

docs/math.md lists the derivatives of each operator.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rebased.ops.backend import in_torch_func

Backward = Callable[..., Any]


def first_derivatives_only(operator: str) -> Callable[[Backward], Backward]:
    """A decorator for the backward of a torch.autograd.Function: a second derivative raises RuntimeError.

    The backward may depend on its saved tensors and the given gradients only. Its results become a function of these,
    and the backward of that function raises the error, which names the operator. torch's once_differentiable is not
    enough: if an input is reached in another way too, a second derivative silently loses a part.
    """
    message = f"{operator} has first derivatives only; for second derivatives pass backend='reference', if it has one"

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return found
            made = found if isinstance(found, tuple) else (found,)
            return _Once.apply(message, len(made), *made, *ctx.saved_tensors, *grads)

        return once

    return decorate


def in_forward_mode() -> bool:
    """True while forward-mode derivatives are computed (torch.func.jvp, jacfwd, torch.autograd.forward_ad)."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def refuse_forward_mode(operator: str) -> None:
    """Raise RuntimeError in forward mode, where torch takes the derivative of a custom operator for zero."""
    if in_forward_mode():
        raise RuntimeError(f"{operator} has no forward-mode derivatives; pass backend='reference', if it has one")


def refuse_transforms(operator: str) -> None:
    """Raise RuntimeError inside a transform of torch.func and in forward mode."""
    refuse_forward_mode(operator)
    if in_torch_func():
        raise RuntimeError(
            f"{operator} cannot go through transforms of torch.func (vmap, grad, ...): its backward pass is written by "
            "hand; pass backend='reference', if it has one"
        )


class _Once(torch.autograd.Function):
    """The first `count` of some tensors, as a function of all of them that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if each is None else each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        raise RuntimeError(ctx.message)
