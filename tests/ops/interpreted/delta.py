"""The kernels of the delta rule against fp64: odd sizes, gradients, and memory that starts as NaN.

The self-check runs too (conftest.py): it compares every result number by number.
"""

from typing import Any

import numpy as np
import pytest
import torch

from kernels.classes import recorded_launches
from ops.delta_cases import assert_matches, delta_inputs, results, step_inputs
from rebased.ops import delta_attention, delta_attention_extend, delta_attention_extend_
from rebased.ops.backend import triton_interpreted
from rebased.ops.delta.gpu import operators
from rebased.ops.self_check import OPERATORS
from tolerances import assert_small_error, relative_error, unit_roundoff

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("shape", "degree", "options"),
    [
        ((1, 130, 2, 16, 20), 2, {}),
        ((2, 65, 1, 5, 3), 2, {"decay": None}),
        ((1, 64, 1, 9, 40), 2, {"decay": 5.0}),
        ((1, 1, 2, 16, 16), 2, {"unit": True}),
        ((1, 130, 2, 24, 20), 1, {}),
        ((2, 63, 1, 5, 3), 1, {"decay": None, "unit": True}),
        ((1, 70, 1, 32, 70), 1, {"decay": 0.01}),
    ],
    ids=str,
)
def test_kernels(shape: tuple[int, int, int, int, int], degree: int, options: dict[str, Any]) -> None:
    assert triton_interpreted()
    given = delta_inputs(*shape, degree, **options)
    assert_matches(given, degree=degree, normalise=not options.get("unit"))


@pytest.mark.parametrize(("K", "degree", "decay"), [(9, 2, 5.0), (5, 2, None), (24, 1, 5.0)])
def test_tensor_cores_cut_nothing_off(
    K: int, degree: int, decay: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TF32 they ignore the last 13 bits of factors. Such errors lean to one side: over 130 tokens they added up to
    1.5 times the limit, and gradients of strong decays were off by 0.5 %, where terms no longer cancelled."""
    from triton.runtime.interpreter import InterpreterBuilder

    given = delta_inputs(1, 130, 1, K, 20, degree, decay=decay, dtype=torch.float16)
    dot, cut_off = InterpreterBuilder.create_dot, list[int]()

    def counted(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        assert precision.name == "TF32"
        cut_off.extend(int((np.ascontiguousarray(x.data).view(np.int32) & 0x1FFF != 0).sum()) for x in (a, b))
        return dot(self, a, b, d, precision, most)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    results(given, "triton", degree=degree)
    assert set(cut_off) == {0}


def test_wide_keys_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernels do not take them: a compiled one left its memory. These keep to theirs (conftest.py)."""
    monkeypatch.setattr(operators, "WIDEST_EXACT", 64)
    assert_matches(delta_inputs(1, 70, 1, 64, 20, 1), degree=1)


def test_decays_whose_inverse_overflows() -> None:
    """Up to e^-60 per token. A difference of two sums of decays is off by their size times u; so is its exponential."""
    given = delta_inputs(1, 64, 1, 9, 4, 2, decay=60.0)
    got = results(given, "triton", degree=2)
    want = results({name: x.double() for name, x in given.items()}, "chunked", degree=2)
    size = float(given["log_decay"].sum().abs())
    assert size > 1000
    for name in got:
        assert relative_error(got[name], want[name]) < size * unit_roundoff(torch.float32), name


def test_a_token_that_forgets_everything() -> None:
    """Sums over -1e9 would lose the digits of all decays after it."""
    given = delta_inputs(1, 64, 1, 9, 4, 2)
    given["log_decay"][:, 20] = -1e9
    after = {name: x[:, 20:] for name, x in given.items() if name != "state"}
    whole = {name: x for name, x in given.items() if name != "state"}
    got = delta_attention(**whole, degree=2, backend="triton")[:, 20:]
    want = delta_attention(**{name: x.double() for name, x in after.items()}, degree=2, backend="reference")
    assert relative_error(got, want) < 8 * 104 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("degree", [1, 2])
def test_equal_keys_and_no_strength(degree: int) -> None:
    """All keys of a chunk are equal, which makes powers of A huge; and beta is 0, 1 and 2."""
    given = delta_inputs(1, 70, 1, 8, 4, degree)
    given["k"][:, 10:] = given["k"][:, 10:11]
    given["beta"] = torch.arange(70.0).view(1, 70, 1) % 3
    assert_matches(given, degree=degree)


def test_strided_inputs_and_documents() -> None:
    """q, k and v are views of one projection, with heads before tokens; the row holds documents."""
    given = delta_inputs(1, 90, 2, 8, 6, 2)
    bounds = torch.tensor([0, 20, 20, 90])
    apart = [{name: x[:, i:j] for name, x in given.items() if name != "state"} for i, j in ((0, 20), (20, 90))]
    wide = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in given.items() if name in "qkv"}
    whole = {name: x for name, x in given.items() if name != "state"} | wide
    got = delta_attention(**whole, degree=2, cu_seqlens=bounds, backend="triton")
    want = torch.cat([delta_attention(**each, degree=2, backend="chunked") for each in apart], dim=1)
    assert_small_error([got], [want], ["o"], torch.float32)


