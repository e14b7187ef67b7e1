"""Polynomial attention's kernels against the equation in fp64: odd shapes, both regimes, states in and out, packed
documents, all gradients; and every number they hand out starts as NaN."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from benchmarks.cases import Shape, inputs
from torch import Tensor

from rebased.ops import (
    BASED,
    REBASED,
    Coefficients,
    PolyState,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
)
from rebased.ops.backend import triton_interpreted
from rebased.ops.polynomial.gpu import launch, operators
from rebased.ops.polynomial.gpu.plan import Plan, Tile
from tolerances import KERNEL_ERRORS, assert_close, assert_small_error, relative_error

MIXED: Coefficients = (0.3, -0.2, 0.7)
EVEN: Coefficients = (1.0, 0.0, 0.5)
NAMES = ("o", "dq", "dk", "dv")
STATE_NAMES = ("o", "kv", "z", "dq", "dk", "dv", "d kv", "d z")
Cut = Callable[..., None]


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no kernel wrote is seen."""
    assert triton_interpreted()

    def nan(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, float("nan"), device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(launch, "_empty", nan)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Sets chunk length (None: quadratic) and tiles. The interpreter is fast with few, large blocks."""

    def fix(chunk: int | None, rows: int = 64, step: int = 64) -> None:
        tile = Tile(rows, step, warps=4, stages=1)

        def plan(*_: int, has_state: bool, **__: bool) -> Plan:
            return Plan(chunk or (rows if has_state else None), tile, tile, tile, tile)

        monkeypatch.setattr(launch, "make_plan", plan)
        monkeypatch.setitem(launch.TOTALS, "SPAN", 1024)

    return fix


def tensors(shape: Shape, coefficients: Coefficients, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v, do in this dtype, and the same numbers in fp64."""
    given = list(inputs(shape, coefficients=coefficients, dtype=dtype))
    return given, [x.detach().double().requires_grad_(x.requires_grad) for x in given]


def attend(given: list[Tensor], coefficients: Coefficients, **options: Any) -> list[Tensor]:
    q, k, v, do = given
    backend = "reference" if q.dtype == torch.float64 else "triton"
    o = poly_attention(q, k, v, coefficients=coefficients, backend=backend, **options)  # type: ignore[arg-type]
    assert o.dtype == q.dtype
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


@pytest.mark.parametrize(
    ("shape", "coefficients", "cuts", "dtype"),
    [
        (Shape(B=1, T=3, H=1, K=1, V=5), BASED, (None, 16, 16), torch.float32),
        (Shape(B=2, T=65, H=1, K=17, V=16), MIXED, (None,), torch.float32),
        (Shape(B=1, T=150, H=1, K=24, V=64), EVEN, (None, 128, 64), torch.float32),
        (Shape(B=1, T=150, H=1, K=16, V=10), REBASED, (None, 64, 32), torch.float16),
        (Shape(B=1, T=3, H=2, K=5, V=1), REBASED, (64,), torch.float32),
        (Shape(B=2, T=65, H=1, K=16, V=5), BASED, (64,), torch.float32),
        (Shape(B=1, T=150, H=1, K=16, V=64), REBASED, (64,), torch.float32),
        (Shape(B=1, T=150, H=1, K=16, V=10), EVEN, (128,), torch.float32),
        (Shape(B=1, T=150, H=1, K=5, V=16), MIXED, (128, 64, 32), torch.float32),
        (Shape(B=1, T=150, H=1, K=1, V=1), EVEN, (128, 128, 128), torch.float32),
        (Shape(B=1, T=150, H=1, K=17, V=10), BASED, (128, 128, 128), torch.float32),
        (Shape(B=1, T=150, H=1, K=24, V=5), REBASED, (128, 128, 128), torch.float32),
        (Shape(B=1, T=150, H=1, K=16, V=10), BASED, (64,), torch.float16),
        (Shape(B=1, T=70, H=1, K=16, V=10), (0.0, 1.0, 0.0), (64,), torch.float32),
        (Shape(B=1, T=70, H=1, K=3, V=3), (1.0, 1.0, 0.0), (64,), torch.float32),
    ],
    ids=str,
)
def test_values_and_gradients(
    cut: Cut, shape: Shape, coefficients: Coefficients, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    cut(*cuts)
    given, exact = tensors(shape, coefficients, dtype)
    assert_small_error(attend(given, coefficients), attend(exact, coefficients), NAMES, dtype)


@pytest.mark.parametrize("chunk", [None, 64])
def test_one_token(cut: Cut, chunk: int | None) -> None:
    """Its output is its value, whatever q and k are, so their gradients are zero but for rounding."""
    cut(chunk)
    given, exact = tensors(Shape(B=2, T=1, H=2, K=5, V=1), REBASED, torch.float32)
    assert_close(attend(given, REBASED), [x.float() for x in attend(exact, REBASED)], NAMES)


def extend(
    given: list[Tensor], start: PolyState, lengths: list[int], coefficients: Coefficients, wanted: slice = slice(None)
) -> list[Tensor]:
    """o, the state after, and the gradients of a loss of both, in pieces of these lengths that follow a past."""
    q, k, v, do = given
    backend = "reference" if q.dtype == torch.float64 else "triton"
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    before = state = PolyState(*(x.to(wide).requires_grad_() for x in start))
    outputs = []
    for piece in zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True):
        o, state = poly_attention_extend(*piece, state, coefficients=coefficients, backend=backend)  # type: ignore[arg-type]
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    generator = torch.Generator().manual_seed(2)
    d_state = [torch.randn(x.shape, generator=generator).to(wide) for x in state]
    ends, d_ends = (o, *state)[wanted], (do, *d_state)[wanted]
    gradients = torch.autograd.grad(ends, (q, k, v, *before), d_ends, materialize_grads=True)
    return [o.detach(), *(x.detach() for x in state), *gradients]


def past(shape: Shape, coefficients: Coefficients) -> PolyState:
    """The state after nine tokens, in fp64."""
    q, k, v, _ = inputs(shape._replace(T=9), coefficients=coefficients, seed=1)
    state = init_poly_state(shape.B, shape.H, shape.K, shape.V, coefficients, dtype=torch.float64)
    _, state = poly_attention_extend(q, k, v, state, coefficients=coefficients, backend="reference")
    return PolyState(*(x.detach() for x in state))


@pytest.mark.parametrize(
    ("shape", "lengths", "coefficients", "chunk", "dtype"),
    [
        (Shape(B=2, T=65, H=1, K=16, V=10), [65], BASED, 64, torch.float32),
        (Shape(B=1, T=65, H=2, K=16, V=5), [64, 1], REBASED, 64, torch.float32),
        (Shape(B=1, T=70, H=1, K=5, V=64), [1, 66, 3], MIXED, 64, torch.float32),
        (Shape(B=2, T=3, H=1, K=16, V=16), [1, 1, 1], REBASED, 64, torch.float16),
        (Shape(B=1, T=140, H=1, K=17, V=5), [137, 3], EVEN, 128, torch.float32),
        (Shape(B=1, T=2, H=1, K=24, V=5), [1, 1], BASED, 64, torch.float32),
        (Shape(B=1, T=3, H=1, K=16, V=130), [2, 1], BASED, 64, torch.float32),  # more values than a kernel takes
    ],
    ids=str,
)
def test_extend_at_any_split(
    cut: Cut, shape: Shape, lengths: list[int], coefficients: Coefficients, chunk: int, dtype: torch.dtype
) -> None:
    cut(chunk)
    given, exact = tensors(shape, coefficients, dtype)
    start = past(shape, coefficients)
    got, want = extend(given, start, lengths, coefficients), extend(exact, start, [shape.T], coefficients)
    assert (got[1].dtype, got[2].dtype) == (torch.float32, torch.float32)
    assert_small_error(got, want, STATE_NAMES, dtype)


@pytest.mark.parametrize(
    ("shape", "coefficients", "dtype"),
    [
        (Shape(B=2, T=3, H=3, K=16, V=64), REBASED, torch.float32),
        (Shape(B=1, T=2, H=2, K=17, V=5), BASED, torch.float16),
        (Shape(B=2, T=2, H=1, K=1, V=1), EVEN, torch.float32),
        (Shape(B=1, T=2, H=2, K=24, V=130), MIXED, torch.float32),
        (Shape(B=1, T=2, H=1, K=5, V=10), (0.0, 1.0, 0.0), torch.float32),
    ],
    ids=str,
)
def test_decoding(shape: Shape, coefficients: Coefficients, dtype: torch.dtype) -> None:
    """Token by token without gradients: a kernel of its own, here fed slices of a fused projection."""
    given, exact = tensors(shape, coefficients, dtype)
    q, k, v = torch.cat([x.detach() for x in given[:3]], dim=-1).split([shape.K, shape.K, shape.V], dim=-1)
    results = []
    for tokens, backend, wide in (((q, k, v), "triton", torch.float32), (exact[:3], "reference", torch.float64)):
        state = PolyState(*(x.to(wide) for x in past(shape, coefficients)))
        outputs = []
        with torch.no_grad():
            for piece in zip(*(x.split(1, dim=1) for x in tokens), strict=True):
                o, state = poly_attention_extend(*piece, state, coefficients=coefficients, backend=backend)  # type: ignore[arg-type]
                outputs.append(o)
        results.append([torch.cat(outputs, dim=1), *state])
    assert_small_error(*results, ("o", "kv", "z"), dtype)


def test_decoding_leaves_the_state_it_was_given_alone() -> None:
    """Beams share a state; and any strides will do."""
    shape = Shape(B=2, T=1, H=2, K=4, V=3)
    (q, k, v, _), _ = tensors(shape, BASED, torch.float32)
    start = PolyState(*(x.float() for x in past(shape, BASED)))
    strided = PolyState(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in start))
    copies = [x.clone() for x in start]
    with torch.no_grad():
        results = [poly_attention_extend(q, k, v, x, coefficients=BASED, backend="triton") for x in (start, strided)]
    assert all(torch.equal(a, b) for a, b in zip(start, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*((o, *state) for o, state in results), strict=True))


