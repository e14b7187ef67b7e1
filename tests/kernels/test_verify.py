"""`rebased kernels verify`: what is right, what is wrong, and what fell back on this machine."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.cli import main
from rebased.kernels import verify as module
from rebased.kernels.verify import Verification, errors, tolerance, verify
from rebased.kernels.verify_cases import HEADS, Case, torch_cases
from rebased.ops.polynomial import chunked
from rebased.ops.polynomial.state import PolyState

CPU = torch.device("cpu")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["kernels", "verify", "--device", "cpu", *words])
    return int(left.value.code or 0), capsys.readouterr().out


def few_cases() -> Iterator[Case]:
    """Every operator once, in fp32."""
    found = {case.operator: case for case in torch_cases() if case.dtype == torch.float32 and "128" not in case.widths}
    yield from found.values()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_cases", few_cases)


@pytest.mark.usefixtures("few")
def test_this_machine_computes_right(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys)
    lines = text.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["operator", "dtype", "widths"]
    assert lines[-1].startswith(f"this machine computes right: {len(list(few_cases()))} cases (")
    assert f"torch: {torch.__version__}" in lines
    assert any(line.startswith("backend auto: chunked (") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("few")
def test_a_wrong_row_of_one_operator_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of one head has its values in another order, as a wrong tile leaves it."""
    extend = chunked.extend

    def wrong(*args: Any, **options: Any) -> tuple[Tensor, PolyState]:
        o, state = extend(*args, **options)
        o = o.clone()
        o[1, 70, 1] = o[1, 70, 1].flip(-1)
        return o, state

    monkeypatch.setattr(chunked, "extend", wrong)
    code, text = run(capsys, "--json")
    found = json.loads(text)
    assert code == 1
    wrong_ones = [case["operator"] for case in found["cases"] if not case["right"]]
    assert wrong_ones == ["poly_attention_extend"]
    assert found["verdict"].startswith(
        f"WRONG on this machine: poly_attention_extend (1 of {len(found['cases'])} cases,"
    )
    code, text = run(capsys)
    assert code == 1
    table = text.splitlines()[1 : 1 + len(found["cases"])]
    for line, case in zip(table, found["cases"], strict=True):  # the same numbers
        assert line.startswith(case["operator"])
        assert {f"{case['error']:.1e}", f"{case['tolerance']:.1e}"} <= {*line.split()}
        assert line.endswith(case["computed_by"] if case["right"] else "WRONG")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_garbage_in_one_row_of_a_head_does_not_hide_in_the_norm(dtype: torch.dtype) -> None:
    case = next(case for case in torch_cases() if case.dtype == dtype)
    limit = tolerance(case, CPU)
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(1, 4096, HEADS, 64, generator=generator)
    want[:, :, 0] *= 1e3  # a head of larger numbers
    got = want.clone()
    got[0, 77, 1] = 0
    by_norm, largest = errors(got, want)
    assert by_norm < 2e-2
    assert largest > module.PEAK * limit
    assert errors(want.to(dtype), want)[1] < limit
    got[0, 77, 1, 0] = math.nan
    assert errors(got, want) == (math.inf, math.inf)
    assert errors(torch.zeros(3), torch.zeros(3)) == (0, 0)
    assert errors(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]))[0] == 0.25


def one_case(compute: Callable[..., Tensor]) -> Case:
    def draw(generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"x": torch.randn(4, 8, generator=generator)}, {}

    return Case("double", torch.float32, "D 8", 1, draw, lambda x: {"y": compute(x)}, (1,), gradients=False)


def test_a_call_that_fails_is_wrong_and_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no such instruction\nand where")

    monkeypatch.setattr(module, "torch_cases", lambda: [one_case(fail)])
    code, text = run(capsys)
    assert code == 1
    assert "    RuntimeError: no such instruction\n" in text
    code, text = run(capsys, "--json")
    assert json.loads(text)["cases"][0]["error"] is None


class TestFallingBack:
    """With an operator whose kernel does not compile."""

    @pytest.fixture
    def case(self, monkeypatch: pytest.MonkeyPatch) -> Case:
        pytest.importorskip("triton")
        from triton.errors import TritonError

        from rebased.ops import self_check

        monkeypatch.setattr(self_check, "OPERATORS", {})

        def kernel(x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                return 2 * x
            raise TritonError("out of registers")

        return one_case(self_check.checked(lambda x: 2 * x)(kernel))

    def found(self, case: Case) -> Verification:
        return verify("cpu", cases=[case, case])

    def test_it_is_reported_and_is_not_wrong(
        self, case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = self.found(case)
        assert found.right
        assert [each.computed_by for each in found.cases] == ["torch", "torch"]  # the second was known before
        assert "out of registers" in str(found.cases[0].problem)
        monkeypatch.setattr(module, "torch_cases", lambda: [case])
        code, text = run(capsys)
        assert code == 0
        assert text.splitlines()[-1].startswith("this machine computes right: 1 case; 1 of them without")

    def test_it_is_an_error_where_the_self_check_is_strict(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REBASED_SELF_CHECK", "strict")
        found = self.found(case)
        assert found.wrong == found.cases
        assert str(found.cases[0].problem).startswith("KernelError: ")


def test_earlier_verdicts_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REBASED_CACHE", str(tmp_path))
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(os.environ["REBASED_CACHE"])
        return x

    verify("cpu", cases=[one_case(look)])
    assert str(tmp_path) not in seen
    assert os.environ["REBASED_CACHE"] == str(tmp_path)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = verify("cuda", processes=4)
    assert found.wrong == []
    assert [case for case in found.cases if case.computed_by != "triton"] == []
    assert found.seconds < 120
