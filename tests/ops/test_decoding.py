"""A decoding step's functions: its kernels built for GPUs that are not here, and held against fp64 on one."""

from typing import Any

import pytest
import torch
from benchmarks.launches import kernels_of

from ops import decoding_cases as cases
from ops.builds import KernelLaunches
from rebased.kernels.machine_code import compile_launch
from rebased.ops import use_backend

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have, by compute capability
SIZES: list[tuple[str, Any]] = [
    ("linear", (1, 768, 1152, "layer", False, False, False)),
    ("linear", (16, 768, 3072, "layer", True, False, True)),
    ("mlp", (100, 768, 96, "layer")),  # torch multiplies here, so the hidden width is no matter
    *(("convolution", (rows, 768, 3)) for rows in (64, 100)),
    *(("polynomial", (rows, 12, 16, 64, cases.REBASED, "layer", True, False)) for rows in (1, 100)),
    ("tokens", (2, 50_304)),
    ("embedding", None),
]


@pytest.mark.recorded("decoding", keep=0)
@pytest.mark.parametrize(
    ("capability", "dtype"), [(90, torch.bfloat16), pytest.param(80, torch.float32, marks=pytest.mark.release)]
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # from CPUs without bf16, which then compute anyway
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.decoding.gpu import convolution, linear, polynomial, tokens

    modules = convolution, linear, polynomial, tokens
    kernels = {name for module in modules for name in kernels_of(module)}
    launches = kernel_launches(*modules)
    for kind, size in SIZES:
        arguments = () if size is None else (size,)
        with pytest.raises(AssertionError):  # nothing was computed
            getattr(cases, f"check_{kind}")(*arguments, dtype, "cpu", "triton")
        if kind == "tokens":
            one, numbers = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
            seen = torch.zeros(2, 50_304, dtype=torch.bool)
            tokens.advance_(numbers, seen.to(dtype), one, seen[:, 0].clone(), numbers, numbers, numbers, seen)
    assert {launch["kernel"].__name__ for launch in launches} == kernels
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= SHARED_MEMORY[capability]


def test_the_plain_path_takes_what_the_kernels_take() -> None:
    with use_backend("reference"):
        cases.check_polynomial(cases.POLYNOMIAL[0], torch.float32, "cpu", "auto")
        cases.check_convolution(cases.CONVOLUTION[1], torch.float32, "cpu", "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*cases.LINEAR, *cases.LARGE_LINEAR], ids=str)
def test_linear_on_a_gpu(case: Any, dtype: torch.dtype) -> None:
    cases.check_linear(case, dtype, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*cases.MLP, *((rows, 768, 3072, "layer") for rows in (1, 16, 64, 300))], ids=str)
def test_mlp_on_a_gpu(case: Any, dtype: torch.dtype) -> None:
    cases.check_mlp(case, dtype, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*cases.CONVOLUTION, (1, 768, 3), (64, 768, 3), (300, 768, 4)], ids=str)
def test_gated_convolution_on_a_gpu(case: Any, dtype: torch.dtype) -> None:
    cases.check_convolution(case, dtype, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*cases.POLYNOMIAL, *cases.LARGE_POLYNOMIAL], ids=str)
def test_polynomial_attention_on_a_gpu(case: Any, dtype: torch.dtype) -> None:
    cases.check_polynomial(case, dtype, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [*cases.VOCABULARIES, (1, 50_304), (1024, 50_304)], ids=str)
def test_tokens_on_a_gpu(size: tuple[int, int], dtype: torch.dtype) -> None:
    cases.check_embedding(dtype, "cuda", "triton")
    cases.check_tokens(size, dtype, "cuda", "triton")
