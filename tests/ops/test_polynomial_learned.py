"""Coefficients in a tensor: values and gradients of every path against the equation in fp64."""

import logging

import pytest
import torch
from torch import Tensor

from polynomial_inputs import Shape, inputs
from rebased.ops import (
    COMPLETED,
    Backend,
    PolyState,
    complete_square,
    feature_count,
    init_poly_state,
    pair_products,
    poly_attention,
    poly_attention_extend,
    poly_attention_map,
    poly_state,
)
from rebased.ops.polynomial import api, chunk_plan
from tolerances import FIRST_TOKEN, KERNEL_ERRORS, assert_near, assert_small_error

SHAPE = Shape(B=2, T=37, H=2, K=3, V=4)
PLAIN: list[Backend] = ["reference", "recurrent", "chunked", "auto"]
SUMS = (SHAPE.K, SHAPE.T, feature_count(SHAPE.K, (1.0, 1.0, 1.0)), SHAPE.B * SHAPE.H * SHAPE.T * (SHAPE.V + 1))


def coefficients(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([0.7, 0.4, 1.3], dtype=dtype).requires_grad_()


def by_hand(q: Tensor, k: Tensor, v: Tensor, c: Tensor, eps: float | Tensor) -> Tensor:
    """The equation, one query after the other."""
    outputs = []
    for i in range(q.shape[1]):
        s = torch.einsum("bhk,bjhk->bhj", q[:, i], k[:, : i + 1]) * q.shape[3] ** -0.5
        sim = c[0] + c[1] * s + c[2] * s**2
        outputs.append(torch.einsum("bhj,bjhv->bhv", sim, v[:, : i + 1]) / (sim.sum(-1, keepdim=True) + eps))
    return torch.stack(outputs, dim=1)


@pytest.fixture(params=[False, True], ids=["one chunk", "many chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of all tokens, or of eight with states between them."""
    if request.param:
        monkeypatch.setattr(chunk_plan, "_lengths", lambda *_, **__: ((8, 4), 1.0))


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("eps", [1e-12, 0.3])
@pytest.mark.parametrize("backend", PLAIN)
def test_values_and_gradients(backend: Backend, eps: float) -> None:
    q, k, v, do = inputs(SHAPE)
    c, given = coefficients(), coefficients()
    expected = by_hand(q, k, v, c, eps)
    wanted = torch.autograd.grad(expected, (q, k, v, c), do)
    o = poly_attention(q, k, v, coefficients=given, eps=eps, backend=backend)
    found = torch.autograd.grad(o, (q, k, v, given), do)
    for name, got, want in zip(("o", "dq", "dk", "dv", "dc"), (o, *found), (expected, *wanted), strict=True):
        assert_near(got, want, *SUMS, condition=FIRST_TOKEN, name=name)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("backend", PLAIN)
def test_a_state_carries_gradients_of_the_coefficients(backend: Backend) -> None:
    q, k, v, do = inputs(SHAPE)
    c, given = coefficients(), coefficients()
    wanted = torch.autograd.grad(by_hand(q, k, v, c, 1e-12), (q, k, v, c), do)
    state: PolyState | None = None
    outputs = []
    for piece in zip(*(x.split([20, 1, 16], dim=1) for x in (q, k, v)), strict=True):
        o, state = poly_attention_extend(*piece, state, coefficients=given, backend=backend)
        outputs.append(o)
    found = torch.autograd.grad(torch.cat(outputs, dim=1), (q, k, v, given), do)
    for name, got, want in zip(("dq", "dk", "dv", "dc"), found, wanted, strict=True):
        assert_near(got, want, *SUMS, condition=FIRST_TOKEN, name=name)
    assert state is not None
    whole = poly_state(k, v, coefficients=given)
    for got, want in zip(state, whole, strict=True):
        assert_near(got, want, *SUMS, name="state")


def test_fp32_and_equal_numbers() -> None:
    """In fp32 as with plain numbers, and a coefficient of zero keeps its features, so that states fit."""
    q, k, v, do = inputs(SHAPE, dtype=torch.float32)
    numbers = (0.7, 0.0, 1.3)
    c = torch.tensor(numbers).requires_grad_()
    o = poly_attention(q, k, v, coefficients=c)
    assert_near(o, poly_attention(q, k, v, coefficients=numbers), *SUMS, condition=FIRST_TOKEN)
    (gradient,) = torch.autograd.grad(o, c, do)
    wide = [x.detach().double() for x in (q, k, v)]
    exact = torch.tensor(numbers, dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad(by_hand(*wide, exact, 1e-12), exact, do.double())
    assert_near(gradient, wanted, *SUMS, condition=FIRST_TOKEN)
    assert init_poly_state(1, 1, 3, 4, c).z.shape == (1, 1, 1 + 3 + 6)
    A = poly_attention_map(q, k, coefficients=c)
    assert_near(torch.einsum("bhij,bjhv->bihv", A, v), o, *SUMS, condition=FIRST_TOKEN)


@pytest.mark.parametrize("eps", [1e-12, 0.3])
def test_completed_square(eps: float) -> None:
    """The same attention, with numbers as coefficients: values, and gradients of the learnt ones too."""
    q, k, v, do = inputs(SHAPE)
    c, given = coefficients(), coefficients()
    expected = by_hand(q, k, v, c, eps * (c[0] - c[1] ** 2 / (4 * c[2])))
    wanted = torch.autograd.grad(expected, (q, k, v, c), do)
    wider = complete_square(q, k, given, SHAPE.K**-0.5)
    assert [x.shape[-1] for x in wider] == [8, 8]
    o = poly_attention(*wider, v, coefficients=COMPLETED, scale=1.0, eps=eps, backend="reference")
    found = torch.autograd.grad(o, (q, k, v, given), do)
    for name, got, want in zip(("o", "dq", "dk", "dv", "dc"), (o, *found), (expected, *wanted), strict=True):
        assert_near(got, want, *SUMS, condition=FIRST_TOKEN, name=name)


def test_half_precision_rounds_no_coefficient_of_a_completed_square() -> None:
    """The constant of the square has two columns, and with eight bits each they hold it to sixteen."""
    q, k, _, _ = inputs(SHAPE, dtype=torch.bfloat16)
    wider, ones = complete_square(torch.zeros_like(q), k, coefficients(), 1.0)
    shift = 0.4 / (2 * (1.3 * (0.7 - 0.4**2 / 5.2)) ** 0.5)
    got = (wider.double() * ones.double()).sum(-1)
    assert torch.all((got / shift - 1).abs() < 2.0**-16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [100, 2500])
def test_completed_square_on_a_gpu(T: int, dtype: torch.dtype) -> None:
    """Both regimes of the kernels against the equation in fp64."""
    shape = Shape(B=2, T=T, H=3, K=16, V=24)
    given = [x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs(shape, dtype=dtype)]
    results = []
    for wide in (False, True):
        q, k, v, do = (x.detach().double().requires_grad_() if wide else x for x in given)
        c = torch.tensor(
            [0.7, 0.4, 1.3], device="cuda", dtype=torch.float64 if wide else torch.float32
        ).requires_grad_()
        qs, ks = (q, k) if wide else complete_square(q, k, c, 0.25)
        options = {"coefficients": c, "backend": "reference"} if wide else {"coefficients": COMPLETED, "scale": 1.0}
        o = poly_attention(qs, ks, v, **options)  # type: ignore[arg-type]
        results.append([o, *torch.autograd.grad(o, (q, k, v, c), do)])
    (*got, dc), (*want, exact) = results
    assert_small_error(got, want, ("o", "dq", "dk", "dv"), dtype)
    # Coefficients act on a query by a factor and a shift. An error of dq, at most this part of its norm, is multiplied
    # by the query, and by what a coefficient changes of either, relative to it: at most 1.1 / c1 here.
    allowed = KERNEL_ERRORS[dtype] * given[0].norm() * want[1].norm() * 1.1 / 0.4
    assert (dc - exact).abs().max() <= allowed


def test_documents_and_no_tokens() -> None:
    q, k, v, _ = inputs(SHAPE._replace(B=1))
    c = coefficients()
    packed = poly_attention(q, k, v, coefficients=c, cu_seqlens=torch.tensor([0, 10, 37]))
    alone = poly_attention(q[:, 10:], k[:, 10:], v[:, 10:], coefficients=c)
    assert_near(packed[:, 10:], alone, *SUMS, condition=FIRST_TOKEN)
    assert poly_attention(q[:, :0], k[:, :0], v[:, :0], coefficients=c).shape == (1, 0, 2, 4)


def test_what_is_refused_and_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, _ = inputs(SHAPE)
    with pytest.raises(ValueError, match=r"shape .3., of a float dtype; they are .2., torch.float64"):
        poly_attention(q, k, v, coefficients=coefficients()[:2])
    with pytest.raises(ValueError, match="coefficients in a tensor have no kernel; use backend='auto' or 'chunked'"):
        poly_attention(q, k, v, coefficients=coefficients(), backend="triton")
    with pytest.raises(ValueError, match="coefficients are on meta and q is on cpu"):
        poly_attention(q, k, v, coefficients=torch.ones(3, device="meta"))
    monkeypatch.setattr(api, "choose_path", lambda backend, device: "triton")  # as on a GPU
    api._note_learned_coefficients.cache_clear()
    with caplog.at_level(logging.WARNING, logger="rebased"):
        for _ in range(2):
            poly_attention(q, k, v, coefficients=coefficients())
    assert [record.message for record in caplog.records if "no GPU kernel" in record.message] == [
        "coefficients in a tensor have no GPU kernel: polynomial attention takes the slower chunked path; if all "
        "similarities are positive, rebased.ops.complete_square is a way around it"
    ]


@pytest.mark.release
def test_compiled_code_falls_back_to_the_same_gradients() -> None:
    q, k, v, do = inputs(SHAPE)
    c = coefficients()

    def attend(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return 2 * poly_attention(q, k, v, coefficients=c)

    wanted = torch.autograd.grad(attend(q, k, v, c), (q, k, v, c), do)
    found = torch.autograd.grad(torch.compile(attend, backend="aot_eager")(q, k, v, c), (q, k, v, c), do)
    for got, want in zip(found, wanted, strict=True):
        assert_near(got, want, *SUMS, condition=FIRST_TOKEN)


def test_pair_products_are_the_square_of_the_product() -> None:
    q, k, _, _ = inputs(SHAPE)
    square = (q * k).sum(-1) ** 2
    assert pair_products(q).shape[-1] == 6
    assert_near((pair_products(q) * pair_products(k)).sum(-1), square, *SUMS)