def test_a_state_holds_nothing_but_itself(cut: Cut) -> None:
    """It may be kept for long, and for many sequences: no padding, and no larger tensor behind a view."""
    cut(64)
    for T in (1, 3):
        (q, k, v, _), _ = tensors(Shape(B=1, T=T, H=2, K=4, V=3), BASED, torch.float32)
        with torch.no_grad():
            _, state = poly_attention_extend(
                q, k, v, init_poly_state(1, 2, 4, 3, BASED), coefficients=BASED, backend="triton"
            )
        assert all(x.is_contiguous() and x.untyped_storage().nbytes() == 4 * x.numel() for x in state)


@pytest.mark.parametrize("wanted", [slice(0, 1), slice(1, 2), slice(2, 3)], ids=["o", "kv", "z"])
def test_a_loss_of_one_output_alone(cut: Cut, wanted: slice) -> None:
    cut(64)
    shape = Shape(B=1, T=65, H=1, K=5, V=3)
    given, exact = tensors(shape, BASED, torch.float32)
    results = [extend(x, past(shape, BASED), [65], BASED, wanted) for x in (given, exact)]
    for name, a, b in zip(STATE_NAMES[3:], *(x[3:] for x in results), strict=True):
        if b.any():
            assert relative_error(a, b) < KERNEL_ERRORS[torch.float32], name
        else:
            assert not a.any(), name


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("bounds", [[0, 1, 1, 70, 150], [0, 0, 64, 65, 150, 150]], ids=str)
def test_packed_documents(cut: Cut, chunk: int | None, bounds: list[int]) -> None:
    """Empty ones first, last and between; one of a single token; ends on a block's edge and off it."""
    cut(chunk)
    given, exact = tensors(Shape(B=1, T=150, H=2, K=5, V=10), BASED, torch.float32)
    results = [attend(x, BASED, cu_seqlens=torch.tensor(bounds)) for x in (given, exact)]
    assert_small_error(*results, NAMES, torch.float32)


