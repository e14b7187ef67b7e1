"""Batch invariance: results of a row that have the same bits whatever else is in the batch.

A BLAS chooses its kernel by the number of rows of a product, and each kernel sums in an order of its own. So a row can
get other last bits among 63 others than alone. Everything else here works on each row by itself. The remedy is to ask
for products of one shape only.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

GRID = 128  # tokens of a sequence that are computed at a time: every product has so many rows

logger = logging.getLogger(__name__)
_active: ContextVar[bool] = ContextVar("rebased_batch_invariant", default=False)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """A context manager: inside it, a row of a layer or a LanguageModel does not depend on the others, to the bit.

    Every torch.nn.functional.linear, and so every torch.nn.Linear, multiplies chunks of GRID tokens of one sequence.
    LanguageModel.forward and `hidden` also read each row by itself, chunk by chunk, so that padding after a row does
    not change it. It holds for the thread that enters it. docs/batch_invariance.md says what is promised.
    """
    ask_for_equal_products()
    token = _active.set(True)
    try:
        with _FixedProducts():
            yield
    finally:
        _active.reset(token)


@cache
def ask_for_equal_products() -> None:
    """Ask for products on a CPU whose bits do not depend on where their matrices lie, and warn where they still do.

    MKL computes products of one shape in two ways on some CPUs, such as an AMD EPYC, unless MKL_CBWR says otherwise. It
    reads that once, at the first product of the process.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 35, width, generator=numbers, device="cpu", dtype=torch.float32) for width in (35, 9))
    if not torch.equal(torch.bmm(a, b)[3:], torch.bmm(a[3:], b[3:])):
        logger.warning(
            "a row may have other last bits in another batch on this CPU: its library computes equal products in "
            "two ways. If it is MKL, set MKL_CBWR=AUTO,STRICT before Python starts"
        )


def is_batch_invariant() -> bool:
    """True inside batch_invariant()."""
    return _active.get()


is_batch_invariant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as choose_path in backend.py


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in products of exactly GRID rows, all of one sequence.

    Args:
        x: [..., T, D]. The axes before T are a batch. T is filled up with zeros.
        weight: [N, D].
        bias: [N], or None for 0.

    Returns:
        [..., T, N].
    """
    if x.ndim < 2 or x.numel() == 0:
        return functional.linear(x, weight, bias)
    T, D = x.shape[-2:]
    padded = functional.pad(x, (0, 0, 0, -T % GRID))
    y = torch.stack([functional.linear(chunk, weight, bias) for chunk in padded.reshape(-1, GRID, D)])
    return y.view(*padded.shape[:-1], -1)[..., :T, :]


class _FixedProducts(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (fixed_linear if func is functional.linear else func)(*args, **(kwargs or {}))
