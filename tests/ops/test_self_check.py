"""rebased.ops.self_check: wrong kernels are found, and no wrong first result is handed out."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from rebased.ops import self_check
from rebased.ops.comparison import some
from rebased.ops.self_check import KernelError, checked, note_first_launch


class Compiled:
    """A stand-in for what Triton compiled."""

    def __init__(self, code: bytes) -> None:
        self.asm = {"cubin": code}


class Doubling:
    """An operator that doubles x, and adds x to `total` in place; its kernels can be told to be wrong."""

    def __init__(self, *, code: bytes = b"code", offset: float = 0.0, safe: bool = False) -> None:
        self.offset, self.code, self.forgotten, self.runs = offset, code, 0, 0
        self.launched = False
        self.safe_left = safe
        self.error: Exception | None = None
        self.call = checked(self.in_torch, safer=self.safer)(self.run)

    def run(self, x: Tensor, total: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        self.runs += 1
        before = {total.data_ptr(): total.clone()}
        total += x + self.offset
        if not self.launched:
            self.launched = True
            note_first_launch("doubling_kernel", Compiled(self.code), self.forget, before)
        return 2 * x + self.offset

    def in_torch(self, x: Tensor, total: Tensor) -> Tensor:
        total += x
        return 2 * x

    def safer(self, *_: Any) -> bool:
        had, self.safe_left = self.safe_left, False
        if had:
            self.offset, self.code, self.error = 0.0, b"safe", None
        return had

    def forget(self) -> None:
        self.forgotten += 1
        self.launched = False


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REBASED_CACHE", str(tmp_path))
    monkeypatch.delenv("REBASED_SELF_CHECK", raising=False)
    monkeypatch.setattr(self_check, "_verdicts", {})
    self_check.machine.cache_clear()
    return tmp_path / "kernels"


X = torch.arange(1.0, 7.0).reshape(2, 3)


def call(operator: Doubling) -> tuple[Tensor, Tensor]:
    total = torch.ones(2, 3)
    return operator.call(X, total), total


def test_right_kernels_are_judged_once(folder: Path) -> None:
    operator = Doubling()
    for _ in range(3):
        y, total = call(operator)
        assert torch.equal(y, 2 * X)
        assert torch.equal(total, 1 + X)
    assert (operator.runs, operator.forgotten, len(list(folder.iterdir()))) == (3, 0, 1)
    (verdict,) = folder.iterdir()
    assert json.loads(verdict.read_text())["right"] is True


def test_wrong_kernels_hand_nothing_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not the first result, not what they overwrote, not a later one; and one warning says so."""
    operator = Doubling(offset=1.0)
    with caplog.at_level(logging.WARNING, "rebased"):
        for _ in range(3):
            y, total = call(operator)
            assert torch.equal(y, 2 * X)
            assert torch.equal(total, 1 + X)
    assert operator.runs == 1
    (record,) = caplog.records
    said = record.getMessage()
    assert "doubling_kernel" in said
    assert f"torch {torch.__version__}" in said
    assert "times its tolerance" in said
    assert "plain torch" in said


def test_safe_tiles_come_before_torch(caplog: pytest.LogCaptureFixture) -> None:
    operator = Doubling(offset=1.0, safe=True)
    for _ in range(2):
        y, total = call(operator)
        assert torch.equal(y, 2 * X)
        assert torch.equal(total, 1 + X)
    assert operator.runs == 3  # wrong, safe, safe
    assert "other tiles" in caplog.text


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    "error", [OutOfResources(131_072, 101_376, "shared memory"), RuntimeError("PassManager::run failed")]
)
def test_a_kernel_that_does_not_fit_or_compile(error: Exception, safe: bool, caplog: pytest.LogCaptureFixture) -> None:
    operator = Doubling(safe=safe)
    operator.error = error
    y, total = call(operator)
    assert torch.equal(y, 2 * X)
    assert torch.equal(total, 1 + X)
    assert operator.runs == int(safe)
    assert str(error).partition(",")[0] in caplog.text


def test_another_error_is_the_callers() -> None:
    operator = Doubling(safe=True)
    operator.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        call(operator)


