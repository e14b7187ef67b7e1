"""benchmarks/rounding.py: without roundings it is the equation, with them it is close to it."""

import pytest
import torch

pytest.importorskip("triton")  # the kernels' package imports it, though their plan is arithmetic

from benchmarks import rounding

from rebased.ops.polynomial import reference


@pytest.mark.parametrize("chunk", [None, 16])
def test_is_the_equation(chunk: int | None) -> None:
    inputs = rounding.make_inputs(64, seed=0, heads=2)
    q, k, v, do = (x.transpose(0, 1).unsqueeze(0).double() for x in inputs[:4])  # [1,T,H,*]
    for x in (q, k, v):
        x.requires_grad_()
    o = reference.attend(q, k, v, coefficients=(0.0, 0.0, 1.0), scale=1.0, eps=0.0)
    law = [x.detach()[0].transpose(0, 1) for x in (o, *torch.autograd.grad(o, (q, k, v), do))]
    for case, least, most in ((rounding.NOTHING, 0.0, 1e-4), (rounding.Roundings(), 1e-3, 1e-2)):
        errors, norms = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        rounding.add(errors, norms, "it", rounding.rebased(inputs, case, chunk), law)
        found = (errors["it"] / norms["it"]).sqrt()
        assert ((found >= least) & (found < most)).all(), found


def test_the_command_changes_each_rounding_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounding, "TOKENS", 2048)
    found = rounding.main(["64", "-K", "8"])
    assert {name for _, name in found} >= {"as the kernels do", "near_slopes in bf16", "all in bf16", "softmax"}
    for kept, plain in zip(found[64, "as the kernels do"], found[64, "all in bf16"], strict=True):
        assert 1e-3 < kept < plain
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found)
