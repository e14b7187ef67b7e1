"""The kernels of the delta rule: built for GPUs that are not here, and held against fp64 on one."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from ops.delta_cases import Inputs, assert_matches, delta_inputs, recall_inputs, results, step_inputs
from rebased.kernels.machine_code import compile_launch, read_cubin, read_resources
from rebased.kernels.ptxas import ptxas_version
from rebased.ops import delta_attention, delta_attention_extend, delta_attention_extend_, use_backend
from rebased.ops.comparison import Errors, plain_torch
from tolerances import assert_small_error

pytest.importorskip("triton")

from kernels.compile_classes import SHARED_MEMORY

KERNELS = ["prepare", "states", "outputs", "local", "grad_states", "gradients", "decode"]


@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.delta.gpu import decode, operators

    launches = kernel_launches(operators, decode)
    given = delta_inputs(1, 70, 2, 16, 64, 2, dtype=dtype)
    del given["state"]
    step, rule = step_inputs(1, 2, 16, 64, degree=2, gate="head", dtype=dtype)
    with use_backend("triton"):
        delta_attention(**{name: x.requires_grad_() for name, x in given.items()}, degree=2).sum().backward()
        delta_attention_extend(**step, **rule)
    assert [launch["kernel"].__name__.removesuffix("_kernel") for launch in launches] == KERNELS
    for launch in launches:
        built = compile_launch(launch, capability)
        assert built.metadata.shared <= SHARED_MEMORY[capability]
        if (capability, dtype) == (90, torch.bfloat16):  # what speed is measured with
            assert read_resources(built.asm["cubin"]).stack == 0, f"{launch['kernel'].__name__} spills registers"


@pytest.mark.parametrize("chosen", [True, pytest.param(False, marks=pytest.mark.release)])
def test_gradients_have_right_descriptors(
    chosen: bool, kernel_launches: KernelLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tile that is chosen, and the one that ptxas 12.8 miscompiles."""
    from rebased.ops.delta.gpu import operators

    if not chosen:
        monkeypatch.setattr(operators, "MISCOMPILED", None)
    launches = kernel_launches(operators)
    given = delta_inputs(1, 70, 2, 32, 100, 1, dtype=torch.bfloat16)
    del given["state"]
    o = delta_attention(**{name: x.requires_grad_() for name, x in given.items()}, degree=1, backend="triton")
    o.sum().backward()
    (launch,) = [each for each in launches if each["kernel"].__name__ == "gradients_kernel"]
    wrong = read_cubin(compile_launch(launch, 90).asm["cubin"]).wrong
    assert bool(wrong) == (not chosen and ptxas_version() == "12.8")


def test_what_kernels_do_not_take_is_computed_in_chunks(
    kernel_launches: KernelLaunches, caplog: pytest.LogCaptureFixture
) -> None:
    from rebased.ops.delta import api

    api._note_no_kernel.cache_clear()
    given = delta_inputs(1, 5, 1, 20, 4, 2)
    del given["state"]
    kernel_launches()
    with pytest.raises(ValueError, match="do not take keys of width 20"):
        delta_attention(**given, degree=2, backend="triton")
    with use_backend("triton"):
        o = delta_attention(**given, degree=2)
    assert_small_error([o], [delta_attention(**given, degree=2, backend="chunked")], ["o"], torch.float32)
    assert "plain torch in chunks" in caplog.text


def arguments(given: Inputs) -> tuple[Any, ...]:
    """Of the forward kernels."""
    from rebased.ops.delta.api import UNIT_EPS
    from rebased.ops.delta.gpu.operators import to_kernels

    state = to_kernels(given["state"], given["q"].shape[3], 2)
    return (*(given[name] for name in ("q", "k", "v", "beta")), None, state, None, 2, True, UNIT_EPS)


def differentiated(given: Inputs) -> list[Any]:
    """The gradients in plain torch, as the backward kernels return them."""
    from rebased.ops.delta.gpu import operators

    args = arguments(given)
    with plain_torch():
        found = operators._differentiate(given["do"], torch.zeros_like(args[5]), *args)
    return [given["q"].new_empty(0) if x is None else x for x in found]


def without_last_tile(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :-64], torch.zeros_like(x[:, -64:])], 1)


BREAKS: dict[str, Callable[[Inputs], list[Any]]] = {
    "a factor 2 is missing": lambda given: [x / (2 if n == 1 else 1) for n, x in enumerate(differentiated(given))],
    "a tile is dropped": lambda given: differentiated(given | {"do": without_last_tile(given["do"])}),
    "a mask is shifted": lambda given: differentiated(given | {"do": given["do"].roll(1, 1)}),
    "beta is missing": lambda given: differentiated(given | {"beta": torch.ones_like(given["beta"])}),
}


@pytest.mark.parametrize("kind", ["random", "recall"])
def test_broken_gradients_are_found(kind: str) -> None:
    """With the tolerance of TF32, on random data and on that of a recall task."""
    from rebased.ops.delta.gpu import operators

    torch.manual_seed(0)
    given = recall_inputs(1, 256, 2, 16, 16, torch.float32)
    if kind == "random":
        given |= delta_inputs(1, 256, 2, 16, 16, 2, decay=None) | {"do": torch.randn_like(given["do"])}

    def error(gradients: list[Any]) -> float:
        args = arguments(given)
        call = (given["do"], torch.zeros_like(args[5]), *args[:7], *(None,) * 5, *args[7:])
        with plain_torch(), patch.object(operators, "choose_products", lambda q: "tf32"):
            return max(operators._compare_backward(call, gradients).values())

    assert error(differentiated(given)) < 0.1
    assert {name: error(make(given)) > 4 for name, make in BREAKS.items()} == dict.fromkeys(BREAKS, True)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "highest"), ("float32", "high"), ("float32", "highest")])
