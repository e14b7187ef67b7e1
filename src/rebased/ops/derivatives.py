"""Derivatives that an operator does not have: asking for one is an error, never a wrong number. The table of those that
it has is in docs/math.md.
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
    """A decorator for the backward of a torch.autograd.Function whose saved tensors are all that it depends on.

    Its results become a function of the saved tensors and of the given gradients whose own backward raises RuntimeError
    and names the operator. torch's once_differentiable marks only the end of the graph: a second derivative then
    silently loses all that goes through the function, if an input is reached on another way too.
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
    """Raise RuntimeError inside a transform of torch.func and in forward mode: a backward pass written by hand."""
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
