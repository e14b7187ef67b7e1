"""Polynomial attention at some positions: what all of it gives there, in plain torch and on a GPU."""

import pytest
import torch
from torch import Tensor

from ops.polynomial_cases import NAMES, at, attend_at, some_positions, tensors
from polynomial_inputs import Shape
from rebased.mixers import mixer_class
from rebased.ops import BASED, REBASED, Coefficients, poly_at_pays, poly_attention, poly_attention_at
from rebased.ops.polynomial.gpu.plan import selection_pays
from tolerances import assert_small_error


@pytest.mark.parametrize("coefficients", [REBASED, BASED])
def test_the_equation(coefficients: Coefficients) -> None:
    _, (q, k, v, do) = tensors(Shape(B=2, T=9, H=2, K=3, V=4), coefficients, torch.float32)
    positions = some_positions(2, 5, 9)
    o = poly_attention_at(at(q, positions), k, v, positions, coefficients=coefficients)
    expected = at(poly_attention(q, k, v, coefficients=coefficients, backend="reference"), positions)
    torch.testing.assert_close(o, expected)
    gradients = [torch.autograd.grad(y, (q, k, v), at(do, positions), retain_graph=True) for y in (o, expected)]
    torch.testing.assert_close(*gradients)


def test_what_is_not_finite_reaches_no_earlier_position() -> None:
    _, (q, k, v, _) = tensors(Shape(B=1, T=6, H=1, K=2, V=2), REBASED, torch.float32)
    with torch.no_grad():
        v[:, 3] = torch.nan
    positions = torch.tensor([[2, 3, 5]])
    o = poly_attention_at(at(q, positions), k, v, positions, coefficients=REBASED)
    assert o.isnan().all(-1).flatten().tolist() == [False, True, True]


@pytest.mark.parametrize(("B", "n", "T"), [(0, 2, 4), (2, 0, 4), (0, 0, 0)])
def test_nothing(B: int, n: int, T: int) -> None:
    q, k, v = (torch.zeros(B, length, 2, 3, requires_grad=True) for length in (n, T, T))
    o = poly_attention_at(q, k, v, torch.zeros(B, n, dtype=torch.int64), coefficients=REBASED)
    assert o.shape == (B, n, 2, 3)
    o.sum().backward()
    assert k.grad is not None


def test_errors_name_the_shapes() -> None:
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 9, 3, 4)
    positions = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"q \[1, 2, 3, 5\] must be \[B, n, H, K\]"):
        poly_attention_at(torch.zeros(1, 2, 3, 5), k, k, positions, coefficients=REBASED)
    with pytest.raises(ValueError, match=r"positions must be \[B, n\] = \[1, 2\], int32 or int64"):
        poly_attention_at(q, k, k, positions.float(), coefficients=REBASED)
    with pytest.raises(ValueError, match=r"they are \[1, 3\]"):
        poly_attention_at(q, k, k, torch.zeros(1, 3, dtype=torch.int64), coefficients=REBASED)


def test_it_pays_for_the_questions_of_mqar_and_not_for_all_tokens() -> None:
    for T, n in ((128, 16), (256, 32), (256, 64), (512, 128), (2048, 512)):
        assert selection_pays(n, T, 16, 5, False)
        assert selection_pays(n, T, 16, 5, True)
        assert not selection_pays(T, T, 16, 5, False)
    assert not selection_pays(8192, 32_768, 16, 64, False)  # there the chunked regime is far better
    assert not poly_at_pays(torch.zeros(2, 256, 8), 32, 16, 5, coefficients=REBASED)  # on a CPU
    assert not mixer_class("rebased")(d_model=8, n_heads=2).attends_at(torch.zeros(2, 256, 8), 32)


def on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().cuda().requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coefficients", [REBASED, BASED])
@pytest.mark.parametrize(
    ("shape", "n"),
    [
        (Shape(B=2, T=256, H=12, K=16, V=2), 32),
        (Shape(B=2, T=256, H=3, K=16, V=5), 64),
        (Shape(B=1, T=1000, H=2, K=16, V=10), 77),
        (Shape(B=1, T=300, H=2, K=24, V=64), 100),
    ],
    ids=str,
)
def test_on_a_gpu(shape: Shape, n: int, coefficients: Coefficients, dtype: torch.dtype) -> None:
    given, exact = map(on_gpu, tensors(shape, coefficients, dtype))
    positions = some_positions(shape.B, n, shape.T).cuda()
    assert_small_error(*(attend_at(x, positions, coefficients, "triton") for x in (given, exact)), NAMES, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("coefficients", [REBASED, BASED])
def test_tf32_where_torch_allows_it(coefficients: Coefficients) -> None:
    given, exact = map(on_gpu, tensors(Shape(B=8, T=256, H=12, K=16, V=5), coefficients, torch.float32))
    positions = some_positions(8, 64, 256).cuda()
    torch.set_float32_matmul_precision("high")
    try:
        some = attend_at(given, positions, coefficients, "triton")
    finally:
        torch.set_float32_matmul_precision("highest")
    law = attend_at(exact, positions, coefficients, "triton")
    assert_small_error(some, law, NAMES, torch.float16)  # which has as many digits


@pytest.mark.gpu
def test_a_layer_compiles_and_is_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    layer = mixer_class("rebased")(d_model=60, n_heads=12, device="cuda")
    x, positions = torch.randn(4, 256, 60, device="cuda"), some_positions(4, 32, 256).cuda()
    assert layer.attends_at(x, 32)
    with torch.no_grad():
        expected = layer.forward_at(x, positions)
        every = layer(x).gather(1, positions[:, :, None].expand(-1, -1, 60))
        compiled = torch.compile(layer.forward_at, fullgraph=True)(x, positions)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = layer.forward_at(x, positions)
        graph.replay()
    assert_small_error((every, compiled), (expected, expected), ("of all", "compiled"), torch.float32)
    assert torch.equal(replayed, expected)
