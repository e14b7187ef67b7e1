"""What torch does to functions: derivatives of all kinds, torch.func, torch.compile. Each gives what plain calls give.

The table in docs/math.md is the list of the derivatives that there are; every cell is a test.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from docs_text import ROOT
from rebased.ops import (
    BASED,
    Backend,
    PolyState,
    WKVState,
    embed,
    feature_count,
    init_poly_state,
    init_wkv_state,
    layer_norm,
    linear_argmax,
    linear_cross_entropy,
    long_conv,
    long_conv_extend,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_state,
    rms_norm,
    selective_scan_extend,
    short_conv,
    short_conv_extend,
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


def wkv_of(backend: Backend, *x: Tensor) -> tuple[Tensor, ...]:
    """With sums that do not depend on the exponent by which the state is scaled."""
    y, after = wkv_extend(*x[:4], WKVState(x[4], x[5], torch.zeros_like(x[4])), backend=backend)
    return y, after.num * after.max.exp(), after.den * after.max.exp()


F = feature_count(K, BASED)
PLACES = torch.tensor([[1, T - 1]] * B)
SEQUENCE_OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "poly_attention": (lambda backend, *x: attend(*x, backend), qkv(), 0),
    "poly_attention, learnt coefficients": (
        lambda backend, *x: poly_attention(*x[:3], coefficients=x[3], backend=backend),
        (*qkv(), torch.tensor([1.0, 0.7, 0.5], dtype=torch.float64)),
        0,
    ),
    "poly_attention_extend": (
        lambda backend, *x: poly_attention_extend(*x[:3], PolyState(*x[3:]), coefficients=BASED, backend=backend),
        (*qkv(), random(B, H, F, V, seed=3), random(B, H, F, seed=4).abs()),
        2,
    ),
    "poly_attention_at": (
        lambda backend, *x: poly_attention_at(*x, PLACES.to(x[0].device), coefficients=BASED, backend=backend),
        (random(B, 2, H, K), *qkv()[1:]),
        0,
    ),
    "poly_state": (lambda _, *x: poly_state(*x, coefficients=BASED), qkv()[1:], 0),
    "wkv_extend": (
        wkv_of,
        (random(B, T, K), random(B, T, K, seed=1), random(K), random(K, seed=1), random(B, K), random(B, K).abs()),
        2,
    ),
    "selective_scan_extend": (
        lambda backend, x, dt, A, b, c, skip, h: selective_scan_extend(x, dt, -A, b, c, skip, h, backend=backend),
        (random(B, T, K), random(B, T, K).abs(), random(K, V).abs(), random(B, T, V), random(B, T, V, seed=1),
         random(K), random(B, K, V, seed=3)),
        1,
    ),
    "short_conv_extend": (
        lambda backend, *x: short_conv_extend(*x, backend=backend),
        (random(B, T, K), random(K, 3), random(K), random(B, 2, K, seed=3)),
        1,
    ),
    "long_conv_extend": (
        lambda backend, *x: long_conv_extend(*x, backend=backend),
        (random(B, T, K), random(T + 2, K), random(K), random(B, 2, K, seed=3)),
        1,
    ),
}  # fmt: skip
"""Each operator of the table: a function of a backend and inputs, the inputs, and how many of the last are a state."""

KINDS = ("gradient", "state", "double backward", "torch.func", "forward mode")
REFUSALS = "first derivatives only|no double backward|no autograd formula|cannot go through|no forward-mode derivatives"


def read_table() -> list[Any]:
    """(operator, path, kind, claim) of every cell of the table in docs/math.md."""
    table = (ROOT / "docs" / "math.md").read_text().split("\n| operator | path |")[1].split("\n\n")[0].splitlines()
    assert tuple(cell.strip() for cell in table[0].strip("| ").split("|")) == KINDS
    cells = []
    for line in table[2:]:
        operator, path, *claims = (cell.strip().replace("`", "") for cell in line.strip("| ").split("|"))
        for kind, claim in zip(KINDS, claims, strict=True):
            marks = [pytest.mark.gpu] if path == "triton" else []
            cells.append(pytest.param(operator, path, kind, claim, marks=marks, id=f"{operator}-{path}-{kind}"))
    return cells


def test_every_operator_is_in_the_table() -> None:
    assert {cell.values[0] for cell in read_table()} == {*SEQUENCE_OPERATORS}


@pytest.mark.parametrize(("operator", "path", "kind", "claim"), read_table())
def test_derivatives_are_those_of_the_table(operator: str, path: Backend, kind: str, claim: str) -> None:
    function, inputs, states = SEQUENCE_OPERATORS[operator]
    if kind == "state":
        assert (claim == "-") == (states == 0)
    if claim == "yes" and path == "triton":
        check_on_gpu(function, inputs, kind)
    elif claim == "yes":
        check_claim(lambda *x: flat(function(path, *x)), inputs, kind)
    elif claim == "no":
        if path == "triton":
            inputs = tuple(x.float().cuda() for x in inputs)
        for attempt in attempts(lambda *x: flat(function(path, *x)), inputs, kind):
            with pytest.raises((RuntimeError, ValueError), match=REFUSALS):
                attempt()
    else:
        assert claim == "-"


def check_claim(run: Callable[..., Any], inputs: tuple[Tensor, ...], kind: str) -> None:
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = lambda *x: tuple(run(*x))  # noqa: E731
    if kind in ("gradient", "state"):  # all inputs, those of the state too
        assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)
    elif kind == "double backward":
        assert torch.autograd.gradgradcheck(outputs, leaves, fast_mode=True)
    elif kind == "forward mode":
        assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True, check_forward_ad=True, check_backward_ad=False)
    else:
        assert_equal(torch.func.grad(lambda x: squares(run(*x)))(inputs), plain_gradients(run, inputs))
        stacked = tuple(torch.stack([x, 0.5 * x]) for x in inputs)
        got = torch.func.vmap(outputs)(*stacked)
        for i in range(2):
            assert_equal([x[i] for x in got], run(*(x[i] for x in stacked)))


def check_on_gpu(function: Callable[..., Any], inputs: tuple[Tensor, ...], kind: str) -> None:
    """Gradients of the kernels in fp32 beside those of the chunked path in fp64."""
    assert kind in ("gradient", "state")
    got = plain_gradients(lambda *x: flat(function("triton", *x)), tuple(x.float().cuda() for x in inputs))
    want = plain_gradients(lambda *x: flat(function("chunked", *x)), inputs)
    for found, expected in zip(got, want, strict=True):
        assert (found.cpu().double() - expected).abs().max() <= 1e-2 * expected.abs().max()


def attempts(run: Callable[..., Any], inputs: tuple[Tensor, ...], kind: str) -> list[Callable[[], Any]]:
    """Ways to ask for a kind of derivative."""

    def twice() -> Any:
        leaves = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(squares(run(*leaves)), leaves, create_graph=True)
        return torch.autograd.grad(squares(first), leaves)

    def dual() -> Any:
        with forward_ad.dual_level():
            return run(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs))

    return {
        "double backward": [twice],
        "torch.func": [
            lambda: torch.func.vmap(lambda *x: tuple(run(*x)))(*(x.unsqueeze(0) for x in inputs)),
            lambda: torch.func.grad(lambda x: squares(run(*x)))(inputs),
        ],
        "forward mode": [dual, lambda: torch.func.jvp(lambda *x: tuple(run(*x)), inputs, inputs)],
    }[kind]


def squares(outputs: Any) -> Tensor:
    return sum((x.square().sum() for x in outputs), torch.zeros((), dtype=torch.float64, device=outputs[0].device))


def plain_gradients(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    return torch.autograd.grad(squares(run(*leaves)), leaves)


def test_the_loss_of_a_linear_head_refuses_forward_mode() -> None:
    """torch would take its derivative for zero."""
    hidden, weight = random(3, K), random(5, K, seed=1)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no forward-mode derivatives"):
        torch.func.jvp(lambda x: linear_cross_entropy(x, weight, torch.tensor([4, 0, 1])), (hidden,), (hidden,))


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
