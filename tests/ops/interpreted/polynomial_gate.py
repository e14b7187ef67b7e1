"""The gate in polynomial attention's kernels against the equation in fp64: both regimes, packed documents, states in
and out, decoding, decays from none to all; and every number they hand out starts as NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.polynomial_cases import EVEN, MIXED, Cut, past, tensors
from polynomial_inputs import Shape
from rebased.ops import (
    BASED,
    REBASED,
    Coefficients,
    PolyState,
    poly_attention,
    poly_attention_extend,
    poly_attention_extend_,
)
from rebased.ops.polynomial import gpu
from tolerances import assert_small_error

pytestmark = pytest.mark.usefixtures("poisoned_kernels")
NAMES = ("o", "dq", "dk", "dv", "dg")
STATE_NAMES = ("o", "kv", "z", "dq", "dk", "dv", "dg", "d kv", "d z")


def draw_decay(shape: Shape, strength: float) -> tuple[Tensor, Tensor]:
    """[B, T, H] in fp32 and the same numbers in fp64: from no decay to e^-strength per token, and single tokens that
    forget everything if that is strong."""
    generator = torch.Generator().manual_seed(3)
    numbers = -strength * torch.rand(shape.B, shape.T, shape.H, generator=generator)
    if strength > 10:
        numbers[:, ::7] = 0
        numbers[:, 3::31] = -1e9  # a sum over it loses the digits of all others
    return numbers.requires_grad_(), numbers.detach().double().requires_grad_()


def attend(given: list[Tensor], g: Tensor, coefficients: Coefficients, **options: Any) -> list[Tensor]:
    q, k, v, do = given
    backend = "reference" if q.dtype == torch.float64 else "triton"
    o = poly_attention(q, k, v, coefficients=coefficients, log_decay=g, backend=backend, **options)  # type: ignore[arg-type]
    return [o.detach(), *torch.autograd.grad(o, (q, k, v, g), do)]


CASES: list[tuple[Shape, Coefficients, tuple[int | None, ...], torch.dtype]] = [
    (Shape(B=1, T=37, H=1, K=1, V=5), BASED, (None, 16, 16), torch.float32),
    (Shape(B=2, T=130, H=2, K=16, V=16), REBASED, (None, 64, 32), torch.float32),
    (Shape(B=1, T=150, H=1, K=24, V=64), MIXED, (None, 128, 64), torch.float32),
    (Shape(B=1, T=150, H=1, K=16, V=10), REBASED, (64,), torch.float16),
    (Shape(B=2, T=140, H=1, K=5, V=16), BASED, (64,), torch.float32),
    (Shape(B=1, T=290, H=1, K=16, V=5), REBASED, (128, 64, 32), torch.float32),
    (Shape(B=1, T=290, H=1, K=17, V=10), EVEN, (128, 128, 64), torch.float32),
    (Shape(B=1, T=130, H=1, K=3, V=3), (0.0, 1.0, 0.0), (64, 32, 16), torch.float32),
]
STRENGTHS = (0.0, 0.02, 1.0, 50.0)


def with_strengths() -> list[Any]:
    """Each case with each strength. One of four is run always, all before a release: no code of a kernel depends on a
    strength, and each strength meets two cases."""
    return [
        pytest.param(*case, strength, marks=[] if row % 4 == column else pytest.mark.release)
        for row, case in enumerate(CASES)
        for column, strength in enumerate(STRENGTHS)
    ]


@pytest.mark.parametrize(("shape", "coefficients", "cuts", "dtype", "strength"), with_strengths(), ids=str)
def test_values_and_gradients(
    cut: Cut, shape: Shape, coefficients: Coefficients, cuts: tuple[int, ...], dtype: torch.dtype, strength: float
) -> None:
    cut(*cuts)
    given, exact = tensors(shape, coefficients, dtype)
    g, g_exact = draw_decay(shape, strength)
    assert_small_error(attend(given, g, coefficients), attend(exact, g_exact, coefficients), NAMES, dtype)


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("bounds", [[0, 1, 1, 70, 150], [0, 0, 64, 65, 150, 150]], ids=str)
def test_packed_documents(cut: Cut, chunk: int | None, bounds: list[int]) -> None:
    cut(chunk)
    shape = Shape(B=1, T=150, H=2, K=5, V=10)
    given, exact = tensors(shape, BASED, torch.float32)
    g, g_exact = draw_decay(shape, 0.3)
    cuts = torch.tensor(bounds)
    results = [attend(x, gate, BASED, cu_seqlens=cuts) for x, gate in ((given, g), (exact, g_exact))]
    assert_small_error(*results, NAMES, torch.float32)


def extend(
    given: list[Tensor], g: Tensor, start: PolyState, lengths: list[int], coefficients: Coefficients, ends: slice
) -> list[Tensor]:
    """o, the state after, and the gradients of a loss of both (or of one), in pieces that follow a past."""
    q, k, v, do = given
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    backend = "reference" if wide == torch.float64 else "triton"
    before = state = PolyState(*(x.to(wide).requires_grad_() for x in start))
    outputs = []
    for piece in zip(*(x.split(lengths, dim=1) for x in (q, k, v, g)), strict=True):
        o, state = poly_attention_extend(
            *piece[:3],
            state,
            coefficients=coefficients,
            log_decay=piece[3],
            backend=backend,  # type: ignore[arg-type]
        )
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    generator = torch.Generator().manual_seed(2)
    d_state = [torch.randn(x.shape, generator=generator).to(wide) for x in state]
    gradients = torch.autograd.grad(
        (o, *state)[ends], (q, k, v, g, *before), (do, *d_state)[ends], materialize_grads=True
    )
    return [o.detach(), *(x.detach() for x in state), *gradients]


@pytest.mark.parametrize(
    ("shape", "lengths", "coefficients", "strength", "ends"),
    [
        (Shape(B=2, T=150, H=1, K=16, V=10), [150], BASED, 0.1, slice(None)),
        (Shape(B=1, T=150, H=2, K=16, V=5), [64, 1, 85], REBASED, 0.02, slice(None)),
        (Shape(B=1, T=1, H=2, K=1, V=24), [1], BASED, 0.1, slice(None)),  # misaligned on a GPU, once (docs/kernels.md)
        (Shape(B=1, T=140, H=1, K=17, V=16), [137, 3], EVEN, 2.0, slice(0, 1)),
        (Shape(B=1, T=70, H=1, K=5, V=130), [70], MIXED, 0.1, slice(None)),  # more values than a kernel takes
    ],
    ids=str,
)
def test_states_in_and_out(
    cut: Cut, shape: Shape, lengths: list[int], coefficients: Coefficients, strength: float, ends: slice
) -> None:
    cut(64)
    given, exact = tensors(shape, coefficients, torch.float32)
    start = past(shape, coefficients)
    g, g_exact = draw_decay(shape, strength)
    got = extend(given, g, start, lengths, coefficients, ends)
    want = extend(exact, g_exact, start, [shape.T], coefficients, ends)
    assert_small_error(got, want, STATE_NAMES, torch.float32)


@pytest.mark.parametrize(
    ("coefficients", "V", "dtype"), [(REBASED, 64, torch.float32), (BASED, 130, torch.float16)], ids=str
)
def test_decoding(coefficients: Coefficients, V: int, dtype: torch.dtype) -> None:
    """Token by token without gradients, with a new state and in place."""
    shape = Shape(B=2, T=3, H=2, K=16, V=V)
    given, exact = tensors(shape, coefficients, dtype)
    g, g_exact = draw_decay(shape, 1.0)
    start = past(shape, coefficients)
    state, own = (PolyState(*(x.float().clone() for x in start)) for _ in range(2))
    outputs = []
    with torch.no_grad():
        want, after = poly_attention_extend(
            *exact[:3], start, coefficients=coefficients, log_decay=g_exact, backend="reference"
        )
        for *piece, decay in zip(*(x.split(1, dim=1) for x in (*given[:3], g)), strict=True):
            options: Any = {"coefficients": coefficients, "log_decay": decay, "backend": "triton"}
            written = poly_attention_extend_(*piece, own, **options)
            o, state = poly_attention_extend(*piece, state, **options)
            assert torch.equal(written, o)
            outputs.append(o)
    assert all(torch.equal(a, b) for a, b in zip(own, state, strict=True))
    assert_small_error([torch.cat(outputs, dim=1), *state], [want, *after], ("o", "kv", "z"), dtype)


@pytest.mark.parametrize("chunk", [None, 64])
def test_a_gate_that_is_nan_is_seen_from_its_token_on(
    cut: Cut, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(chunk)
    shape = Shape(B=1, T=200, H=1, K=4, V=3)
    (q, k, v, _), _ = tensors(shape, REBASED, torch.float32)
    g = draw_decay(shape, 0.1)[0].detach()
    g[:, 70] = torch.nan
    monkeypatch.setenv("REBASED_SELF_CHECK", "off")
    with torch.no_grad():  # on a GPU no one checks the numbers of a gate
        o = gpu.attend(q, k, v, coefficients=REBASED, scale=0.5, eps=1e-12, log_decay=g)
    assert o[:, :64].isfinite().all()
    assert o[:, 70:].isnan().all()
