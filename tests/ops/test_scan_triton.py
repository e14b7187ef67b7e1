"""The selective scan's kernels: built for GPUs that are not here, held against fp64 on one."""

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from ops.scan_cases import OPTIONS, assert_gradients_match, assert_step_sizes, scan, scan_inputs
from rebased.kernels.machine_code import compile_launch, read_resources
from tolerances import assert_near


@pytest.mark.recorded("scan", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, kernel_launches: KernelLaunches
) -> None:
    from rebased.ops.scan import elementwise_gpu, gpu

    launches = kernel_launches(gpu, elementwise_gpu)
    for T, chunks in ((40, 2), (16, 1), (1, 1)):  # masked; with nothing to mask; a length that is a constant
        monkeypatch.setattr(gpu, "count_chunks", lambda *_, chunks=chunks: chunks)
        inputs = {k: v.requires_grad_() for k, v in scan_inputs(1, T, 64, 16, options=OPTIONS, dtype=dtype).items()}
        y, state = scan(inputs, "triton")
        (y.sum() + state.sum()).backward()
    several = ["step", "summary", "forward", "gate", "gate_backward", "summary", "backward", "step_backward"]
    one = [name for name in several if name != "summary"]
    names = (*several, *one, *one)
    assert [launch["kernel"].__name__ for launch in launches] == [f"{name}_kernel" for name in names]
    for launch in launches:
        compiled = compile_launch(launch, capability)
        assert compiled.metadata.shared <= 4096  # states are in registers
        assert read_resources(compiled.asm["cubin"]).stack == 0  # all of them


@pytest.mark.parametrize("states", [16, 32, 64])
def test_registers_hold_the_states_of_a_group(states: int, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.scan import gpu

    launches = kernel_launches(gpu)
    inputs = {k: v.requires_grad_() for k, v in scan_inputs(1, 64, 64, states).items()}
    scan(inputs, "triton")[0].sum().backward()
    assert [launch["kernel"].__name__ for launch in launches] == ["forward_kernel", "backward_kernel"]
    assert read_resources(compile_launch(launches[-1], 90).asm["cubin"]).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 256, 128, 16), (1, 5000, 96, 16), (3, 77, 40, 7), (2, 1, 64, 16), (2, 100, 32, 64)]
)
@pytest.mark.parametrize("options", [(), OPTIONS], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int, int], options: tuple[str, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_gradients_match(scan_inputs(*shape, options=options, dtype=dtype, device="cuda"), "triton")


@pytest.mark.gpu
def test_every_step_size_is_accurate_on_a_gpu() -> None:
    assert_step_sizes("cuda")


@pytest.mark.gpu
def test_65536_tokens_on_a_gpu() -> None:
    torch.manual_seed(0)
    assert_gradients_match(scan_inputs(1, 65_536, 4, 16, device="cuda"), "triton", law="chunked")


@pytest.mark.gpu
def test_compiles_and_is_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    inputs = scan_inputs(4, 64, 32, 16, options=OPTIONS, device="cuda")
    expected, _ = scan(inputs)
    compiled = torch.compile(scan, fullgraph=True)
    assert_near(compiled(inputs)[0], expected, 64, condition=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = scan(inputs)
    graph.replay()
    assert_near(y, expected, 64)
