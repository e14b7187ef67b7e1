"""Compare the results of kernels with plain torch in fp64, with a tolerance that follows from the data."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

FP32, RECURRENT = 2.0**-19, 2.0**-16
"""How exact sums in fp32 are taken to be: 32 roundings of 2^-24, in whatever order; 256 where each token rounds the
state of the one before."""
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}
"""How exact a factor of the tensor cores is, by the dtype of the data; TF32 drops bits instead of rounding them."""
MARGIN = 8.0
"""An error is at most so many times what a change of the inputs by one roundoff makes of the result."""
DRAWS = (1, 16)
"""How many such changes are tried: the second number where an error is too large for the first. One change may leave a
result by chance where it is that rounding moves: a gradient of one small score q . k, of which the changes cancel."""
Errors = dict[str, float]
"""The largest error of each result, over its tolerance: above 1 is wrong."""
_draw = random.Random(0)  # of our own: what a user draws stays as it is


def compare_calls(
    in_torch: Callable[..., Any],
    calls: Iterable[tuple[Any, Any]],
    results: list[Tensor],
    roundoff: float = FP32,
    terms: Sequence[Tensor | float] = (),
) -> Errors:
    """Errors of kernels' results, each over its tolerance.

    in_torch: what they compute, in plain torch. calls: (arguments, the results' parts that they give). If there are
    fewer parts than results, the others are sums over all calls. The tolerance is MARGIN times what becomes of the
    results in fp64 if all arguments are changed by one roundoff, the most of DRAWS changes. terms: how large the terms
    are whose difference the first results are, where that difference does not move though its terms do.
    """
    calls, (few, many) = list(calls), DRAWS
    errors = _compare(in_torch, calls, results, roundoff, terms, few)
    right = max(errors.values(), default=0.0) <= 1
    return errors if right else _compare(in_torch, calls, results, roundoff, terms, many)


def _compare(
    in_torch: Callable[..., Any],
    calls: Iterable[tuple[Any, Any]],
    results: list[Tensor],
    roundoff: float,
    terms: Sequence[Tensor | float],
    draws: int,
) -> Errors:
    """As compare_calls, with so many changes of the arguments."""
    errors: Errors = {}
    sums: list[Tensor] = []

    def compare(number: int, got: Tensor, found: Iterable[Tensor]) -> None:
        *moved, want = (x.double() for x in found)
        spread = torch.stack([_spread(x - want) for x in moved]).amax(0)
        size = FP32 * terms[number] if number < len(terms) else 0.0
        error = relative_to(got, want, MARGIN * (spread + roundoff * want.abs() + size))
        errors[f"result {number}"] = max(error, errors.get(f"result {number}", 0.0))

    for args, part in calls:
        exact = replace_tensors(args, _double, torch.float64)
        moves = (partial(_changed, size=roundoff, seed=seed) for seed in range(draws))
        runs = [in_torch(*replace_tensors(exact, move)) for move in moves]
        runs.append(in_torch(*exact))  # last: it may overwrite them
        found, parts = list(zip(*map(tensors_of, runs), strict=True)), tensors_of(part)
        for number, (got, each) in enumerate(zip(parts, found, strict=False)):
            compare(number, got, each)
        rest = [torch.stack(each) for each in found[len(parts) :]]
        sums = [a + b for a, b in zip(sums, rest, strict=True)] if sums else rest
    first = len(results) - len(sums)
    for number, (got, total) in enumerate(zip(results[first:], sums, strict=True), first):
        compare(number, got, total)
    return errors


def relative_to(got: Tensor, want: Tensor, tolerance: Tensor) -> float:
    """The largest error over its tolerance, to which the rounding to the dtype of `got` is added. Numbers that this
    dtype, or fp32 on the way, cannot hold are not compared."""
    if got.numel() == 0:
        return 0.0
    if not got.is_floating_point():
        return 0.0 if torch.equal(got.double(), want) else float("inf")
    about = torch.finfo(got.dtype)
    tolerance = tolerance + about.eps * want.abs() + max(about.tiny * about.eps, 1e-30)
    counts = (want.abs() < about.max / 2) & (tolerance < 1e30)
    error = torch.where(counts, (got.double() - want).abs() / tolerance, 0)
    return float(error.nan_to_num(nan=float("inf")).max())


def some(count: int, wanted: int, *, every: int = 0) -> list[int]:
    """`wanted` of the numbers below `count`, sorted: the first two, the last two, others at random.

    every: at least one number of each remainder modulo `every`, so that every row of a tile of this size is checked.
    """
    if count <= wanted:
        return list(range(count))
    chosen = {0, 1, count - 2, count - 1}
    for first in range(min(every, wanted - len(chosen))):
        chosen.add(_draw.randrange(first, count, every))
    while len(chosen) < wanted:
        chosen.add(_draw.randrange(count))
    return sorted(chosen)


def pick(x: Any, axis: int, numbers: list[int]) -> Any:
    """x at some places of an axis; None stays None."""
    return None if x is None else x.index_select(axis, torch.tensor(numbers, device=x.device))


def some_channels(args: Any, results: Any, wanted: int = 48, keep: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """The same call for some channels, the last axis of all its tensors but those numbered in `keep`."""
    numbers = some(args[0].shape[-1], wanted)

    def of(x: Any) -> Any:
        if isinstance(x, list):
            return list(map(of, x))
        return pick(x, x.ndim - 1, numbers) if isinstance(x, Tensor) else x

    return tuple(x if index in keep else of(x) for index, x in enumerate(args)), of(list(results))


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """Slices of `rows` rows of so many numbers, a million numbers at a time."""
    step = max(1, 2**20 // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def differentiate(function: Callable[..., Any], inputs: tuple[Tensor | None, ...], *grads: Tensor) -> list[Any]:
    """The gradients of a function's results at its inputs; None for None. All in plain torch."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        made = tensors_of(function(*leaves))[: len(grads)]
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(made, wanted, grads, materialize_grads=True))
    return [None if x is None else next(found) for x in leaves]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, torch records nothing for gradients unless asked, also within an operator of torch.library, and products
    are in the dtype of their factors."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cuda", enabled=False):
        yield


def leaves_of(x: Any) -> Iterator[Any]:
    """What nested lists and tuples hold."""
    if isinstance(x, tuple | list):
        for each in x:
            yield from leaves_of(each)
    else:
        yield x


def tensors_of(x: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples."""
    return [each for each in leaves_of(x) if isinstance(each, Tensor)]


def replace_tensors(x: Any, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
    """The same arguments with other tensors and, if given, another dtype where one is an argument."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple | list):
        parts = [replace_tensors(each, change, dtype) for each in x]
        return x._make(parts) if isinstance(x, tuple) and hasattr(x, "_make") else type(x)(parts)
    return dtype if dtype is not None and isinstance(x, torch.dtype) else x


def _double(x: Tensor) -> Tensor:
    """A copy in fp64: what is computed with it may overwrite it."""
    return x.detach().to(torch.float64, copy=True) if x.is_floating_point() else x.clone()


def _changed(x: Tensor, size: float, seed: int) -> Tensor:
    """x with each number changed by a factor 1 + size or 1 - size."""
    if not x.is_floating_point():
        return x.clone()
    generator = torch.Generator(x.device).manual_seed(seed)
    signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device)
    return x * (1 + size * (2 * signs - 1))


def _spread(x: Tensor) -> Tensor:
    """The largest of each row, for all of it: one number by itself may not move."""
    return x.abs().amax(-1, keepdim=True) if x.ndim else x.abs()
