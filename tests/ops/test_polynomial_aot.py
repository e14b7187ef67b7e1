"""Polynomial attention's kernels, compiled for GPUs that are not here: every one builds, fits shared memory and reads
it where it should."""

import pytest
import torch
from benchmarks.launches import Call, gpu_modules, kernels_of, launches_of

from benchmark_command import succeed
from rebased.kernels.machine_code import compile_launch, false_descriptors, instructions, read_cubin
from rebased.kernels.verify_cases import REGIMES, Regime, forced
from rebased.ops import BASED, REBASED
from rebased.ops.kernel_launch import planned
from rebased.ops.polynomial.api import EPS
from rebased.ops.polynomial.gpu.launch import ForwardInputs, plan_forward
from rebased.ops.polynomial.gpu.layout import tiled
from rebased.ops.polynomial.state import init_poly_state

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have, by compute capability

BF16, FP32 = torch.bfloat16, torch.float32
CASES = [  # every kernel for two GPUs, before a release for the older one; tests/kernels/test_classes.py adds others
    (90, Call(BF16, 16, 64, 256, REBASED, "quadratic")),
    (90, Call(BF16, 16, 64, 4096, REBASED, "chunked")),
    (90, Call(BF16, 16, 64, 16_384, BASED, "chunked", "extend")),
    (90, Call(BF16, 16, 64, 1, REBASED, "chunked", "extend", gradients=False)),
    (90, Call(FP32, 16, 10, 4096, REBASED, "chunked", gradients=False)),
    (90, Call(FP32, 16, 5, 256, REBASED, "quadratic", "at")),
    (90, Call(BF16, 16, 64, 1024, REBASED, "quadratic", gated=True)),
    (90, Call(BF16, 16, 64, 4096, BASED, "chunked", "extend", gated=True)),
    (80, Call(BF16, 16, 64, 4096, REBASED, "chunked", "packed")),
    (80, Call(BF16, 16, 10, 250, BASED, "quadratic", "at")),
    (80, Call(BF16, 16, 64, 1, BASED, "chunked", "extend", gradients=False)),
    (80, Call(FP32, 16, 10, 250, BASED, "quadratic", "packed", gated=True)),
]


def name_of(x: object) -> str:
    if not isinstance(x, Call):
        return f"sm{x}"
    return "-".join(str(field).removeprefix("torch.") for field in x)


@pytest.mark.recorded("polynomial", keep=0)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "case"),
    [pytest.param(*case, marks=[pytest.mark.release] * (case[0] < 90)) for case in CASES],
    ids=name_of,
)
def test_builds_and_fits(capability: int, case: Call) -> None:
    launches = launches_of(case)
    assert launches
    for launch in launches:
        compiled, name = compile_launch(launch, capability), launch["kernel"].__name__
        needed = compiled.metadata.shared
        assert needed <= SHARED_MEMORY[capability], f"{name} needs {needed} bytes of shared memory"
        if capability >= 90:  # before, products read no descriptors
            assert not false_descriptors(instructions(compiled.asm["cubin"])), name


def test_keys_that_are_no_multiple_of_sixteen_are_read_in_large_pieces() -> None:
    """Triton knows of a stride that is a multiple of 16, and of no other: a head of 24 was read number by number."""
    (launch,) = launches_of(Call(BF16, 24, 64, 256, REBASED, "quadratic", gradients=False))
    assert launch["values"]["K_UNIT"] == 8
    listing = instructions(compile_launch(launch, 90).asm["cubin"])
    assert not [line for line in listing if line.startswith("LDG.E.U16")]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["plain", "packed", "extend"])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_first_call_compiles_what_it_then_launches(regime: Regime, kind: str, gated: bool) -> None:
    """Kernels, numbers, constants and dtypes, for both passes, are known before the first is launched."""
    H, T, K, V = 12, 70, 24, 10
    expected = [
        (each["kernel"].__name__, {name: kind_of(x) for name, x in (each["values"] | each["options"]).items()})
        for each in launches_of(Call(BF16, K, V, T, BASED, regime, kind, gated=gated))
    ]
    q, v = torch.zeros(1, T, H, K, dtype=BF16), torch.zeros(1, T, H, V, dtype=BF16)
    cu_seqlens = torch.tensor([0, 5, T], dtype=torch.int32) if kind == "packed" else None
    state = tiled(init_poly_state(1, H, K, V, BASED), K, BASED) if kind == "extend" else (None, None)
    folded = (BASED[0], BASED[1] * K**-0.5, BASED[2] / K)
    g = torch.zeros(1, T, H) if gated else None
    inputs = ForwardInputs(q, q, v, cu_seqlens, *state, *folded, EPS, kind == "extend", g)
    with forced(regime):
        launches = planned(lambda: plan_forward(inputs, True))
    found = []
    for launch, args in launches:
        names = dict(zip(launch.kernel.arg_names, (*map(kind_of, args), *launch.numbers), strict=False))
        found.append((launch.kernel.__name__, names | launch.constants))
    assert found == expected


def kind_of(x: object) -> object:
    return x.dtype if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_no_kernel_is_left_out(capability: int) -> None:
    cases = [case for number, case in CASES if number == capability]
    launched = {launch["kernel"].__name__ for case in cases for launch in launches_of(case)}
    assert launched == {name for module in gpu_modules() for name in kernels_of(module)}


def test_false_descriptors_are_found() -> None:
    """As ptxas 12.8 made them: the address of one in UR4, and in place of another an argument of the kernel."""
    sound = ["USGXT.U32 UR6, UR6, 0xe", "UMOV UR4, URZ", "UIADD3.X UR11, UR4, -0x3ffffff0, URZ, UP0, !UPT"]
    false = ["ULDC UR16, c[0x0][0x290]", *sound, "UIADD3.X UR55, UR16, -0x3ffffff0, URZ, UP0, !UPT"]
    assert false_descriptors(sound) == []
    assert false_descriptors(false) == [f"{false[-1]} after {false[0]}"]


def test_gradients_of_one_token_are_computed_at_right_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32, with a gate and a state, which has a tile of its own."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    launches = launches_of(Call(FP32, 1, 24, 1, BASED, "chunked", "extend", gated=True))
    (launch,) = [each for each in launches if each["kernel"].__name__ == "query_grad_kernel"]
    assert launch["values"]["PRECISION"] == "tf32"
    assert read_cubin(compile_launch(launch, 90).asm["cubin"]).wrong == []


@pytest.mark.release
def test_the_kernels_of_a_first_call_are_timed() -> None:
    said = succeed("first_call", "-T", "256")
    assert "K 16, V 64, T 256, quadratic: 3 kernels" in said
    for name in ("forward_kernel", "query_grad_kernel", "key_grad_kernel", "one after the other", "all at once"):
        assert name in said
