"""Polynomial attention with a gate: every path is the equation, values and gradients; and what it refuses."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from polynomial_inputs import COEFFICIENTS, Shape, inputs
from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    PolyState,
    init_poly_state,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_attention_extend_,
    poly_attention_map,
)
from rebased.ops.polynomial import chunked_recurrence
from tolerances import FIRST_TOKEN, assert_close, assert_near

NAMES = ("o", "dq", "dk", "dv", "dg")


def draw_decay(shape: Shape, strength: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    """[B, T, H]: from no decay to e^-strength per token."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(shape.B, shape.T, shape.H, generator=generator, dtype=torch.float64)
    return (-strength * numbers).to(dtype).requires_grad_()


def attend(
    shape: Shape, backend: Backend, coefficients: Coefficients, strength: float = 1.0, **options: Any
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv, dg."""
    q, k, v, do = inputs(shape, coefficients=coefficients)
    g = draw_decay(shape, strength)
    o = poly_attention(q, k, v, coefficients=coefficients, log_decay=g, backend=backend, **options)
    return o, *torch.autograd.grad(o, (q, k, v, g), do)


def test_the_reference_is_the_sum_over_all_pairs() -> None:
    """Written out with loops, and the decays multiplied one by one."""
    q, k, v, _ = inputs(Shape(1, 6, 1, 3, 2))
    g = draw_decay(Shape(1, 6, 1, 3, 2))
    c0, c1, c2 = BASED
    o = poly_attention(q, k, v, coefficients=BASED, scale=0.7, eps=0.1, log_decay=g, backend="reference")
    for i in range(6):
        weights = []
        for j in range(i + 1):
            s = 0.7 * q[0, i, 0].dot(k[0, j, 0])
            weights.append((c0 + c1 * s + c2 * s**2) * prod(g[0, t, 0].exp() for t in range(j + 1, i + 1)))
        want = sum(w * v[0, j, 0] for j, w in enumerate(weights)) / (sum(weights) + 0.1)
        assert_near(o[0, i, 0], want, 10)


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
@pytest.mark.parametrize("T", [1, 63, 65, 130])
def test_every_path_is_the_reference(T: int, coefficients: Coefficients, backend: Backend) -> None:
    shape = Shape(B=2, T=T, H=3, K=8, V=5)
    for strength in (0.01, 3.0):
        got, want = (attend(shape, each, coefficients, strength, eps=0.01) for each in (backend, "reference"))
        assert_close(got, want, NAMES, condition=FIRST_TOKEN)


@pytest.mark.parametrize("backend", ["chunked", "recurrent", "reference"])
def test_pieces_are_the_whole(backend: Backend) -> None:
    """o, the state and all gradients, through a state that has seen tokens."""
    shape = Shape(2, 90, 2, 6, 3)

    def extend(lengths: list[int], path: Backend) -> list[Tensor]:
        q, k, v, do = inputs(shape, coefficients=BASED)
        g = draw_decay(shape)
        zeros = init_poly_state(2, 2, 6, 3, BASED, dtype=q.dtype)
        start = PolyState(
            *(torch.rand(x.shape, generator=torch.Generator().manual_seed(4), dtype=x.dtype) for x in zeros)
        )
        before = state = PolyState(*(x.requires_grad_() for x in start))
        outputs = []
        for piece in zip(*(x.split(lengths, dim=1) for x in (q, k, v, g)), strict=True):
            o, state = poly_attention_extend(*piece[:3], state, log_decay=piece[3], coefficients=BASED, backend=path)
            outputs.append(o)
        o = torch.cat(outputs, dim=1)
        grads = torch.autograd.grad((o, *state), (q, k, v, g, *before), (do, *(torch.ones_like(x) for x in state)))
        return [o, *state, *grads]

    names = ("o", "kv", "z", "dq", "dk", "dv", "dg", "d kv", "d z")
    assert_close(extend([1, 30, 59], backend), extend([90], "reference"), names, condition=FIRST_TOKEN)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_documents_do_not_see_each_other(backend: Backend) -> None:
    shape = Shape(1, 100, 2, 6, 3)
    q, k, v, _ = inputs(shape)
    g = draw_decay(shape)
    cuts = torch.tensor([0, 30, 30, 100])
    packed = poly_attention(q, k, v, coefficients=REBASED, log_decay=g, cu_seqlens=cuts, backend=backend)
    for i, j in ((0, 30), (30, 100)):
        one = [x[:, i:j] for x in (q, k, v, g)]
        alone = poly_attention(*one[:3], coefficients=REBASED, log_decay=one[3], backend=backend)
        assert_near(packed[:, i:j], alone, 100, condition=FIRST_TOKEN)


def test_chosen_queries_steps_and_the_map() -> None:
    shape = Shape(2, 40, 2, 6, 3)
    q, k, v, _ = inputs(shape)
    g = draw_decay(shape)
    every = poly_attention(q, k, v, coefficients=REBASED, log_decay=g, backend="reference")
    positions = torch.tensor([[39, 0, 7], [12, 12, 3]])
    rows = torch.arange(2).unsqueeze(1)
    some = poly_attention_at(q[rows, positions], k, v, positions, coefficients=REBASED, log_decay=g)
    assert_near(some, every[rows, positions], 40, condition=FIRST_TOKEN)
    A = poly_attention_map(q, k, coefficients=REBASED, log_decay=g)
    assert_near(torch.einsum("bhij,bjhv->bihv", A, v), every, 40, condition=FIRST_TOKEN)
    state = init_poly_state(2, 2, 6, 3, REBASED, dtype=q.dtype)
    for t in range(40):
        one = [x[:, t : t + 1] for x in (q, k, v, g)]
        o = poly_attention_extend_(*one[:3], state, coefficients=REBASED, log_decay=one[3])
        assert_near(o, every[:, t : t + 1], 40, 21, condition=FIRST_TOKEN**2)


def test_long_sequences_in_fp32_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 tokens, in groups that the backward pass computes again: no sum of decays runs over the sequence."""
    monkeypatch.setattr(chunked_recurrence, "FEATURES", 2**18)
    T = 65_536
    q, k, v, do = (torch.randn(1, T, 1, 4, generator=torch.Generator().manual_seed(n)) for n in range(4))
    g = draw_decay(Shape(1, T, 1, 4, 4), 1.6, torch.float32)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, g)]
        o = poly_attention(*given[:3], coefficients=BASED, log_decay=given[3], backend="chunked")
        found.append([o.detach(), *torch.autograd.grad(o, given, do.to(dtype))])
    for a, b, name in zip(*found, NAMES, strict=True):  # e^-1.6 per token: about 64 tokens count
        assert_near(a, b, 64, 64, 15, condition=FIRST_TOKEN, name=name)


