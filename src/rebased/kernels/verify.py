"""Compute with every operator on this machine, and compare with the equations in fp64.

    from rebased.kernels.verify import verify

    found = verify("auto")
    assert found.right, found.wrong

`rebased kernels verify` is the same as a command.
"""

import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from rebased.kernels.verify_cases import HEADS, Case, gpu_cases, torch_cases
from rebased.ops.backend import Backend, choose_device, choose_path, has_triton, use_backend, why_no_kernels

TF32 = 2e-3
"""The tolerance of products in TF32: each of two factors loses its last 13 bits, up to 2^-10 of itself."""
PEAK = 2.0
"""How much larger than errors by norm, which are averages, the largest one over the largest number may be."""

_TINY = 1e-30  # in place of zero, to divide by


class Checked(NamedTuple):
    """What was found of a case."""

    operator: str
    dtype: str
    widths: str
    T: int
    result: str  # the one with the largest error
    error: float
    tolerance: float
    computed_by: str  # the path, or "safe tiles" or "torch" if its kernels are not used here
    problem: str | None  # an error that the call ended with, or why kernels are not used
    seconds: float

    @property
    def right(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance


class Verification(NamedTuple):
    """What was found on a machine."""

    cases: list[Checked]
    device: str
    path: Backend  # what backend="auto" takes
    reason: str | None  # why it is not "triton"
    matmul_precision: str
    versions: dict[str, str]
    seconds: float

    @property
    def wrong(self) -> list[Checked]:
        """The cases whose errors are too large."""
        return [case for case in self.cases if not case.right]

    @property
    def right(self) -> bool:
        """True if all cases are right."""
        return not self.wrong


def verify(
    device: str = "auto",
    *,
    cases: Iterable[Case] | None = None,
    processes: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """The errors of every operator on this machine, as backend="auto" computes it there.

    Args:
        device: "auto", "cuda" or "cpu".
        cases: those to compute; default: all for the path that "auto" takes, `gpu_cases()` or `torch_cases()`.
        processes: into how many the cases for a GPU are divided. Their time is that of compiling.
        on_progress: on_progress(done, total) is called before the first case and after each one.

    Returns:
        A Verification. Inputs are drawn from a fixed seed. Kernels that this process launches for the first time are
        judged by the self-check too, without the verdicts of earlier processes.

    Raises ValueError if there is no such device.
    """
    begin, where = time.perf_counter(), choose_device(device)
    path = choose_path("auto", where)
    wanted = list(cases if cases is not None else gpu_cases() if path == "triton" else torch_cases())
    found: list[Checked] = []
    tell = on_progress or (lambda done, total: None)
    precision = torch.get_float32_matmul_precision()
    with _without_verdicts(), ExitStack() as stack:
        tell(0, len(wanted))
        checked: Iterator[Checked] = (_check(case, where) for case in wanted)
        if processes > 1 and cases is None and path == "triton":
            pool = stack.enter_context(ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")))
            checked = pool.map(partial(_check_numbered, where, precision), range(len(wanted)))
        for each in checked:
            found.append(each)
            tell(len(found), len(wanted))
    took = time.perf_counter() - begin
    return Verification(found, str(where), path, _why(path, where), precision, _versions(), took)


def tolerance(case: Case, device: torch.device) -> float:
    """The largest error of a result by norm: the norm of the difference over the norm.

    One rounding is off by at most u, half the distance from 1 to the next number, and by u / sqrt(3) on average.

    - Half precision: sums are in fp32. Numbers are rounded as they enter a product (features, states, weighted
      gradients, gradients of scores) and when they are stored: five independent errors, u sqrt(5/3) together.
    - fp32: a sum of n terms, in whatever order, is off by about u sqrt(n), and sums that follow each other add up.
    - fp32 where torch allows TF32: see TF32.

    A factor 4 is for what this leaves out. What a wrong tile makes of a result is far beyond it.
    """
    unit = torch.finfo(case.dtype).eps / 2
    precision = torch.get_float32_matmul_precision()
    if case.dtype == torch.float32 and case.products and precision != "highest":
        in_bf16 = device.type == "cpu" and precision == "medium"
        return tolerance(case._replace(dtype=torch.bfloat16), device) if in_bf16 else TF32
    if case.dtype == torch.float32:
        return 4 * unit * sum(map(math.sqrt, case.sums))
    return 4 * unit * math.sqrt(5 / 3)


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The error by norm; and the largest error over the largest number, of the head where this is most.

    The norm averages: a few wrong rows among thousands hide in it. The largest number does not. Integers: how many
    differ, of all. Infinity if a number is not finite.
    """
    if not got.is_floating_point():
        return (float((got != want).double().mean()),) * 2
    got, want = got.double(), want.double()
    difference = got - want
    if not bool(difference.isfinite().all()):
        return math.inf, math.inf
    axis = want.shape.index(HEADS) if HEADS in want.shape else None
    heads = [(difference, want)] if axis is None else zip(difference.unbind(axis), want.unbind(axis), strict=True)
    largest = max(float(off.abs().max() / of.abs().max().clamp_min(_TINY)) for off, of in heads)
    return float(difference.norm() / want.norm().clamp_min(_TINY)), largest


def _check_numbered(device: torch.device, precision: str, number: int) -> Checked:
    """In another process."""
    torch.set_float32_matmul_precision(precision)
    return _check(next(islice(gpu_cases(), number, None)), device)


def _check(case: Case, device: torch.device) -> Checked:
    begin, limit = time.perf_counter(), tolerance(case, device)
    worst, error, computed_by, problem = "", math.inf, "", None
    try:
        data, parameters = case.draw(Generator().manual_seed(0))
        given = {name: _rounded(x, case.dtype) for name, x in data.items()}
        given |= {name: _rounded(x, torch.float32) for name, x in parameters.items()}
        given = {name: x.to(device) for name, x in given.items()}
        with case.within(), _listening() as heard, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about how it computes
            computed_by = choose_path("auto", device)
            got = _compute(case, given)
        with use_backend("reference"):  # the equation
            want = _compute(case, {name: _rounded(x, torch.float64) for name, x in given.items()})
        found = {name: errors(got[name], x) for name, x in want.items()}
        largest_error = {name: max(by_norm, largest / PEAK) for name, (by_norm, largest) in found.items()}
        worst = max(largest_error, key=lambda name: largest_error[name])
        error = largest_error[worst]
        fell_back = [event for event in heard if hasattr(event, "to")]
        if fell_back:
            computed_by, problem = fell_back[-1].to, fell_back[0].problem
        elif computed_by == "triton" and _has_safe_tiles(case, given):
            computed_by = "safe tiles"
    except Exception as failure:  # any failure is this case's result
        problem = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
    dtype = str(case.dtype).removeprefix("torch.")
    seconds = time.perf_counter() - begin
    return Checked(case.operator, dtype, case.widths, case.T, worst, error, limit, computed_by, problem, seconds)


def _compute(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a case, and the gradients of a random sum of them."""
    if not case.gradients:
        with torch.no_grad():
            return case.compute(**given)
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    results = case.compute(**leaves)
    generator = Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(case.dtype).to(x.device, x.dtype) for x in results.values()]
    by = {name: x for name, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(list(results.values()), list(by.values()), weights)
    gradients = {f"d {name}": x for name, x in zip(by, found, strict=True)}
    return {name: x.detach() for name, x in results.items()} | gradients


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _listening() -> AbstractContextManager[Sequence[Any]]:
    if not has_triton():  # the self-check needs it
        return nullcontext([])
    from rebased.ops.self_check import listening

    return listening()


def _has_safe_tiles(case: Case, given: dict[str, Tensor]) -> bool:
    """True if calls of these widths take safe tiles, since an earlier one was wrong."""
    if case.key_value_width is None:
        return False
    from rebased.ops.polynomial.gpu.call import choose_products
    from rebased.ops.polynomial.gpu.plan import SAFE_WIDTHS

    return (choose_products(given["q"]), *case.key_value_width) in SAFE_WIDTHS


@contextmanager
def _without_verdicts() -> Iterator[None]:
    """Inside, the self-check keeps its verdicts in a folder of its own and finds no others."""
    former = os.environ.get("REBASED_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REBASED_CACHE"] = folder
        try:
            yield
        finally:
            if former is None:
                del os.environ["REBASED_CACHE"]
            else:
                os.environ["REBASED_CACHE"] = former


def _why(path: Backend, device: torch.device) -> str | None:
    """Why backend="auto" takes this path; None if it is the kernels'."""
    if path == "triton":
        return None
    chosen = os.environ.get("REBASED_BACKEND")
    return f"REBASED_BACKEND={chosen}" if chosen else why_no_kernels(device)


def _versions() -> dict[str, str]:
    if not has_triton():
        return {"torch": torch.__version__}
    from rebased.ops.self_check import machine, mode

    return {**machine(), "self-check": mode()}
