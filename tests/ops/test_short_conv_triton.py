"""The short convolution's kernels: built for GPUs that are not here, held against fp64 on one."""

from typing import Any

import pytest
import torch

from rebased.ops import short_conv, short_conv_extend
from rebased.ops.inspection import compile_launch, record_launches
from tolerances import assert_near, in_chunks


def assert_matches_torch(shape: tuple[int, int, int], width: int, dtype: torch.dtype, device: str) -> None:
    batch, T, D = shape
    inputs = [torch.randn(shape).to(dtype), torch.randn(D, width), torch.randn(D)]
    inputs = [each.to(device) for each in (*inputs, torch.randn(batch, width - 1, D).to(dtype))]
    weights = [torch.randn(shape).to(device, dtype), torch.randn(batch, width - 1, D).to(device, dtype)]
    results = []
    for kind, backend in ((None, "triton"), (torch.float64, "chunked")):
        leaves = [each.to(kind or each.dtype).requires_grad_() for each in inputs]
        outputs = short_conv_extend(*leaves, backend=backend)  # type: ignore[arg-type]
        loss = sum((o * weight.to(o.dtype)).sum() for o, weight in zip(outputs, weights, strict=True))
        results.append([*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves)])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected, *in_chunks(batch * T), size=1.0, dtype=dtype)  # the taps' gradient sums tokens


@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (90, torch.float32), (90, torch.float16)])
def test_every_kernel_builds(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from rebased.ops import backend
    from rebased.ops.convolution import gpu

    launches: list[dict[str, Any]] = []
    for name in ("forward_kernel", "backward_kernel"):
        monkeypatch.setattr(gpu, name, record_launches(getattr(gpu, name), launches))
    monkeypatch.setattr(backend, "triton_interpreted", lambda: True)  # so that CPU tensors get this far
    for T in (1, 64):  # a length of one is a constant to the compiler
        x = torch.randn(2, T, 64, dtype=dtype, requires_grad=True)
        short_conv(x, torch.randn(64, 4), torch.randn(64), backend="triton").sum().backward()
    assert [launch["kernel"].__name__ for launch in launches] == ["forward_kernel", "backward_kernel"] * 2
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 16_384  # the sums over a tile's tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "width"), [((64, 256, 128), 4), ((3, 77, 40), 3), ((2, 1, 64), 4), ((1, 5000, 8), 3)]
)
def test_on_a_gpu(shape: tuple[int, int, int], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_matches_torch(shape, width, dtype, "cuda")
