"""The kernels as operators of torch: compiled, registered, without a double backward; and errors for bad input."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.polynomial_cases import Cut, past, tensors
from polynomial_inputs import Shape, inputs
from rebased.ops import BASED, REBASED, PolyState, init_poly_state, poly_attention, poly_attention_extend
from rebased.ops.polynomial.gpu import operators

pytestmark = [pytest.mark.usefixtures("poisoned_kernels"), pytest.mark.recorded("polynomial")]


def test_compiles_as_one_graph(cut: Cut) -> None:
    """aot_eager: tracing and its fake tensors, without the minute that generating code takes."""
    cut(64)
    shape = Shape(B=1, T=20, H=2, K=4, V=3)
    (q, k, v, do), _ = tensors(shape, BASED, torch.float32)
    start = PolyState(*(x.float() for x in past(shape, BASED)))
    cu_seqlens = torch.tensor([0, 8, 20])

    def run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        a = poly_attention(q, k, v, coefficients=BASED, backend="triton", cu_seqlens=cu_seqlens)
        b, after = poly_attention_extend(q, k, v, start, coefficients=BASED, backend="triton")
        return a + b, *after

    results = []
    for each in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        outputs = each(q, k, v, cu_seqlens)
        gradients = torch.autograd.grad(outputs, (q, k, v), (do, *map(torch.ones_like, outputs[1:])))
        results.append([x.detach() for x in (*outputs, *gradients)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiles_for_lengths_to_come() -> None:
    """A second length makes T symbolic; the plan and the fake versions must do with that."""

    def run(q: Tensor, k: Tensor, v: Tensor, state: PolyState) -> tuple[Tensor, ...]:
        a = poly_attention(q, k, v, coefficients=REBASED, backend="triton")
        b, after = poly_attention_extend(q, k, v, state, coefficients=REBASED, backend="triton")
        return a + b, *after

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for T in (20, 31, 45):
        (q, k, v, do), _ = tensors(Shape(B=1, T=T, H=1, K=4, V=3), REBASED, torch.float32)
        results = []
        for each in (run, compiled):
            o, *after = each(q, k, v, init_poly_state(1, 1, 4, 3, REBASED))
            results.append([o.detach(), *(x.detach() for x in after), *torch.autograd.grad(o, (q, k, v), do)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operators_are_registered_as_torch_wants_them(cut: Cut) -> None:
    """Schema, fake versions (shapes, dtypes and strides) and autograd registration."""
    for chunk, has_state in ((None, False), (64, False), (64, True)):
        cut(chunk)
        (q, k, v, _), _ = tensors(Shape(B=1, T=20, H=2, K=4, V=3), BASED, torch.float32)
        shape = (1, 2, 128)  # one pair of tiles and one linear block
        kv = torch.zeros(*shape, 16, requires_grad=True) if has_state else None
        z = torch.zeros(shape, requires_grad=True) if has_state else None
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        args = (q, k, v, None, kv, z, *BASED, 1e-12, has_state)
        torch.library.opcheck(operators.poly_forward, args, test_utils=checks)


def test_gradients_go_straight_to_the_inputs(cut: Cut) -> None:
    """A view or a split in between, even one that changes nothing, may copy a gradient as large as the values."""
    cut(None)
    (q, k, v, _), _ = tensors(Shape(B=1, T=3, H=1, K=4, V=128), REBASED, torch.float32)
    o = poly_attention(q, k, v, coefficients=REBASED, backend="triton")
    receivers = [node.variable for node, _ in o.grad_fn.next_functions if node is not None]
    assert all(a is b for a, b in zip(receivers, (q, k, v), strict=True))


def test_double_backward_says_so(cut: Cut) -> None:
    cut(None)
    (q, k, v, _), _ = tensors(Shape(B=1, T=3, H=1, K=4, V=3), REBASED, torch.float32)
    o = poly_attention(q, k, v, coefficients=REBASED, backend="triton")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward; call it with backend='reference'"):
        torch.autograd.grad(dq.square().sum(), q)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"K": 129}, "K up to 128; got 129"),
        ({"dtype": torch.float64}, "bfloat16, float16 and float32; got torch.float64"),
        ({"k": torch.zeros(1, 3, 2, 5)}, "same width K; q has 4 and k has 5"),
        ({"v": torch.zeros(1, 3, 1, 4)}, "must agree in B, T and H"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "whole numbers"),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}, "cu_seqlens is on meta"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors(changed: dict[str, Any], message: str) -> None:
    K, dtype = changed.pop("K", 4), changed.pop("dtype", torch.float32)
    q, k, v, _ = inputs(Shape(B=1, T=3, H=2, K=K, V=3), dtype=dtype)
    with pytest.raises(ValueError, match=message):
        poly_attention(**{"q": q, "k": k, "v": v, "coefficients": REBASED, "backend": "triton", **changed})
