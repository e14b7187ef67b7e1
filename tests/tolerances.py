"""How far a result may stand from the law: limits that follow from the arithmetic, whatever the CPU or the GPU.

    limit = MARGIN * u * growth * condition

- u: the unit roundoff of the dtype. One rounding is off by at most u times the rounded number.
- growth: how roundings add up. A sum of n terms rounds up to n times. The order differs between machines: one
  accumulator, the lanes of a vector unit, blocks, threads. In every order the errors are nearly independent, so that
  they add up to about sqrt(n) u of the result. Sums that follow each other add their growths. A single operation is a
  sum of one term.
- condition: how much larger the terms of a sum are than the sum itself, where they cancel.
- MARGIN: one error is a draw with a standard deviation of about u. The largest of a million draws is five standard
  deviations; 8 leaves room for constants that the growth leaves out.

A limit that a correct result approaches says nothing about the machine, and one that a defect stays below is useless:
tests/test_tolerances.py shows that they reject inputs in bf16 or TF32 and a sum that lacks one chunk.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MARGIN = 8.0
NORM_MARGIN = 4.0
"""For errors that are averaged over a tensor: nothing is the largest of many."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: 1.1e-16, 6.0e-8, 4.9e-4 (fp16), 3.9e-3 (bf16)."""
    return torch.finfo(dtype).eps / 2


def growth(*lengths: int) -> float:
    """Growth of rounding errors over sums of these lengths, one after the other."""
    return sum(math.sqrt(n) for n in lengths)