def test_a_verdict_is_found_again_and_damage_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(operator: Doubling) -> bool:
        with monkeypatch.context() as patch:
            seen: list[Any] = []
            patch.setattr(self_check, "_listeners", [seen.append])
            monkeypatch.setattr(self_check, "_verdicts", {})  # another process
            call(operator)
        return bool(seen)

    assert compared(Doubling())
    assert not compared(Doubling())
    assert compared(Doubling(code=b"other code"))
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("true", "false"))  # a checksum does not match
    assert compared(Doubling())
    assert not compared(Doubling())


def test_a_known_wrong_kernel_is_not_tried_again() -> None:
    call(Doubling(offset=1.0))
    again = Doubling(offset=1.0)
    y, _ = call(again)
    assert torch.equal(y, 2 * X)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REBASED_CACHE", str(tmp_path / "file"))
    y, _ = call(Doubling())
    assert torch.equal(y, 2 * X)


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBASED_SELF_CHECK", "strict")
    with pytest.raises(KernelError, match=r"doubling_kernel .* wrong numbers .* REBASED_BACKEND=chunked"):
        call(Doubling(offset=1.0))
    call(Doubling(code=b"another"))


def test_an_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBASED_SELF_CHECK", "yes")
    with pytest.raises(ValueError, match="choose on, off or strict"):
        self_check.when_to_check("a kernel")


@pytest.mark.parametrize(("mode", "when"), [("on", "later"), ("off", "never")])
def test_while_a_graph_is_captured(mode: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setenv("REBASED_SELF_CHECK", mode)
    assert self_check.when_to_check("a kernel") == when
    monkeypatch.setenv("REBASED_SELF_CHECK", "strict")
    with pytest.raises(KernelError, match="captured"):
        self_check.when_to_check("a kernel")


def test_nothing_is_judged_by_numbers_that_are_not_finite(folder: Path) -> None:
    operator = Doubling(offset=1.0)
    broken = X.clone()
    broken[0, 0] = torch.nan
    operator.call(broken, torch.ones(2, 3))
    assert (operator.forgotten, folder.exists()) == (1, False)
    y, _ = call(operator)  # the next call is the first again
    assert torch.equal(y, 2 * X)


def test_an_error_of_the_device_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    operator = Doubling()
    monkeypatch.setattr(self_check.OPERATORS["test_self_check.run"], "errors", fail)
    with pytest.raises(KernelError, match=r"illegal memory access .*doubling_kernel.* REBASED_BACKEND=chunked"):
        call(operator)


def test_some_takes_the_ends_and_every_row_of_a_tile() -> None:
    for count in (5, 64, 72, 73, 200, 4096):
        chosen = some(count, 72, every=64)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(count, 72)
        assert {0, count - 1} <= set(chosen)
        assert count < 64 or {number % 64 for number in chosen} == set(range(64))


@pytest.mark.gpu
def test_a_broken_tile_on_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All warps of a forward kernel but the first write wrong rows; safe tiles do not, and are taken."""
    from rebased.ops import REBASED, poly_attention
    from rebased.ops.kernel_launch import Launch
    from rebased.ops.polynomial.gpu import plan
    from rebased.ops.polynomial.gpu.call import make_call
    from tolerances import KERNEL_ERRORS, relative_error

    launch = Launch.__call__

    def broken(self: Any, *args: Any, **options: Any) -> None:
        launch(self, *args, **options)
        if self.kernel.__name__ == "forward_kernel" and self.constants["BM"] == 64 and not args[0].is_meta:
            o = args[3]
            o[:, torch.arange(o.shape[1]) % 64 >= 16] *= 1.5

    monkeypatch.setattr(Launch, "__call__", broken)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 300, 3, w, device="cuda", generator=generator).bfloat16() for w in (16, 16, 48))
    want = poly_attention(q.double(), k.double(), v.double(), coefficients=REBASED, backend="reference")
    try:
        for _ in range(2):
            got = poly_attention(q, k, v, coefficients=REBASED)
            assert relative_error(got, want) < KERNEL_ERRORS[torch.bfloat16]
        assert ("bf16", 16, 48) in plan.SAFE_WIDTHS
    finally:
        plan.SAFE_WIDTHS.clear()
        make_call.cache_clear()
    assert "forward_kernel" in caplog.text
