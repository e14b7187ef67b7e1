"""The token shift's kernels against plain torch in fp64: odd shapes, gradients, memory that starts as NaN."""

import pytest
import torch
from torch import Tensor

from ops.test_shift_triton import assert_matches_torch
from rebased.ops import token_shift
from rebased.ops.backend import triton_interpreted
from tolerances import assert_near

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("shift")]


@pytest.mark.parametrize(
    ("shape", "mixtures", "dtype"),
    [
        ((2, 1, 3), 3, torch.float32),
        ((2, 70, 66), 3, torch.float32),
        ((1, 64, 64), 1, torch.float32),
        ((1, 33, 5), 5, torch.float32),  # more mixtures than one kernel makes
        ((2, 37, 33), 3, torch.float16),
        ((2, 32, 65), 2, torch.bfloat16),
    ],
)
def test_kernels(shape: tuple[int, int, int], mixtures: int, dtype: torch.dtype) -> None:
    assert triton_interpreted()
    assert_matches_torch(shape, mixtures, dtype, "cpu")


def test_shares_of_zero_and_one_copy_tokens() -> None:
    """Whatever the tokens are: the difference of these would be rounded."""
    x, last = torch.tensor([[[1e8, 3e-3], [1e-3, -2e9]]]), torch.tensor([[-7e-4, 5e7]])
    before, here = token_shift(x, last, torch.tensor([[0.0, 0.0], [1.0, 1.0]]), backend="triton")
    assert torch.equal(before, torch.stack([last, x[:, 0]], dim=1))
    assert torch.equal(here, x)


def test_layouts_and_mixtures_without_gradients() -> None:
    """A transposed x, a `last` in another dtype, a gradient that is expanded, and mixtures that are not used."""

    def gradients(backend: str) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        x, last, mixes = (torch.randn(shape, requires_grad=True) for shape in ((5, 3, 2), (2, 5), (3, 5)))
        ys = token_shift(x.permute(2, 1, 0), last.double(), mixes, backend=backend)  # type: ignore[arg-type]
        return torch.autograd.grad(ys[1].sum(), (x, last, mixes))

    for actual, expected in zip(gradients("triton"), gradients("chunked"), strict=True):
        assert_near(actual, expected, 6)


def test_compiles_as_one_graph() -> None:
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((1, 3, 2), (1, 2), (3, 2))]
    compiled = torch.compile(token_shift, backend="aot_eager", fullgraph=True)
    results = [torch.stack(run(*inputs, backend="triton")) for run in (token_shift, compiled)]
    gradients = [torch.autograd.grad(each.square().sum(), inputs) for each in results]
    assert torch.equal(*results)
    for expected, actual in zip(*gradients, strict=True):
        assert_near(actual, expected, 3)