def test_a_recall_task_on_a_gpu(dtype: str, precision: str) -> None:
    """The self-check takes right kernels for right in every row, also where one small score is all of a gradient."""
    from rebased.ops.delta.gpu import operators

    torch.manual_seed(0)
    given = recall_inputs(16, 256, 4, 16, 16, getattr(torch, dtype), "cuda")
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found: list[Errors] = []
        for row in range(16):
            one = {name: x[row : row + 1] for name, x in given.items()}
            args = arguments(one)
            with plain_torch():
                o, final, *buffers = operators._forward._init_fn(*args)
                call = (one["do"], torch.zeros_like(final), *args[:7], *buffers, *args[7:])
                gradients = operators._backward._init_fn(*call)
                found += operators._compare(args, (o, final)), operators._compare_backward(call, gradients)
    finally:
        torch.set_float32_matmul_precision(former)
    assert max(max(errors.values()) for errors in found) < 1, found


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [None, 0.1, 5.0])
@pytest.mark.parametrize(
    ("shape", "degree", "dtype"),
    [
        (shape, degree, dtype)
        for shape, degree in (
            ((2, 1000, 3, 16, 64), 2),
            ((1, 257, 2, 5, 7), 2),
            ((1, 1, 1, 9, 100), 2),
            ((2, 1000, 2, 128, 128), 1),
            ((1, 4096, 2, 128, 64), 1),
            ((1, 300, 1, 64, 5), 1),
            ((1, 300, 1, 32, 32), 1),
            ((1, 257, 2, 24, 40), 1),
            ((1, 257, 2, 32, 100), 1),
        )
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
        if dtype == torch.bfloat16 or shape[3] <= 32
    ],
    ids=str,
)
def test_on_a_gpu(shape: tuple[int, ...], degree: int, decay: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = delta_inputs(*shape, degree, decay=decay, dtype=dtype, device="cuda")  # type: ignore[arg-type,misc]
    assert_matches(given, degree=degree)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [None, 1.0])
@pytest.mark.parametrize(("K", "degree"), [(16, 2), (5, 2), (128, 1), (24, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_documents_on_a_gpu(K: int, degree: int, decay: float | None, dtype: torch.dtype) -> None:
    """Against one call per document: the same kernels with the same products."""
    torch.manual_seed(0)
    K, bounds = K if dtype == torch.bfloat16 else min(K, 32), [0, 1, 1, 64, 129, 700, 701, 1900, 1900]
    given = delta_inputs(1, bounds[-1], 3, K, 64, degree, decay=decay, dtype=dtype, device="cuda")
    given["state"] = torch.randn(len(bounds) - 1, *given["state"].shape[1:], device="cuda")
    tokens = {name: x for name, x in given.items() if name != "state"}
    got = results(given, "triton", degree=degree, cu_seqlens=torch.tensor(bounds, device="cuda"))
    assert_matches(given, degree=degree, cu_seqlens=torch.tensor(bounds, device="cuda"))
    for n, (i, j) in enumerate(pairwise(bounds)):
        if i < j:
            alone = {name: x[:, i:j] for name, x in tokens.items()} | {"state": given["state"][n : n + 1]}
            o, after = delta_attention_extend(**alone, degree=degree, backend="triton")  # type: ignore[arg-type]
            parts = [got["o"][:, i:j], got["after"][n : n + 1]]
            assert_small_error(parts, [o.double(), after.double()], ["o", "after"], dtype)


@pytest.mark.gpu
def test_65536_tokens_on_a_gpu() -> None:
    torch.manual_seed(0)
    for degree in (1, 2):
        given = delta_inputs(1, 65_536, 1, 16, 16, degree, decay=0.01, dtype=torch.bfloat16, device="cuda")
        assert_matches(given, degree=degree)


@pytest.mark.gpu
def test_compiles_and_is_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = delta_inputs(2, 200, 2, 16, 64, 2, device="cuda")
    del given["state"]
    expected = delta_attention(**given, degree=2)
    compiled = torch.compile(delta_attention, fullgraph=True)(**given, degree=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = delta_attention(**given, degree=2)
    graph.replay()
    assert_small_error([compiled, o], [expected, expected], ["compiled", "replayed"], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_a_step_on_a_gpu(dtype: torch.dtype, gate: str) -> None:
    degree = 1 if gate == "channel" else 2
    given, rule = step_inputs(40, 3, 16, 64, degree=degree, gate=gate, dtype=dtype, device="cuda")
    want = delta_attention_extend(**{name: x.double() for name, x in given.items()}, **rule, backend="reference")
    state = given["state"].clone()
    got = delta_attention_extend(**given, **rule, backend="triton")
    again = delta_attention_extend_(**given | {"state": state}, **rule, backend="triton")
    assert_small_error([*got, again, state], [*want, *want], ["o", "after", "o_", "after_"], dtype)