def as_split(views: Sequence[Tensor]) -> list[Tensor]:
    return list(views)


def heads_first(views: Sequence[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]


def one_key_for_all_heads(views: Sequence[Tensor]) -> list[Tensor]:
    q, k, v = views
    return [q, k[:, :, :1].expand(k.shape), v]


@pytest.mark.parametrize(
    ("layout", "chunk", "T"),
    [(as_split, None, 20), (heads_first, None, 20), (one_key_for_all_heads, None, 20), (as_split, 64, 70)],
)
def test_strided_inputs_are_read_where_they_lie(
    cut: Cut,
    layout: Callable[[Sequence[Tensor]], list[Tensor]],
    chunk: int | None,
    T: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views of one fused projection reach the kernels as they are, without copies."""
    cut(chunk)
    fused = torch.randn(2, T, 2, 5 + 5 + 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    q, k, v = layout(fused.split([5, 5, 3], dim=-1))
    kernel, seen = launch.forward_kernel, []

    class Spy:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                seen.extend(x.data_ptr() for x in args[:3])
                return kernel[grid](*args, **kwargs)

            return run

    monkeypatch.setattr(launch, "forward_kernel", Spy())
    o = poly_attention(q, k, v, coefficients=BASED, backend="triton")
    assert seen == [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    want = poly_attention(q.double(), k.double(), v.double(), coefficients=BASED, backend="reference")
    (got_grad,) = torch.autograd.grad(o.sum(), fused, retain_graph=True)  # a sum's gradient has stride 0
    (want_grad,) = torch.autograd.grad(want.sum(), fused)
    assert_small_error((o, got_grad), (want, want_grad), ("o", "d fused"), torch.float32)


def test_columns_that_are_not_neighbours(cut: Cut) -> None:
    cut(None)
    given, exact = tensors(Shape(B=1, T=20, H=2, K=4, V=3), REBASED, torch.float32)
    apart = [x.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_(x.requires_grad) for x in given]
    assert all(x.stride(-1) != 1 for x in apart)
    assert_small_error(attend(apart, REBASED), attend(exact, REBASED), NAMES, torch.float32)


@pytest.mark.parametrize("chunk", [None, 64])
def test_more_values_than_a_kernel_takes(cut: Cut, chunk: int | None) -> None:
    cut(chunk)
    given, exact = tensors(Shape(B=1, T=70, H=1, K=5, V=261), REBASED, torch.float32)
    assert_small_error(attend(given, REBASED), attend(exact, REBASED), NAMES, torch.float32)


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_zeros_give_zeros(cut: Cut, chunk: int | None, dtype: torch.dtype) -> None:
    cut(chunk)
    given, _ = tensors(Shape(B=1, T=70, H=1, K=4, V=3), REBASED, dtype)
    given[1] = torch.zeros_like(given[1], requires_grad=True)
    assert not any(x.any() for x in attend(given, REBASED))


@pytest.mark.parametrize("scale", [1e-4, 100.0])
@pytest.mark.parametrize("chunk", [None, 64])
def test_no_nan_at_any_scale(cut: Cut, chunk: int | None, scale: float) -> None:
    cut(chunk)
    given, _ = tensors(Shape(B=1, T=70, H=1, K=16, V=3), REBASED, torch.float16)
    scaled = [(scale * x).detach().requires_grad_(x.requires_grad) for x in given]
    assert not any(x.isnan().any() for x in attend(scaled, REBASED))


def test_inference_mode_leaves_nothing_behind(cut: Cut) -> None:
    """What is cached in inference mode must serve a later training step."""
    cut(64)
    shape = Shape(B=1, T=3, H=1, K=6, V=3)  # a width of its own, so that nothing is cached yet
    (q, k, v, _), _ = tensors(shape, BASED, torch.float32)
    state = init_poly_state(1, 1, 6, 3, BASED)
    with torch.inference_mode():
        poly_attention_extend(q, k, v, state, coefficients=BASED, backend="triton")
    state.kv.requires_grad_()
    o, after = poly_attention_extend(q, k, v, state, coefficients=BASED, backend="triton")
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum() + after.kv.sum(), (q, k, v, state.kv)))


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


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (init_poly_state(1, 2, 4, 5, REBASED), "another shape"),
        (init_poly_state(1, 2, 4, 3, BASED), r"F = 10 for K = 4"),
        (init_poly_state(1, 2, 4, 3, REBASED, device="meta"), "state is on meta and the inputs are on cpu"),
    ],
)
def test_a_state_of_another_kind(state: PolyState, message: str) -> None:
    q, k, v, _ = inputs(Shape(B=1, T=3, H=2, K=4, V=3), dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        poly_attention_extend(q, k, v, state, coefficients=REBASED, backend="triton")
