"""Polynomial attention's kernels against the equation in fp64: odd shapes, both regimes, packed documents, any strides,
all gradients; and every number they hand out starts as NaN."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.polynomial_cases import EVEN, MIXED, NAMES, Cut, attend, tensors
from polynomial_inputs import Shape
from rebased.ops import BASED, REBASED, Coefficients, poly_attention
from rebased.ops.polynomial.api import EPS
from rebased.ops.polynomial.gpu import launch, states
from rebased.ops.polynomial.gpu.features import pair_of
from tolerances import FIRST_TOKEN, assert_close, assert_small_error

pytestmark = [pytest.mark.usefixtures("poisoned_kernels"), pytest.mark.recorded("polynomial")]


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


def test_groups_that_do_not_fill_ask_for_no_block_that_is_not_there(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 24 has six pairs of tiles, and a program takes four: where full tiles need no mask, a seventh pair would be
    read past the end of a row, after a search for it that goes on until 32 bits overflow."""
    cut(64)
    asked = set()

    def spy(tile: Any, SLICES: Any) -> Any:
        asked.add(number := int(tile.handle.data.item()))
        assert number < 6, "no such pair"
        return pair_of(tile, SLICES)

    monkeypatch.setattr(states, "pair_of", spy)
    given, exact = tensors(Shape(B=1, T=128, H=1, K=24, V=16), REBASED, torch.float32)
    assert_small_error(attend(given, REBASED), attend(exact, REBASED), NAMES, torch.float32)
    assert asked == set(range(6))


def test_a_tall_tile_keeps_the_rounding_errors_of_the_first_outputs_only(
    cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept for 64 tokens of each head. Those of the next head follow them, and something else the last."""
    cut(None, 128, 64)
    behind = []

    def guarded(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        flat = torch.full((prod(shape) + 4096,), torch.nan, dtype=dtype or like.dtype)
        behind.append(flat[prod(shape) :])
        return flat[: prod(shape)].view(shape)

    monkeypatch.setattr(launch, "_empty", guarded)
    monkeypatch.setattr(launch, "_like", lambda x: guarded(*x.shape, like=x))
    (q, k, v, *_), _ = tensors(Shape(B=1, T=150, H=2, K=16, V=10), REBASED, torch.float16)
    out = launch.forward(launch.ForwardInputs(q, k, v, None, None, None, *REBASED, 1e-12, False))
    assert out.o_lo is not None
    assert not out.o_lo.isnan().any()
    assert all(each.isnan().all() for each in behind), "written behind the end"
    out.o_lo[:, 1] = torch.nan
    saved = (q, k, v, out.o, out.o_lo, out.inverse, None, None, None)
    dq = launch.backward(launch.BackwardInputs(v, None, None, *saved, None, None, *REBASED, EPS, False)).q
    assert not dq[:, :, 0].isnan().any(), "read from the other head"


@pytest.mark.parametrize("chunk", [None, 64])
def test_one_token(cut: Cut, chunk: int | None) -> None:
    """Its output is its value, whatever q and k are, so their gradients are zero but for rounding."""
    cut(chunk)
    given, exact = tensors(Shape(B=2, T=1, H=2, K=5, V=1), REBASED, torch.float32)
    assert_close(
        attend(given, REBASED), [x.float() for x in attend(exact, REBASED)], NAMES, lengths=(5,), condition=FIRST_TOKEN
    )


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize(
    ("bounds", "dtype"),
    [
        ([0, 1, 1, 70, 150], torch.float32),
        ([0, 0, 64, 65, 150, 150], torch.float32),
        ([0, 1, 1, 70, 150], torch.float16),
        ([0, 9, 150], torch.float16),  # so few that their first tokens are fewer than all
    ],
    ids=str,
)
def test_packed_documents(cut: Cut, chunk: int | None, bounds: list[int], dtype: torch.dtype) -> None:
    """Empty ones first, last and between; one of a single token; ends on a block's edge and off it."""
    cut(chunk)
    given, exact = tensors(Shape(B=1, T=150, H=2, K=5, V=10), BASED, dtype)
    results = [attend(x, BASED, cu_seqlens=torch.tensor(bounds)) for x in (given, exact)]
    assert_small_error(*results, NAMES, dtype)


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


@pytest.mark.parametrize(("chunk", "T"), [(None, 20), (64, 70)])
def test_offsets_that_need_more_than_32_bits(cut: Cut, chunk: int | None, T: int) -> None:
    """Tokens are so far apart that the last one is 2**31 numbers after the first. Only pages that are written take
    memory."""
    cut(chunk)
    shape = Shape(B=1, T=T, H=2, K=5, V=3)
    given, exact = tensors(shape, BASED, torch.float16)
    token = 2**31 // (T - 1) + 1
    far, begin, apart = torch.empty(T * token, dtype=torch.float16), 0, []
    for x in given:
        view = far.as_strided(x.shape, (0, token, x.shape[3], 1), storage_offset=begin)
        apart.append(view.copy_(x.detach()).requires_grad_(x.requires_grad))
        begin += x.shape[2] * x.shape[3]
    assert (T - 1) * apart[0].stride(1) >= 2**31
    assert_small_error(attend(apart, BASED), attend(exact, BASED), NAMES, torch.float16)


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


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("chunk", [None, 64])
def test_a_nan_stays_in_its_row_head_and_document(cut: Cut, chunk: int | None, which: int) -> None:
    """Of earlier tokens it reaches those of its own tile of 64 alone, counted from the document's first token."""
    cut(chunk)
    given, _ = tensors(Shape(B=1, T=80, H=2, K=4, V=3), REBASED, torch.float32)
    q, k, v = (x.detach().clone() for x in given[:3])
    (q, k, v)[which][0, 70, 1, 2] = torch.nan
    o = poly_attention(q, k, v, coefficients=REBASED, backend="triton")
    assert o[0, :, 0].isfinite().all()
    assert o[0, :64].isfinite().all()
    assert not o[0, 70, 1].isfinite().all()
    cu_seqlens = torch.tensor([0, 66, 69, 75, 80])
    packed = poly_attention(q, k, v, coefficients=REBASED, cu_seqlens=cu_seqlens, backend="triton")
    assert packed[0, :69].isfinite().all()
    assert packed[0, 75:].isfinite().all()
