"""Norms against their formulas: plain on a CPU, and their kernels built for GPUs that are not here and run on one."""

import pytest
import torch
from torch.nn import functional

from ops.builds import BUILDS, KernelLaunches
from ops.norm_cases import KINDS, assert_is_the_law, assert_linear_norm_is_the_law
from rebased.kernels.machine_code import compile_launch
from rebased.ops import layer_norm, linear_layer_norm, use_backend
from rebased.ops.backend import matmul_dtype
from rebased.train.precision import matmul_precision
from tolerances import KERNEL_ERRORS


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_formula(kind: str) -> None:
    assert_is_the_law(kind, (3, 5, 24), torch.float64, torch.float64)
    assert_is_the_law(kind, (3, 5, 24), torch.bfloat16, torch.bfloat16)


def test_the_answer_has_the_dtype_that_is_asked_for_under_autocast_too() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_norm(x.bfloat16(), weight, weight).dtype == torch.bfloat16
        assert layer_norm(x, weight, weight).dtype == torch.float32
        assert layer_norm(x, weight, weight, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_dtype_of_a_product_is_torchs(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    x, weight = torch.randn(2, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert matmul_dtype(x, weight) == functional.linear(x, weight).dtype
        assert matmul_dtype(x) == matmul_dtype(x, weight)
        if autocast and dtype != torch.float64:  # without autocast torch multiplies no two dtypes
            assert matmul_dtype(x, weight.float()) == functional.linear(x, weight.float()).dtype


@pytest.mark.recorded("norm", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.norm import gpu

    launches = kernel_launches(gpu)
    with use_backend("triton"):
        for N in (64, 192, 8192):
            weight = torch.ones(N, requires_grad=True)
            layer_norm(torch.randn(2, N).to(dtype), weight, weight, residual=N == 64).sum().backward()
    assert len(launches) == 6
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 32 * 1024  # for sums over rows and columns


def test_of_a_projection() -> None:
    assert_linear_norm_is_the_law((3, 5), 8, 24, torch.float32)
    assert_linear_norm_is_the_law((3, 5), 8, 24, torch.float32, affine=False)
    x, projection = torch.randn(3, 8), torch.randn(24, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_layer_norm(x, projection, None, None).dtype == torch.bfloat16


@pytest.mark.recorded("norm", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (90, torch.float32)])
def test_the_kernels_of_a_projection_build(
    capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches
) -> None:
    from rebased.ops.norm import linear_gpu

    launches = kernel_launches(linear_gpu)
    weight, x, projection = torch.ones(192), torch.randn(2, 64).to(dtype), torch.randn(192, 64).to(dtype)
    with use_backend("triton"), matmul_precision("tf32"):
        linear_layer_norm(x, projection.requires_grad_(), weight, weight).sum().backward()
    assert len(launches) == 3
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= (160 if capability == 80 else 224) * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "D", "N"), [((64, 2048), 64, 192), ((7, 1001), 24, 192), ((9,), 3, 5)], ids=str)
def test_of_a_projection_on_a_gpu(rows: tuple[int, ...], D: int, N: int, dtype: torch.dtype, affine: bool) -> None:
    error = KERNEL_ERRORS[torch.float16 if dtype == torch.float32 else dtype]  # TF32 has as many digits as fp16
    with matmul_precision("tf32"):
        assert_linear_norm_is_the_law(rows, D, N, dtype, affine, device="cuda", error=error)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [(64, 2048, 64), (7, 1001, 192), (3, 77, 40), (33, 3000)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, kind: str) -> None:
    assert_is_the_law(kind, shape, dtype, out, device="cuda")
