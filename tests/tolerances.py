"""How far a path may stand from the law, by dtype: one table, for values and gradients alike."""

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}

LONG_FLOAT32 = 5e-6
"""fp32 against fp64 over tens of thousands of tokens: the largest error of a channel over its largest number."""
OUTLIER_FLOAT32 = {"o": 1e-5, "dq": 5e-4, "dk": 5e-4, "dv": 1e-3}
"""The same where one key is 10,000 times larger than all others: features cancel."""


def assert_close(got: Iterable[Tensor], want: Iterable[Tensor], names: Iterable[str]) -> None:
    for a, b, name in zip(got, want, names, strict=True):
        assert a.dtype == b.dtype, f"{name} has dtype {a.dtype}, not {b.dtype}"
        torch.testing.assert_close(a, b, **TOLERANCES[b.dtype], msg=lambda text, name=name: f"{name}: {text}")


KERNEL_ERRORS: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Triton kernels at real sizes against fp64: the norm of the difference over the norm. Sums of many random numbers have
elements near zero, which an element-wise tolerance would have to be softened for."""

SLOWER_REGIME = 1.1
"""How much slower than the other the regime may be that the kernels' cost model chooses, where both were measured."""


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def assert_small_error(got: Iterable[Tensor], want: Iterable[Tensor], names: Iterable[str], dtype: torch.dtype) -> None:
    errors = {name: relative_error(a, b) for a, b, name in zip(got, want, names, strict=True)}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error < KERNEL_ERRORS[dtype]}
    assert not wrong, f"relative errors beyond {KERNEL_ERRORS[dtype]:.0e}: {wrong}"
