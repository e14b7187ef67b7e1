"""The token shift's kernels: built for GPUs that are not here, held against fp64 on one."""

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from rebased.kernels.machine_code import compile_launch
from rebased.ops import token_shift
from tolerances import assert_near, in_chunks


def assert_matches_torch(shape: tuple[int, int, int], mixtures: int, dtype: torch.dtype, device: str) -> None:
    """Values and all gradients of the kernels against plain torch in fp64."""
    batch, T, D = shape
    inputs = [torch.randn(shape).to(dtype), torch.randn(batch, D).to(dtype), torch.rand(mixtures, D)]
    inputs = [each.to(device) for each in inputs]
    weights = [torch.randn(shape).to(device, dtype) for _ in range(mixtures)]
    results = []
    for kind, backend in ((None, "triton"), (torch.float64, "chunked")):
        leaves = [each.to(kind or each.dtype).requires_grad_() for each in inputs]
        ys = token_shift(*leaves, backend=backend)  # type: ignore[arg-type]
        assert all(y.is_contiguous() and y.dtype == leaves[0].dtype for y in ys)
        loss = sum((y * weight.to(y.dtype)).sum() for y, weight in zip(ys, weights, strict=True))
        results.append([*(y.detach() for y in ys), *torch.autograd.grad(loss, leaves)])
    # A mixture is a sum of two terms. A token is in two of each kind. The gradient of mixes is a sum over tokens.
    lengths = [*[(2,)] * mixtures, (2 * mixtures,), (mixtures,), in_chunks(batch * T)]
    for actual, expected, terms in zip(*results, lengths, strict=True):
        assert_near(actual, expected, *terms, size=1.0)


@pytest.mark.recorded("shift", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.shift import gpu

    launches = kernel_launches(gpu)
    for T, mixtures in ((1, 1), (64, 3)):  # a length of one is a constant to the compiler
        x = torch.randn(2, T, 64, dtype=dtype, requires_grad=True)
        ys = token_shift(x, torch.randn(2, 64), torch.rand(mixtures, 64), backend="triton")
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert [launch["kernel"].__name__ for launch in launches] == ["forward_kernel", "backward_kernel"] * 2
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 1024  # the sums of four warps over their tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "mixtures"), [((64, 256, 64), 3), ((3, 77, 40), 3), ((2, 1, 64), 1), ((1, 5000, 200), 5)]
)
def test_on_a_gpu(shape: tuple[int, int, int], mixtures: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_matches_torch(shape, mixtures, dtype, "cuda")


@pytest.mark.gpu
def test_compiles_and_is_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda") for shape in ((4, 64, 32), (4, 32), (3, 32))]
    expected = token_shift(*inputs)
    compiled = torch.compile(token_shift, fullgraph=True)(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = token_shift(*inputs)
    graph.replay()
    for want, *found in zip(expected, compiled, replayed, strict=True):
        assert all(torch.equal(y, want) for y in found)
