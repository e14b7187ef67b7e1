"""Polynomial attention's kernels, compiled for GPUs that are not here: every one builds and fits shared memory."""

import importlib
import pkgutil
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.regimes import Regime, forced

from rebased.ops import BASED, REBASED, Coefficients, init_poly_state, poly_attention, poly_attention_extend
from triton_aot import compile_launch, record_launches

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have, by compute capability
HEADS = 12


class Case(NamedTuple):
    dtype: torch.dtype
    K: int
    V: int
    T: int
    coefficients: Coefficients
    regime: Regime
    kind: str = "plain"  # packed: with cu_seqlens; extend: with a state in and out
    gradients: bool = True


BF16, FP32 = torch.bfloat16, torch.float32
CASES = [  # chosen so that all together take a minute of two cores: key gradients in fp32 alone take eight seconds each
    (90, Case(BF16, 16, 64, 256, REBASED, "quadratic")),
    (90, Case(BF16, 16, 64, 4096, REBASED, "chunked")),
    (90, Case(BF16, 16, 64, 4096, BASED, "chunked", "extend")),
    (90, Case(BF16, 16, 64, 1, REBASED, "chunked", "extend", gradients=False)),
    (90, Case(FP32, 16, 10, 4096, REBASED, "chunked", gradients=False)),
    (90, Case(BF16, 128, 96, 256, REBASED, "quadratic")),
    (80, Case(BF16, 16, 64, 4096, REBASED, "chunked", "packed")),
    (80, Case(BF16, 16, 64, 1, BASED, "chunked", "extend", gradients=False)),
    (80, Case(FP32, 128, 96, 256, REBASED, "quadratic")),  # the one that needs most shared memory
]


def name_of(x: object) -> str:
    if not isinstance(x, Case):
        return f"sm{x}"
    return "-".join(str(field).removeprefix("torch.") for field in x)


def gpu_modules() -> list[Any]:
    package = importlib.import_module("rebased.ops.polynomial.gpu")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def kernels_of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.endswith("_kernel")}


def recorded(case: Case) -> list[dict[str, Any]]:
    """What a call and its backward launch; nothing runs."""
    launches: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch, forced(case.regime):
        for module in gpu_modules():
            for name, kernel in kernels_of(module).items():
                patch.setattr(module, name, record_launches(kernel, launches))
            if hasattr(module, "triton_interpreted"):  # so that CPU tensors get this far
                patch.setattr(module, "triton_interpreted", lambda: True)
        c = case.coefficients
        q, k, v = (
            torch.zeros(1, case.T, HEADS, w, dtype=case.dtype, requires_grad=case.gradients)
            for w in (case.K, case.K, case.V)
        )
        if case.kind == "extend":
            state = init_poly_state(1, HEADS, case.K, case.V, c)
            o, after = poly_attention_extend(q, k, v, state, coefficients=c, backend="triton")
            loss = o.sum() + after.kv.sum() + after.z.sum()
        else:
            cu_seqlens = torch.tensor([0, 5, case.T], dtype=torch.int32) if case.kind == "packed" else None
            loss = poly_attention(q, k, v, coefficients=c, cu_seqlens=cu_seqlens, backend="triton").sum()
        if case.gradients:
            loss.backward()
    return launches


@pytest.mark.parametrize(("capability", "case"), CASES, ids=name_of)
def test_builds_and_fits(capability: int, case: Case) -> None:
    launches = recorded(case)
    assert launches
    for launch in launches:
        needed = compile_launch(launch, capability).metadata.shared
        name = launch["kernel"].__name__
        assert needed <= SHARED_MEMORY[capability], f"{name} needs {needed} bytes of shared memory"


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_no_kernel_is_left_out(capability: int) -> None:
    cases = [case for number, case in CASES if number == capability]
    launched = {launch["kernel"].__name__ for case in cases for launch in recorded(case)}
    assert launched == {name for module in gpu_modules() for name in kernels_of(module)}
