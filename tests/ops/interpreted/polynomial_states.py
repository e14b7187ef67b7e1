"""The kernels of a state in and out: any split of the tokens, one token at a time, gradients of the state; and what
becomes of a state that is kept."""

import pytest
import torch

from ops.polynomial_cases import EVEN, MIXED, STATE_NAMES, Cut, check_packed_extend, extend, past, tensors
from polynomial_inputs import Shape, inputs
from rebased.ops import (
    BASED,
    REBASED,
    Coefficients,
    PolyState,
    init_poly_state,
    poly_attention_extend,
    poly_attention_extend_,
)
from tolerances import KERNEL_ERRORS, assert_small_error, relative_error

pytestmark = [pytest.mark.usefixtures("poisoned_kernels"), pytest.mark.recorded("polynomial")]


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
    ("shape", "bounds", "coefficients"),
    [
        (Shape(B=1, T=140, H=2, K=16, V=10), [0, 1, 3, 70, 140], REBASED),
        (Shape(B=1, T=70, H=1, K=5, V=16), [0, 64, 70], BASED),
        (Shape(B=1, T=2, H=1, K=4, V=3), [0, 1, 2], REBASED),
    ],
    ids=str,
)
def test_packed_documents_follow_states(cut: Cut, shape: Shape, bounds: list[int], coefficients: Coefficients) -> None:
    cut(64)
    check_packed_extend(shape, bounds, coefficients, torch.float32, "triton")


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


@pytest.mark.parametrize(("coefficients", "V"), [(REBASED, 64), (BASED, 130)], ids=str)
def test_decoding_in_place_is_decoding(coefficients: Coefficients, V: int) -> None:
    shape = Shape(B=2, T=1, H=3, K=16, V=V)
    (q, k, v, _), _ = tensors(shape, coefficients, torch.float32)
    start = PolyState(*(x.detach().float() for x in past(shape, coefficients)))
    with torch.no_grad():
        o, after = poly_attention_extend(q, k, v, start, coefficients=coefficients, backend="triton")
        own = PolyState(*(x.clone() for x in start))
        written = poly_attention_extend_(q, k, v, own, coefficients=coefficients, backend="triton")
    assert torch.equal(written, o)
    assert all(torch.equal(a, b) for a, b in zip(own, after, strict=True))
    assert not torch.equal(own.kv, start.kv)


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
