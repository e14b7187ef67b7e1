"""A NaN or an infinity in q, k or v reaches no earlier token, no other head and no other row."""

import math

import pytest
import torch
from torch import Tensor

from polynomial_inputs import Shape, inputs
from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
    poly_attention_extend_,
    poly_attention_map,
)
from rebased.ops.polynomial.chunk_plan import find_cuts, spans
from tolerances import assert_near

AT = {"reference": (20, 11), "recurrent": (20, 11), "chunked": (300, 200)}  # T, and the token that is not finite
SHORT = (100, 40)  # of the chunked path as one chunk of one tile


def poisoned(tensors: tuple[Tensor, ...], which: int, at: int, value: float) -> tuple[Tensor, ...]:
    """The tensors with one number of row 0, head 1 replaced."""
    changed = [x.detach().clone() for x in tensors]
    changed[which][0, at, 1, 2] = value
    return tuple(changed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize(
    ("backend", "size"),
    [("reference", AT["reference"]), ("recurrent", AT["recurrent"]), ("chunked", AT["chunked"]), ("chunked", SHORT)],
)
@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=["rebased", "based"])
def test_earlier_tokens_stay_as_they_are(
    backend: Backend, size: tuple[int, int], which: int, value: float, coefficients: Coefficients
) -> None:
    T, at = size
    given = tuple(inputs(Shape(B=2, T=T, H=2, K=4, V=3))[:3])
    changed = poisoned(given, which, at, value)
    clean = poly_attention(*given, coefficients=coefficients, backend=backend)
    o = poly_attention(*changed, coefficients=coefficients, backend=backend)
    extended, _ = poly_attention_extend(*changed, None, coefficients=coefficients, backend=backend)
    for found in (o, extended):
        assert not found[0, at, 1].isfinite().all()
        assert_near(found[0, :at], clean[0, :at], 4, T)
        assert_near(found[0, :, 0], clean[0, :, 0], 4, T)
        assert_near(found[1], clean[1], 4, T)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_gradients_of_earlier_queries_stay_finite(which: int) -> None:
    T, at = AT["chunked"]
    q, k, v = poisoned(tuple(inputs(Shape(B=2, T=T, H=2, K=4, V=3))[:3]), which, at, math.nan)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = poly_attention(*leaves, coefficients=REBASED, backend="chunked")
    gradients = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert gradients[0][0, :at].isfinite().all()
    for gradient in gradients:
        assert gradient[1].isfinite().all()
        assert gradient[0, :, 0].isfinite().all()


def test_a_later_key_gets_no_gradient_from_an_earlier_query_that_is_not_finite() -> None:
    T, at = AT["chunked"]
    q, k, v = poisoned(tuple(inputs(Shape(B=1, T=T, H=2, K=4, V=3))[:3]), 0, at, math.nan)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = poly_attention(*leaves, coefficients=REBASED, backend="chunked")
    _, dk, dv = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert dk[0, at + 1 :].isfinite().all()
    assert dv[0, at + 1 :].isfinite().all()


def test_finite_inputs_are_computed_as_without_cuts() -> None:
    u = torch.full((3, 300, 2), 3e38)  # its sum overflows, though every number is finite
    assert find_cuts(u) == set()
    assert spans(0, 300, 128) == [(0, 128), (128, 256), (256, 300)]
    u[0, 130, 1] = u[0, 140, 1] = u[2, 7, 0] = math.nan
    assert find_cuts(u) == {7, 130}
    assert find_cuts(u, reverse=True) == {8, 141}
    assert spans(0, 300, 128, [7, 130]) == [(0, 7), (7, 128), (128, 130), (130, 256), (256, 300)]


def test_scores_beyond_the_range_of_fp32_are_not_finite() -> None:
    """As the docstring says: squares of scores above 1.8e19 overflow. In fp64 there is room."""
    q, k, v = (1e10 * x.detach() for x in inputs(Shape(B=1, T=5, H=1, K=4, V=3))[:3])
    assert poly_attention(q, k, v, coefficients=REBASED).isfinite().all()
    assert not poly_attention(q.float(), k.float(), v.float(), coefficients=REBASED).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_sum_of_similarities_beyond_fp32_is_not_zero(backend: Backend, gated: bool) -> None:
    """Values of 0.01 have a finite sum where the similarities have none: o is NaN, not 0.01 / inf."""
    q = torch.full((1, 5, 1, 4), 2.65e9)  # similarities of 2e38: one is finite, and the sum of two is not
    v = torch.full((1, 5, 1, 2), 0.01, requires_grad=True)
    gate = torch.zeros(1, 5, 1) if gated else None
    o = poly_attention(q, q, v, coefficients=REBASED, log_decay=gate, backend=backend)
    assert_near(o[:, 0], v[:, 0], 4)
    assert o[:, 1:].isnan().all()
    state = init_poly_state(1, 1, 4, 2, REBASED)
    after, state = poly_attention_extend(q, q, v, state, coefficients=REBASED, log_decay=gate, backend=backend)
    assert after[:, 1:].isnan().all()
    step = poly_attention_extend_(*(x[:, -1:].detach() for x in (q, q, v)), state, coefficients=REBASED)
    assert step.isnan().all()
    assert poly_attention_map(q, q, coefficients=REBASED, log_decay=gate)[0, 0, 1:, 0].isnan().all()
