"""The runner that computes classes of kernels, with kernels interpreted: what it finds right, and what wrong."""

from typing import Any

import pytest
import torch

from kernels import compute_classes
from kernels.classes import Call, classes_of, launches
from kernels.compute_classes import compute
from rebased.ops.backend import triton_interpreted

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("polynomial")]
CALLS = [
    Call("fp32", 5, 3, 70, False),
    Call("fp32", 16, 16, 65, True, "packed", "fused"),
    Call("fp32", 5, 8, 66, True, "extend", "odd", 2, 1),
    Call("fp32", 5, 8, 6, False, "extend o", "heads"),
    Call("fp32", 5, 8, 66, False, "at", "expanded", 2, 2),
    Call("fp32", 5, 8, 1, True, "decode", "heads", 2, 2),
    Call("fp16", 9, 3, 1, False, "plain", "expanded"),
]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(compute_classes, "DEVICE", "cpu")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.kind}-{call.layout}")
def test_a_call_is_right_and_launches_what_was_planned(call: Call) -> None:
    done = compute(call)
    assert done.problem == ""
    assert done.error < 0.5
    assert set(done.classes) == {name for each in launches(call) for name in classes_of(each)}


@pytest.mark.parametrize("name", ["o", "dk"])
def test_a_wrong_row_is_a_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = compute_classes.run

    def wrong(call: Call, inputs: Any, law: bool = False) -> dict[str, torch.Tensor]:
        found = run(call, inputs, law)
        if not law:
            found[name][0, 3, 1] *= 1.1
        return found

    monkeypatch.setattr(compute_classes, "run", wrong)
    assert name in compute(Call("fp32", 5, 3, 20, True)).problem
