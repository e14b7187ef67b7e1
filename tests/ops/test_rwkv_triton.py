"""WKV's kernels: built for GPUs that are not here, and held against fp64 on one."""

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from ops.wkv_cases import assert_matches, by_double_sum, by_path, wkv_inputs
from rebased.kernels.machine_code import compile_launch
from rebased.ops import wkv
from tolerances import assert_near

KERNELS = ("forward_kernel", "backward_kernel", "rate_kernel")


@pytest.mark.recorded("rwkv", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, kernel_launches: KernelLaunches
) -> None:
    from rebased.ops.rwkv import gpu

    launches = kernel_launches(gpu)
    for T, chunks in ((40, 2), (1, 1)):  # a length of one is a constant to the compiler
        monkeypatch.setattr(gpu, "count_chunks", lambda *_, chunks=chunks: chunks)
        k, v, w, u, *_ = wkv_inputs(1, T, 64, dtype=dtype).values()
        wkv(k.requires_grad_(), v, w, u, backend="triton").sum().backward()
    both, each = ["forward_kernel"] * 2 + ["backward_kernel"] * 2 + ["rate_kernel"], list(KERNELS)
    assert [launch["kernel"].__name__ for launch in launches] == both + each
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared == 0  # all there is stays in registers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256, 64), (1, 3000, 96), (3, 77, 40), (2, 1, 64)])
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    law = by_double_sum if shape[1] < 100 else by_path("chunked")
    assert_matches(wkv_inputs(*shape, dtype=dtype, device="cuda"), by_path("triton"), law=law)


@pytest.mark.gpu
def test_65536_tokens_on_a_gpu() -> None:
    torch.manual_seed(0)
    assert_matches(wkv_inputs(1, 65_536, 8, device="cuda"), by_path("triton"), law=by_path("chunked"))


@pytest.mark.gpu
def test_compiles_and_is_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    inputs = list(wkv_inputs(4, 64, 32, device="cuda").values())[:4]
    expected = wkv(*inputs)
    assert_near(torch.compile(wkv, fullgraph=True)(*inputs), expected, 64, condition=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = wkv(*inputs)
    graph.replay()
    assert_near(y, expected, 64)