def test_decays_of_zero_are_no_gate_and_strong_ones_leave_the_last_token() -> None:
    shape = Shape(1, 150, 2, 6, 3)
    q, k, v, _ = inputs(shape)
    plain = poly_attention(q, k, v, coefficients=REBASED)
    none = poly_attention(q, k, v, coefficients=REBASED, log_decay=torch.zeros(1, 150, 2, dtype=q.dtype))
    assert_near(none, plain, 150, 21, condition=FIRST_TOKEN)
    g = torch.full((1, 150, 2), -2000.0, dtype=q.dtype)
    strong = poly_attention(q, k, v, coefficients=REBASED, log_decay=g, eps=0)
    assert_near(strong, v, 6, condition=FIRST_TOKEN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g + 1, "at most 0"),
        (lambda g: g * torch.nan, "at most 0"),
        (lambda g: g - torch.inf, "at most 0"),
        (lambda g: g[:, :3], r"log_decay must be a tensor \[1, 5, 2\]"),
        (lambda g: -0.5, "it is float"),
        (lambda g: g.half(), "float64 or torch.float32"),
    ],
)
def test_bad_decays(change: Any, words: str) -> None:
    q, k, v, _ = inputs(Shape(1, 5, 2, 4, 3))
    g = -torch.rand(1, 5, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=words):
        poly_attention(q, k, v, coefficients=REBASED, log_decay=change(g))
    with pytest.raises(ValueError, match=words):
        poly_attention_map(q, k, coefficients=REBASED, log_decay=change(g))


@pytest.mark.parametrize("backend", ["auto", "reference", "recurrent"])
def test_no_token_changes_no_state(backend: Backend) -> None:
    q, k, v, _ = inputs(Shape(1, 5, 2, 4, 3))
    _, state = poly_attention_extend(q, k, v, None, coefficients=REBASED, backend=backend)
    empty = (x[:, :0] for x in (q, k, v))
    g = q.new_zeros(1, 0, 2)
    o, after = poly_attention_extend(*empty, state, coefficients=REBASED, log_decay=g, backend=backend)
    assert o.shape == (1, 0, 2, 3)
    for a, b in zip(after, state, strict=True):
        assert torch.equal(a, b)


def test_what_has_no_gate() -> None:
    q, k, v, _ = inputs(Shape(1, 5, 2, 4, 3))
    g = torch.zeros(1, 5, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="chosen queries with log_decay have no kernel"):
        poly_attention_at(q, k, v, torch.zeros(1, 5).long(), coefficients=REBASED, log_decay=g, backend="triton")
    with pytest.raises(ValueError, match="coefficients in a tensor"):
        poly_attention(q, k, v, coefficients=torch.ones(3), log_decay=g)


def test_a_key_that_is_nan_may_bring_a_gate_that_is() -> None:
    q, k, v, _ = (x.detach() for x in inputs(Shape(1, 200, 1, 4, 3)))
    g = torch.zeros(1, 200, 1, dtype=torch.float64)
    for x in (q, k, v, g):
        x[:, 150] = torch.nan
    o = poly_attention(q, k, v, coefficients=REBASED, log_decay=g)
    assert o[:, :128].isfinite().all()
    assert o[:, 150:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
@pytest.mark.parametrize("least", [-1e3, -1e9, -3e38])
def test_a_token_that_forgets_everything_begins_anew(least: float, backend: Backend, dtype: torch.dtype) -> None:
    """As a reset by -1e9. Sums over such a number lose the digits of all decays after it."""
    shape, at = Shape(B=1, T=100, H=2, K=4, V=5), 70
    q, k, v, do = (x.detach().to(dtype).requires_grad_() for x in inputs(shape))
    g = draw_decay(shape, 0.3).detach()
    g[:, [20, at]] = least
    after = [x[:, at:].detach().double().requires_grad_() for x in (q, k, v, g)]
    given = (q, k, v, g.to(dtype).requires_grad_())
    results = []
    for (*qkv, decay), gradient, path in ((given, do[:, at:], backend), (after, do[:, at:].double(), "recurrent")):
        o = poly_attention(*qkv, coefficients=REBASED, log_decay=decay, backend=path, eps=0.1)[:, -30:]  # type: ignore[arg-type]
        results.append([o, *torch.autograd.grad(o, [*qkv, decay], gradient)])
    largest = 2 * 104 + 30 if dtype == torch.float32 else 2 * 746 + 30  # of a sum of decays
    for name, got, want in zip(NAMES, *results, strict=True):
        error = got.double()
        error[:, -30:] -= want  # nothing depends on what was forgotten
        assert error.abs().max() <= 8 * largest * torch.finfo(dtype).eps * want.abs().max(), name
