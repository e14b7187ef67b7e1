"""The selective scan's kernels: built for GPUs that are not here, held against fp64 on one."""

from typing import Any

import pytest
import torch

from ops.scan_cases import assert_gradients_match, scan_inputs
from rebased.ops import selective_scan, selective_scan_extend
from rebased.ops.inspection import compile_launch, read_cubin, record_launches
from tolerances import assert_near

KERNELS = ("forward_kernel", "summary_kernel", "backward_kernel")


@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (90, torch.float32), (90, torch.float16)])
def test_every_kernel_builds(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from rebased.ops import backend
    from rebased.ops.scan import gpu

    launches: list[dict[str, Any]] = []
    for name in KERNELS:
        monkeypatch.setattr(gpu, name, record_launches(getattr(gpu, name), launches))
    monkeypatch.setattr(backend, "triton_interpreted", lambda: True)  # so that CPU tensors get this far
    for T, chunks in ((40, 2), (1, 1)):  # a length of one is a constant to the compiler
        monkeypatch.setattr(gpu, "count_chunks", lambda *_, chunks=chunks: chunks)
        inputs = scan_inputs(1, T, 64, 16, dtype=dtype)
        y, state = selective_scan_extend(inputs["x"].requires_grad_(), *list(inputs.values())[1:], backend="triton")
        (y.sum() + state.sum()).backward()
    names = ["summary_kernel", "forward_kernel", "summary_kernel", "backward_kernel"]
    assert [launch["kernel"].__name__ for launch in launches] == [*names, "forward_kernel", "backward_kernel"]
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 4096  # states are in registers


@pytest.mark.parametrize("states", [16, 32, 64])
def test_registers_hold_the_states_of_a_group(states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rebased.ops import backend
    from rebased.ops.scan import gpu

    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu, "backward_kernel", record_launches(gpu.backward_kernel, launches))
    monkeypatch.setattr(gpu, "forward_kernel", record_launches(gpu.forward_kernel, []))
    monkeypatch.setattr(backend, "triton_interpreted", lambda: True)  # so that CPU tensors get this far
    inputs = scan_inputs(1, 64, 64, states)
    y, _ = selective_scan_extend(inputs["x"].requires_grad_(), *list(inputs.values())[1:], backend="triton")
    y.sum().backward()
    (launch,) = launches
    assert read_cubin(compile_launch(launch, 90).asm["cubin"]).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 256, 128, 16), (1, 5000, 96, 16), (3, 77, 40, 7), (2, 1, 64, 16), (2, 100, 32, 64)]
)
def test_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_gradients_match(scan_inputs(*shape, dtype=dtype, device="cuda"), "triton")


@pytest.mark.gpu
def test_65536_tokens_on_a_gpu() -> None:
    torch.manual_seed(0)
    assert_gradients_match(scan_inputs(1, 65_536, 4, 16, device="cuda"), "triton", law="chunked")


@pytest.mark.gpu
def test_compiles_and_is_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    inputs = list(scan_inputs(4, 64, 32, 16, device="cuda").values())[:6]
    expected = selective_scan(*inputs)
    compiled = torch.compile(selective_scan, fullgraph=True)
    assert_near(compiled(*inputs), expected, 64, condition=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = selective_scan(*inputs)
    graph.replay()
    assert_near(y, expected, 64)
