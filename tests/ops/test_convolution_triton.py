"""The short convolution's kernels: built for GPUs that are not here, held against fp64 on one."""

import re
from typing import Literal

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from rebased.kernels.machine_code import compile_launch, read_resources
from rebased.ops import Backend, short_conv, short_conv_extend
from tolerances import assert_near, in_chunks


def assert_matches_torch(
    shape: tuple[int, int, int], width: int, dtype: torch.dtype, device: str, activation: Literal["silu"] | None = None
) -> None:
    """x is half of a larger tensor, as in Mamba."""
    batch, T, D = shape
    inputs = [torch.randn(shape).to(dtype), torch.randn(D, width), torch.randn(D)]
    inputs = [each.to(device) for each in (*inputs, torch.randn(batch, width - 1, D).to(dtype))]
    weights = [torch.randn(shape).to(device, dtype), torch.randn(batch, width - 1, D).to(device, dtype)]
    results = []
    for kind, backend in ((None, "triton"), (torch.float64, "chunked")):
        leaves = [each.to(kind or each.dtype).requires_grad_() for each in inputs]
        x = torch.cat([leaves[0], leaves[0].detach()], -1).chunk(2, -1)[0]
        outputs = short_conv_extend(x, *leaves[1:], activation=activation, backend=backend)  # type: ignore[arg-type]
        loss = sum((o * weight.to(o.dtype)).sum() for o, weight in zip(outputs, weights, strict=True))
        results.append([*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves)])
    for actual, expected in zip(*results, strict=True):
        lengths = width, *in_chunks(batch * T)  # taps; the gradient of a tap sums tokens
        assert_near(actual, expected, *lengths, size=1.0, dtype=dtype)


@pytest.mark.recorded("convolution", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.convolution import gpu

    launches = kernel_launches(gpu)
    for T, D in ((1, 64), (64, 24)):  # a length of one is a constant to the compiler
        for activation in (None, "silu"):
            x = torch.randn(2, T, D, dtype=dtype, requires_grad=True)
            inputs = x, torch.randn(D, 4), torch.randn(D)
            short_conv(*inputs, activation=activation, backend="triton").sum().backward()  # type: ignore[arg-type]
    names = ["forward_kernel", "backward_kernel", "forward_kernel", "silu_backward_kernel"]
    assert [launch["kernel"].__name__ for launch in launches] == 2 * names
    for launch in launches:
        compiled = compile_launch(launch, capability)
        assert compiled.metadata.shared <= 16_384  # the sums over a tile's tokens
        assert re.search(r"ld\.global\.v[24]", compiled.asm["ptx"])  # several numbers at once, of 24 channels too


@pytest.mark.parametrize("taps", [4, pytest.param(6, marks=pytest.mark.release)])
def test_a_run_of_tokens_fits_into_registers(taps: int) -> None:
    from rebased.ops.convolution import gpu

    assert taps <= gpu.MOST_TAPS
    kernel, constants = gpu.silu_backward_kernel, gpu._constants(64, 128, taps) | {"RUN": gpu.RUN}
    values = dict.fromkeys(kernel.arg_names, "*fp32:16") | {"T": "i32:16"} | constants
    launch = {"kernel": kernel, "values": values, "options": {"num_warps": gpu.RUN_WARPS}}
    assert read_resources(compile_launch(launch, 90).asm["cubin"]).stack == 0


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_silu_is_what_torch_computes_after_the_convolution(backend: Backend) -> None:
    x, weight, bias = torch.randn(2, 5, 3), torch.randn(3, 4), torch.randn(3)
    y = short_conv(x, weight, bias, backend=backend)
    assert torch.equal(short_conv(x, weight, bias, activation="silu", backend=backend), torch.nn.functional.silu(y))


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="activation 'gelu' is unknown; choose 'silu' or None"):
        short_conv(torch.zeros(1, 2, 3), torch.zeros(3, 4), activation="gelu")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "width"), [((64, 256, 128), 4), ((3, 77, 40), 3), ((2, 1, 64), 4), ((1, 5000, 8), 3)]
)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_on_a_gpu(
    shape: tuple[int, int, int], width: int, activation: Literal["silu"] | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    assert_matches_torch(shape, width, dtype, "cuda", activation)
