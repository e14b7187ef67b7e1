"""Kernels that are broken on purpose, in Triton's interpreter: every operator finds it and hands out right numbers."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops import (
    BASED,
    REBASED,
    embed,
    layer_norm,
    linear_cross_entropy,
    linear_layer_norm,
    poly_attention,
    poly_attention_at,
    rms_norm,
    selective_scan,
    self_check,
    short_conv,
    token_shift,
    use_backend,
    wkv,
)
from rebased.ops.kernel_launch import Launch
from rebased.ops.polynomial.gpu import in_torch, plan
from rebased.ops.polynomial.gpu.call import make_call
from tolerances import assert_close

B, T, H, D = 1, 70, 2, 12
Call = Callable[[list[Tensor]], Any]


@triton.jit
def copy_all_kernel(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + tl.arange(0, N)))


def made(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


CASES: dict[str, tuple[list[tuple[int, ...]], Call]] = {
    "poly_attention": (
        [(B, T, H, 8), (B, T, H, 8), (B, T, H, 5)],
        lambda x: poly_attention(*x, coefficients=REBASED),  # type: ignore[misc]
    ),
    "poly_attention_at": (
        [(B, 9, H, 8), (B, T, H, 8), (B, T, H, 5)],
        lambda x: poly_attention_at(*x, torch.arange(60, 69).expand(B, 9), coefficients=BASED),  # type: ignore[misc]
    ),
    "short_conv": ([(B, T, D), (D, 4), (D,)], lambda x: short_conv(*x)),
    "short_conv with silu": ([(B, T, D), (D, 4), (D,)], lambda x: short_conv(*x, activation="silu")),
    "token_shift": ([(B, T, D), (B, D), (2, D)], lambda x: token_shift(*x)),
    "layer_norm": ([(B, T, D), (D,), (D,)], lambda x: layer_norm(*x)),
    "rms_norm": ([(B, T, D), (D,)], lambda x: rms_norm(*x)),
    "linear_layer_norm": ([(B, T, D), (32, D), (32,), (32,)], lambda x: linear_layer_norm(*x)),
    "embed": ([(50, D), (T, D)], lambda x: embed(torch.arange(T).expand(B, T) % 50, *x)),
    "wkv": ([(B, T, D), (B, T, D), (D,), (D,)], lambda x: wkv(*x)),
    "selective_scan": (
        [(B, T, D), (B, T, D), (D, 4), (B, T, 4), (B, T, 4), (D,), (D,), (B, T, D)],
        lambda x: selective_scan(x[0], x[1], -functional.softplus(x[2]), *x[3:6], dt_bias=x[6], gate=x[7]),
    ),
    "linear_cross_entropy": (
        [(T, D), (50, D)],
        lambda x: linear_cross_entropy(*x, torch.arange(T) % 50),  # type: ignore[misc]
    ),
}


def run(name: str, backend: str) -> list[Tensor]:
    """The results of a case and the gradients of its inputs."""
    shapes, call = CASES[name]
    given = made(*shapes)
    torch.set_float32_matmul_precision("high" if name == "linear_layer_norm" else "highest")
    with use_backend(backend):  # type: ignore[arg-type]
        results = call(given)
    results = list(results) if isinstance(results, tuple | list) else [results]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, given, grads)]


def break_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches leave one number in eight wrong, unless their tiles are safe."""
    launch = Launch.__call__

    def broken(self: Any, *args: Any, overwrites: Any = ()) -> None:
        before = [x.clone() if isinstance(x, Tensor) else x for x in args]
        launch(self, *args, overwrites=overwrites)
        if {self.constants.get("BM"), self.constants.get("BN")} == {32, 16}:
            return
        for x, old in zip(args, before, strict=True):
            if isinstance(x, Tensor) and x.is_floating_point() and not torch.equal(x.nan_to_num(), old.nan_to_num()):
                x.view(-1)[::8] += 1.0

    monkeypatch.setattr(Launch, "__call__", broken)
    monkeypatch.setenv("REBASED_SELF_CHECK", "on")


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    demoted = {name: set(operator.demoted) for name, operator in self_check.OPERATORS.items()}
    yield
    for name, operator in self_check.OPERATORS.items():
        operator.demoted.clear()
        operator.demoted |= demoted.get(name, set())
    plan.SAFE_WIDTHS.clear()
    in_torch.BY_TORCH.clear()
    make_call.cache_clear()
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", CASES)
def test_a_broken_kernel_hands_out_right_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every kernel of a case is broken. The results are those of plain torch, in either pass, and a warning says so."""
    want = run(name, "chunked")
    break_kernels(monkeypatch)
    with caplog.at_level(logging.WARNING, "rebased"):
        got = run(name, "triton")
    names = [str(number) for number in range(len(want))]
    condition = 2**13 if name == "linear_layer_norm" else 32.0  # TF32
    assert_close(got, want, names, condition=condition)
    assert "computes wrong numbers here" in caplog.text


def test_safe_tiles_replace_broken_ones(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    want = run("poly_attention", "chunked")
    break_kernels(monkeypatch)
    got = run("poly_attention", "triton")
    assert_close(got, want, "0123", condition=32.0)
    assert ("tf32x3", 8, 5) in plan.SAFE_WIDTHS
    assert "other tiles are taken" in caplog.text
    assert "plain torch" not in caplog.text


@pytest.mark.parametrize("sizes", [(15, 16), (16, 15)])
def test_an_address_outside_of_all_tensors_is_an_error(sizes: tuple[int, int]) -> None:
    """conftest.py checks every address of every kernel in this folder."""
    x, y = (torch.ones(size) for size in sizes)
    with pytest.raises(Exception, match="1 of 16 addresses are in no tensor"):
        copy_all_kernel[(1,)](x, y, N=16)