def in_chunks(n: int, chunk: int = 512) -> tuple[int, int]:
    """The lengths of a sum of n terms that is made chunk by chunk: within one chunk, and over chunks."""
    return min(n, chunk), -(-n // chunk)


def limit(dtype: torch.dtype, *lengths: int, condition: float = 1.0, roundings: int = 1) -> float:
    """The largest error that a tensor may have, over its largest number. `lengths`: of the sums, one after the other.

    Half precision: sums are kept in fp32, so that only numbers which are stored are rounded to the dtype, `roundings`
    times one after the other. Each is off by at most u; a hard bound, which needs no margin, but two results differ by
    twice as much.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return limit(torch.float32, *lengths, condition=condition) + 2 * roundings * unit_roundoff(dtype)
    return MARGIN * unit_roundoff(dtype) * growth(*lengths) * condition


def largest_error(got: Tensor, want: Tensor, size: float = 0.0) -> float:
    """The largest error over the largest number of `want`, or over `size`, where terms of this size cancel."""
    assert got.shape == want.shape, f"{list(got.shape)} is not {list(want.shape)}"
    if got.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    assert got.isfinite().all(), "not finite"
    error, largest = float((got - want).abs().max()), max(size, float(want.abs().max()))
    return error / largest if error else 0.0


def assert_near(
    got: Tensor,
    want: Tensor,
    *lengths: int,
    condition: float = 1.0,
    roundings: int = 1,
    size: float = 0.0,
    name: str = "the result",
    dtype: torch.dtype | None = None,
) -> None:
    """Fails where an error is larger than the limit of `lengths` for the dtype, by default that of `got`."""
    allowed = limit(dtype or got.dtype, *lengths, condition=condition, roundings=roundings)
    error = largest_error(got, want, size)
    assert error <= allowed, f"{name} is off by {error:.1e} of its largest number; the limit is {allowed:.1e}"


def relative_error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


FIRST_TOKEN = 32.0
"""Condition of polynomial attention's small cases. The first token divides by one similarity alone, c2 s^2 for ReBased,
and its gradients contain rounding errors over |s|: the smallest of a few dozen scores, which are about 1, is near 1/32.
Later tokens divide by sums that hold larger similarities. Inputs are fixed by their seed; with another one the smallest
score may be smaller by chance, and so may this number have to be larger."""
FEATURES = FIRST_TOKEN**2
"""The same where s^2 is a sum over features of both signs, which are not smaller where s is."""
POLYNOMIAL = (128, 1000, 153)
"""Sums of polynomial attention's small cases, at most: a score over the key width, tokens, features."""
OUTLIER = {"o": 1e4 / math.sqrt(400), "dq": 1e4, "dk": 1e4}
"""Condition where the first key is 10,000 times larger than all others. Its features, k^2, are 1e8 times larger than
theirs. What decides are queries nearly at right angles to it, whose similarity 1e8 s^2 with it is no more than the t
similarities of about 1 with the others: s is about 1e-4 sqrt(t). There dq and dk are sums of features of 1e8 that
cancel to the root of that; o moves by 1e8 s u over t, 1e4 u / sqrt(t). So small an s first occurs at t of about 400."""


def assert_close(
    got: Iterable[Tensor],
    want: Iterable[Tensor],
    names: Iterable[str],
    *,
    lengths: tuple[int, ...] = POLYNOMIAL,
    condition: float = 1.0,
    size: float = 1.0,
) -> None:
    """`assert_near` for tensors that belong together, of equal dtypes: a value and its gradients, a model's weights."""
    for a, b, name in zip(got, want, names, strict=True):
        assert a.dtype == b.dtype, f"{name} has dtype {a.dtype}, not {b.dtype}"
        assert_near(a, b, *lengths, condition=condition, size=size, name=name)


def kernel_limit(dtype: torch.dtype) -> float:
    """Kernels at real sizes against fp64: the norm of the difference over the norm. Sums of many random numbers have
    elements near zero, which an element-wise limit would have to be softened for.

    Half precision: numbers are rounded as they enter a product (features, states, weighted gradients, gradients at
    scores) and when they are stored: five independent errors, each evenly spread over +-u, so that its root mean square
    is u / sqrt(3). fp32: scores over 128 columns of keys, tokens of one chunk of 128, 32 chunks, 153 features.
    """
    if dtype == torch.float32:
        return NORM_MARGIN * unit_roundoff(dtype) * growth(128, 128, 32, 153)
    return NORM_MARGIN * unit_roundoff(dtype) * math.sqrt(5 / 3)


KERNEL_ERRORS = {dtype: kernel_limit(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""1.0e-5, 2.5e-3 and 2.0e-2."""


def assert_small_error(got: Iterable[Tensor], want: Iterable[Tensor], names: Iterable[str], dtype: torch.dtype) -> None:
    errors = {name: relative_error(a, b) for a, b, name in zip(got, want, names, strict=True)}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error < KERNEL_ERRORS[dtype]}
    assert not wrong, f"relative errors beyond {KERNEL_ERRORS[dtype]:.0e}: {wrong}"


def changed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, each number changed by up to one rounding of dtype: evenly spread, so by u / sqrt(3) in root mean square."""
    noise = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1
    return x * (1 + unit_roundoff(dtype) * noise.to(x.device))


def assert_small_change(
    got: Iterable[Tensor], want: Iterable[Tensor], moved: Iterable[Tensor], names: Iterable[str], dtype: torch.dtype
) -> None:
    """`assert_small_error` where a result may be worse conditioned than its inputs: a limit grows with how far the
    result moves in fp64 when all inputs are `changed`."""
    for a, b, other, name in zip(got, want, moved, names, strict=True):
        condition = max(1.0, relative_error(other, b) / unit_roundoff(dtype) * math.sqrt(3))
        error, most = relative_error(a, b), condition * KERNEL_ERRORS[dtype]
        assert error < most, f"{name}: the relative error is {error:.1e}, beyond {most:.1e}"


TINY_MODEL = (16, 16, 16, 16, 32) * 4 + (16, 257)
"""Sums of the tests' language models, at most: two layers of a norm, projections, tokens, a projection and an MLP,
forth and back; logits, the vocabulary."""
TRAINED = limit(torch.float32, *TINY_MODEL)
"""Of losses and norms of gradients in fp32, over a few steps of training: relative, 5e-5."""


def assert_same_weights(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """Fails where the weights of two fp32 models, after the same few steps of Adam, differ by more than rounding. The
    measure is the norm of the difference over the norm, all weights together.

    Adam divides a gradient by its own size, so that the relative errors of gradients count. Those of the smallest
    gradients are large, up to the whole step; so the largest error of a weight says little, and the norm is asked.
    """
    a, b = (torch.cat([x.detach().flatten() for x in weights]) for weights in (got, want))
    error, allowed = relative_error(a, b), NORM_MARGIN * unit_roundoff(torch.float32) * growth(*TINY_MODEL)
    assert error <= allowed, f"the weights differ by {error:.1e} of their norm; the limit is {allowed:.1e}"


SLOWER_REGIME = 1.1
"""How much slower than the other the regime may be that the kernels' cost model chooses, where both were measured."""
