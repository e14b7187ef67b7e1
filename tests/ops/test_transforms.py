"""What torch does to functions: torch.func.grad, torch.func.vmap, torch.compile. Each gives what plain calls give."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.ops import (
    BASED,
    Backend,
    PolyState,
    embed,
    init_poly_state,
    init_wkv_state,
    layer_norm,
    linear_argmax,
    linear_cross_entropy,
    long_conv,
    poly_attention,
    poly_attention_extend,
    poly_state,
    rms_norm,
    selective_scan_extend,
    short_conv,
    token_shift,
    use_backend,
    wkv_extend,
)

B, T, H, K, V = 2, 9, 2, 4, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return random(*lead, B, T, H, K), random(*lead, B, T, H, K, seed=1), random(*lead, B, T, H, V, seed=2)


def attend(q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> Tensor:
    return poly_attention(q, k, v, coefficients=BASED, backend=backend)


def assert_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


BACKENDS = pytest.mark.parametrize("backend", ["chunked", "reference", "recurrent"])


@BACKENDS
def test_func_grad(backend: Backend) -> None:
    inputs = qkv()
    got = torch.func.grad(lambda *x: attend(*x, backend).square().sum(), argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert_equal(got, torch.autograd.grad(attend(*leaves, "reference").square().sum(), leaves))


@BACKENDS
def test_vmap(backend: Backend) -> None:
    """Over a first and a last axis, and with keys that all share."""
    q, _, v = qkv(5)
    k = random(B, T, H, K, seed=1)
    got = torch.func.vmap(lambda *x: attend(*x, backend), in_dims=(4, None, 0), out_dims=1)(q.movedim(0, 4), k, v)
    assert_equal(got, torch.stack([attend(a, k, b, "reference") for a, b in zip(q, v, strict=True)], dim=1))


@BACKENDS
def test_gradients_per_example(backend: Backend) -> None:
    """vmap of grad, with a state that all share; and grad of vmap."""
    q, k, v = qkv(3)
    shape = init_poly_state(B, H, K, V, BASED, dtype=torch.float64)
    state = PolyState(random(*shape.kv.shape, seed=4), random(*shape.z.shape, seed=5).abs())

    def loss(q: Tensor, k: Tensor, v: Tensor, state: PolyState, backend: Backend = backend) -> Tensor:
        o, after = poly_attention_extend(q, k, v, state, coefficients=BASED, backend=backend)
        return o.square().sum() + after.kv.sin().sum() + after.z.sin().sum()

    each = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    got = torch.func.vmap(each, in_dims=(0, 0, 0, None))(q, k, v, state)
    for i in range(3):
        want = torch.func.grad(lambda *x: loss(*x, "reference"), argnums=(0, 1, 2, 3))(q[i], k[i], v[i], state)
        assert_equal([*(x[i] for x in got[:3]), *(x[i] for x in got[3])], [*want[:3], *want[3]])
    of_vmap = torch.func.grad(lambda *x: torch.func.vmap(loss, in_dims=(0, 0, 0, None))(*x, state).sum(), (0, 1, 2))
    assert_equal(of_vmap(q, k, v), got[:3])


def test_second_derivatives_of_func_say_so() -> None:
    q, k, v = qkv()
    second = torch.func.grad(lambda q: torch.func.grad(lambda q: attend(q, k, v, "chunked").sum())(q).square().sum())
    with pytest.raises(RuntimeError, match='pass backend="reference"'):
        second(q)


def test_kernels_cannot_be_transformed() -> None:
    """As it is on a GPU, where "auto" means "triton": it takes the chunked path instead, and "triton" says why not."""
    pytest.importorskip("triton")
    q, k, v = (x.float() for x in qkv(3))
    with use_backend("triton"):
        got = torch.func.vmap(lambda *x: attend(*x, "auto"))(q, k, v)
    assert torch.equal(got, torch.func.vmap(lambda *x: attend(*x, "chunked"))(q, k, v))
    with pytest.raises(ValueError, match="cannot go through Triton kernels; use backend='chunked'"):
        torch.func.vmap(lambda *x: attend(*x, "triton"))(q, k, v)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).float().requires_grad_()


def positive(*shape: int, seed: int = 0) -> Tensor:
    return leaf(*shape, seed=seed).detach().abs().requires_grad_()


TOKENS = torch.tensor([[1, 0, 3], [3, 3, 2]])
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "poly_attention": (
        lambda q, k, v: poly_attention(q, k, v, coefficients=BASED),
        (leaf(B, T, H, K), leaf(B, T, H, K, seed=1), leaf(B, T, H, V, seed=2)),
    ),
    "poly_attention_extend": (
        lambda q, k, v: poly_attention_extend(q, k, v, None, coefficients=BASED),
        (leaf(B, T, H, K), leaf(B, T, H, K, seed=1), leaf(B, T, H, V, seed=2)),
    ),
    "poly_state": (lambda k, v: poly_state(k, v, coefficients=BASED), (leaf(B, T, H, K), leaf(B, T, H, V, seed=1))),
    "wkv": (
        lambda k, v, w, u: wkv_extend(k, v, w, u, init_wkv_state(B, K)),
        (leaf(B, T, K), leaf(B, T, K, seed=1), leaf(K), leaf(K, seed=1)),
    ),
    "selective_scan": (
        lambda x, dt, A, b, c, skip: selective_scan_extend(x, dt, -A, b, c, skip, torch.zeros(B, K, V)),
        (leaf(B, T, K), positive(B, T, K), positive(K, V), leaf(B, T, V), leaf(B, T, V, seed=1), leaf(K)),
    ),
    "short_conv": (short_conv, (leaf(B, T, K), leaf(K, 3), leaf(K))),
    "token_shift": (token_shift, (leaf(B, T, K), leaf(B, K), leaf(3, K))),
    "long_conv": (long_conv, (leaf(B, T, K), leaf(T, K), leaf(K))),
    "layer_norm": (layer_norm, (leaf(B, K), leaf(K), leaf(K, seed=1))),
    "rms_norm": (rms_norm, (leaf(B, K), leaf(K))),
    "embed": (embed, (TOKENS, leaf(4, K))),
    "linear_cross_entropy": (linear_cross_entropy, (leaf(B, K), leaf(5, K), torch.tensor([4, -100]))),
    "linear_argmax": (linear_argmax, (leaf(B, K), leaf(5, K))),
}


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [x for each in outputs for x in flat(each)]


def results(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor]:
    """All outputs and all gradients of the sum of their squares."""
    outputs = flat(function(*inputs))
    leaves = [x for x in inputs if x.requires_grad]
    differentiable = [x for x in outputs if x.requires_grad]
    if not differentiable:
        return outputs
    return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in differentiable), leaves)]


@pytest.mark.parametrize("name", OPERATORS)
def test_compiles_as_one_graph_without_a_warning(name: str) -> None:
    """aot_eager: tracing, forward and backward, without the time that generating code takes."""
    function, inputs = OPERATORS[name]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)  # dynamo's own doing
        got = results(torch.compile(function, backend="aot_eager", fullgraph=True), inputs)
    torch.testing.assert_close(got, results(function, inputs), rtol=1e-5, atol=1e-5)
