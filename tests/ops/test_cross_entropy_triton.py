"""The kernel of the head's loss: built for GPUs that are not here, and held against fp64 on one."""

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from ops.cross_entropy_cases import assert_is_the_law, case
from rebased.kernels.machine_code import compile_launch
from rebased.ops import linear_cross_entropy, use_backend
from rebased.train.precision import matmul_precision
from tolerances import assert_near


@pytest.mark.recorded("cross_entropy", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.cross_entropy import gpu

    launches = kernel_launches(gpu)
    with use_backend("triton"):
        for vocab in (8192, 50304):
            linear_cross_entropy(*case(2, 160, vocab, dtype))
        with torch.no_grad():
            linear_cross_entropy(*case(2, 160, 8192, dtype))
    assert [launch["values"]["ONE_TILE"] for launch in launches] == [True, False, True]
    assert [launch["values"]["GRADIENT"] for launch in launches] == [True, True, False]
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 1024  # for the sums over a row


@pytest.mark.recorded("cross_entropy", keep=0)
@pytest.mark.parametrize(("capability", "width"), [(80, 24), (90, 128)])
def test_the_kernels_of_a_narrow_head_build(capability: int, width: int, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.cross_entropy import narrow_gpu

    launches = kernel_launches(narrow_gpu)
    with use_backend("triton"):
        for vocab in (8192, 1001):
            linear_cross_entropy(*case(300, width, vocab, torch.bfloat16))
    assert [launch["values"].get("EVEN") for launch in launches] == [True, None, False, None]
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 160 * 1024  # of an A100; an H100 has more


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(20_000, 64, 8192), (300, 96, 50_304), (77, 40, 1001), (5000, 24, 8192), (900, 128, 777), (90, 160, 999)],
    ids=str,
)
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_is_the_law(*case(*shape, dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(20_000, 64, 8192), (20_000, 32, 8192), (300, 160, 8192)], ids=str)
def test_tf32_on_a_gpu(shape: tuple[int, int, int]) -> None:
    with matmul_precision("tf32"):
        assert_is_the_law(*case(*shape, torch.float32, device="cuda"), rounded_to=torch.float16)


@pytest.mark.gpu
def test_is_captured_in_a_graph() -> None:
    hidden, weight, targets = case(20_000, 64, 8192, torch.float32, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets)
        return loss, *torch.autograd.grad(loss, [hidden, weight])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = run()
        graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(outputs, expected, strict=True):
        assert_near(got, want, 64, dtype=torch.bfloat16)