@pytest.mark.parametrize(
    ("shape", "degree", "options", "bounds"),
    [
        ((1, 130, 2, 16, 20), 2, {}, [0, 1, 1, 66, 130]),
        ((1, 70, 1, 9, 5), 2, {"decay": None}, [0, 0, 5, 70]),
        ((1, 100, 2, 24, 20), 1, {"decay": 5.0}, [0, 63, 100, 100]),
        ((1, 3, 1, 5, 3), 1, {"decay": None, "unit": True}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_packed_documents_are_one_call(
    shape: tuple[int, int, int, int, int], degree: int, options: dict[str, Any], bounds: list[int]
) -> None:
    """Each after a state of its own; also one token, no token, and chunks that nobody fills."""
    given = delta_inputs(*shape, degree, **options)
    given["state"] = torch.randn(len(bounds) - 1, *given["state"].shape[1:])
    rule = {"degree": degree, "normalise": not options.get("unit"), "cu_seqlens": torch.tensor(bounds)}
    with recorded_launches(run=True) as found:
        assert_matches(given, **rule)
    names = ["prepare", "states", "outputs", "local", "grad_states", "gradients"]
    assert [launched.kernel.__name__ for launched, _ in found] == [f"{name}_kernel" for name in names]


STEPS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [  # B, H, K, V
    ((2, 2, 16, 20), {"degree": 2}),
    ((2, 3, 5, 3), {"degree": 2, "centred": True, "gate": "head"}),
    ((1, 2, 40, 130), {"degree": 1, "gate": "channel"}),
    ((3, 1, 1, 1), {"degree": 1, "beta": False, "gate": "head", "normalise": False}),
    ((1, 2, 9, 65), {"degree": 2, "beta": False, "dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("shape", "options"), STEPS, ids=str)
def test_a_step_is_one_kernel(shape: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    given, rule = step_inputs(*shape, **options)
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    want = delta_attention_extend(**exact, **rule, backend="reference")
    state = given["state"].clone()
    with recorded_launches(run=True) as found:
        got = delta_attention_extend(**given, **rule, backend="triton")
        again = delta_attention_extend_(**given | {"state": state}, **rule, backend="triton")
    assert [launched.kernel.__name__ for launched, _ in found] == ["decode_kernel"] * 2
    dtype = given["q"].dtype
    assert_small_error([*got, again, state], [*want, *want], ["o", "after", "o_", "after_"], dtype)


def test_a_step_of_strided_inputs_in_memory_of_nan() -> None:
    """q, k and v are views of one projection, heads are padded, and q is shared by heads."""
    given, rule = step_inputs(2, 3, 8, 6, degree=2, gate="head")
    wide = torch.full((2, 1, 3, 40), torch.nan)
    for name, (first, last) in {"k": (1, 9), "v": (12, 18)}.items():
        wide[..., first:last] = given[name]
        given[name] = wide[..., first:last]
    given["q"] = given["q"][:, :, :1].expand(-1, -1, 3, -1)
    got = delta_attention_extend(**given, **rule, backend="triton")
    want = delta_attention_extend(**{name: x.double() for name, x in given.items()}, **rule, backend="reference")
    assert_small_error(got, want, ["o", "after"], torch.float32)


def test_kernels_that_were_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes the forward pass, which leaves no buffers: so torch computes the backward pass too."""

    class Everything(set[Any]):
        def __contains__(self, kind: object) -> bool:
            return True

    monkeypatch.setattr(OPERATORS["delta.gpu.operators.forward"], "demoted", Everything([0]))
    assert_matches(delta_inputs(1, 70, 1, 8, 4, 2), degree=2)
    packed = delta_inputs(1, 70, 1, 8, 4, 2)
    packed["state"] = packed["state"].repeat(2, 1, 1, 1)
    assert_matches(packed, degree=2, cu_seqlens=torch.tensor([0, 7, 70]))


def test_half_precision() -> None:
    assert_matches(delta_inputs(1, 70, 1, 16, 8, 2, dtype=torch.float16), degree=2)


@pytest.mark.parametrize("bounds", [None, [0, 2, 5]], ids=str)
def test_compiles_as_one_graph(bounds: list[int] | None) -> None:
    """aot_eager: tracing and its fake tensors, without the minute that generating code takes."""
    given = delta_inputs(1, 5, 1, 4, 4, 2)
    given.pop("state")
    leaves = [x.requires_grad_() for x in given.values()]
    compiled = torch.compile(delta_attention, backend="aot_eager", fullgraph=True)
    rule: dict[str, Any] = {"degree": 2, "backend": "triton"}
    if bounds is not None:
        rule["cu_seqlens"] = torch.tensor(bounds)
        torch._dynamo.mark_dynamic(rule["cu_seqlens"], 0)  # no two batches have as many documents
    o = compiled(*leaves, **rule)
    want = delta_attention(*leaves, **rule)
    got_grads, want_grads = (torch.autograd.grad(x.sum(), leaves) for x in (o, want))
    assert_small_error([o, *got_grads], [want, *want_grads], ["o", *given], torch.float32)


def test_a_chunk_that_is_not_finite_does_not_reach_back() -> None:
    given = delta_inputs(1, 130, 1, 8, 4, 2)
    given["v"][:, 100] = torch.nan
    o = delta_attention(**{name: x for name, x in given.items() if name != "state"}, degree=2, backend="triton")
    assert o[:, :64].isfinite().all()
    assert results(given, "chunked", degree=2)["o"][:, :64].isfinite().all()
