"""The checks of the mixer contract have teeth: each wrong mixer fails the check that is meant for its fault."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.evaluate.checks import CheckResult
from rebased.evaluate.mixer_checks import CHECKS
from rebased.evaluate.mixer_contract import run_mixer_contract
from rebased.mixers import register_mixer


class Good(nn.Module):
    """A running mean with a state: passes everything."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        return self.extend(x, self.init_state(len(x), device=x.device, dtype=x.dtype))[0]

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.out_proj.weight.new_zeros(batch, self.state_size(0), device=device, dtype=dtype)

    def extend(self, x: Tensor, state: Tensor) -> Any:
        sums = nn.functional.pad(x, (0, 1), value=1.0).cumsum(1) + state.unsqueeze(1)  # [B,T,D+1]
        return self.out_proj(sums[..., :-1] / sums[..., -1:]), sums[:, -1]

    def state_size(self, seq_len: int) -> int:
        return len(self.out_proj.weight) + 1

    def attention_map(self, x: Tensor) -> Tensor:
        ones = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return ones / ones.sum(-1, keepdim=True)

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(attention.squeeze(1) @ x)


class LooksAhead(Good):
    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(x + x.roll(-1, 1))


class MultipliesMasked(Good):
    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x)


class DividesByZero(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x.shape[1] == 1) / torch.zeros((), dtype=x.dtype)


class OverflowsInSingle(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.inf if x.dtype == torch.float32 else 1)


class ReturnsTuple(Good):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class WrongShape(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :-1]


class WrongDtype(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class MixesRows(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(0))


class ChangesState(Good):
    def extend(self, x: Tensor, state: Tensor) -> Any:
        y, after = super().extend(x, state)
        return y, state.copy_(after)


class WrongSize(Good):
    def state_size(self, seq_len: int) -> int:
        return super().state_size(seq_len) + (seq_len > 0)


class ExtendDiffers(Good):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ExtendReturnsTensor(Good):
    def forward(self, x: Tensor) -> Tensor:
        return Good.extend(self, x, self.init_state(len(x), dtype=x.dtype))[0]

    def extend(self, x: Tensor, state: Tensor) -> Any:
        return super().extend(x, state)[0]


class Remembers(Good):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


class UnusedWeight(Good):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.unused = nn.Parameter(torch.ones(d_model))


class WrongGradient(Good):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y.detach()


class DeclaresNothingThere(Good):
    residual_projections = ("output",)


class ShowsAnotherMatrix(Good):
    def attention_map(self, x: Tensor) -> Tensor:
        return torch.eye(x.shape[1], dtype=x.dtype).expand(len(x), 1, -1, -1)


class ShowsTheFuture(Good):
    def attention_map(self, x: Tensor) -> Tensor:
        return super().attention_map(x).flip(3)


class ShowsOneHeadOnly(Good):
    def attention_map(self, x: Tensor) -> Tensor:
        return super().attention_map(x).squeeze(1)


class RoundsTooMuch(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.5 if x.dtype == torch.bfloat16 else 1)


class StepsDiffer(Good):
    def extend(self, x: Tensor, state: Tensor) -> Any:
        y, after = super().extend(x, state)
        return (y + 1 if x.shape[0] > 1 and x.shape[1] == 1 else y), after


class JoinsDocuments(Good):
    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.forward(x)


class JoinsPrompts(Good):
    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.extend(x, state[:1])[0], state


class Raises(Good):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :, 1:]]) if len(x) > 1 else super().forward(x)


FAULTS: list[tuple[type[Good], str, str]] = [
    (
        LooksAhead,
        "never_looks_ahead[at=10]",
        r"^the output before position 10, after a change of x from 10 on: the largest difference is [\d.e-]+; at most "
        r"[\d.e-]+ is allowed$",
    ),
    (LooksAhead, "gradients_never_look_ahead", "in x from position 10 on"),
    (MultipliesMasked, "not_finite_reaches_no_other[nan]", "nan at position 10 reaches earlier outputs"),
    (MultipliesMasked, "not_finite_reaches_no_other[inf]", "inf at position 10 reaches earlier outputs"),
    (MixesRows, "not_finite_reaches_no_other[nan]", "other rows, with nan in row 0: 1056 of 2016 numbers are NaN"),
    (DividesByZero, "output_is_finite", "48 of 48 numbers of the output at a random x .1, 1, 48. are NaN"),
    (OverflowsInSingle, "keeps_dtype[float32]", "against torch.float64: 3024 of 3024 numbers are NaN or infinite"),
    (ReturnsTuple, "keeps_shape[T=7]", "returned a tuple; forward must return one tensor of x's shape"),
    (WrongShape, "keeps_shape[T=7]", r"returned the shape \[1, 6, 48\]; forward must return x's shape"),
    (WrongDtype, "keeps_dtype[float32]", "returned torch.float64; forward must return x's dtype, torch.float32"),
    (MixesRows, "rows_are_apart", "row 0 of a batch against this row alone: the largest difference is"),
    (ChangesState, "given_state_is_not_changed", "extend changed the state"),
    (WrongSize, "state_has_declared_size[T=5]", "holds 147 numbers; state_size says 150"),
    (
        ExtendDiffers,
        "extend_is_forward_in_pieces[20+1, float64]",
        "pieces of .20, 1. against forward: the largest difference is",
    ),
    (ExtendReturnsTensor, "extend_is_forward_in_pieces[21, float64]", "extend must return .y, state."),
    (Remembers, "weights_decide_everything", "keeps something of its last call"),
    (UnusedWeight, "every_parameter_has_gradient", "unused has no gradient"),
    (WrongGradient, "gradients_match_differences", "by central differences"),
    (DeclaresNothingThere, "residual_projections_exist", "'output' is no nn.Linear of it"),
    (ShowsAnotherMatrix, "attention_map_is_forward[float64]", "apply_attention with attention_map against forward"),
    (ShowsTheFuture, "attention_map_is_forward[float32]", "it is not zero above the diagonal"),
    (ShowsOneHeadOnly, "attention_map_is_forward[float64]", r"attention_map must return .B, H, T, T., here .3, H, 21,"),
    (RoundsTooMuch, "computes_in_bfloat16", "the output in torch.bfloat16 against torch.float64: the largest"),
    (StepsDiffer, "slots_are_extend[float64]", "step 0 of sequences that begin after .4, 0, 11. tokens against"),
    (JoinsDocuments, "documents_are_apart[float64]", "packed documents against each document alone"),
    (JoinsPrompts, "prompts_are_apart[float64]", "packed prompts against each prompt alone"),
    (Raises, "rows_are_apart", "Sizes of tensors must match"),
]


def test_a_good_mixer_passes_every_check() -> None:
    register_mixer("under_test")(Good)
    stream = torch.get_rng_state()
    results = list(run_mixer_contract("under_test"))
    assert [result.name for result in results] == [check.name for check in CHECKS]
    assert {(result.outcome, result.message) for result in results} == {("passed", "")}
    assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize(("cls", "name", "message"), FAULTS, ids=lambda each: getattr(each, "__name__", None))
def test_a_fault_fails_its_check(cls: type[Good], name: str, message: str) -> None:
    register_mixer("under_test")(cls)
    (check,) = [check for check in CHECKS if check.name == name]
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=message):
        check.run("under_test")


def test_a_mixer_that_gives_nan_fails_one_check_and_is_compared_with_nothing() -> None:
    class GivesNaN(WrongSize):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nan * super().forward(x)

    register_mixer("under_test")(GivesNaN)
    results = {result.name: result for result in run_mixer_contract("under_test")}
    failed = [name for name, result in results.items() if not result.ok]
    assert failed == ["output_is_finite", *(f"state_has_declared_size[T={n}]" for n in (1, 5, 21))]
    assert results["output_is_finite"].message.startswith("48 of 48 numbers of the output at a random x [1, 1, 48] are")
    skipped = "the output is not finite, so its numbers cannot be compared"
    assert results["never_looks_ahead[at=1]"] == CheckResult("never_looks_ahead[at=1]", "skipped", skipped)
    assert results["weights_decide_everything"].outcome == "skipped"
    assert results["keeps_shape[T=1]"].outcome == "passed"


def test_a_mixer_that_cannot_be_built_says_so_once() -> None:
    @register_mixer("under_test")
    class Broken(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.half = d_model.half  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return x

    results = list(run_mixer_contract("under_test"))
    (failed,) = (result for result in results if not result.ok)
    assert "failed in its constructor (line " in failed.message
    assert results[1] == CheckResult(results[1].name, "skipped", f"the mixer fails as in {failed.name}")


def test_what_a_mixer_lacks_is_skipped_and_what_it_raises_is_named() -> None:
    @register_mixer("under_test")
    class Partial(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] == 64:
                raise KeyError("too long")
            return x.cumsum(1)

    results = {result.name: result for result in run_mixer_contract("under_test")}
    assert results["keeps_shape[T=21]"] == CheckResult("keeps_shape[T=21]", "passed")
    assert results["keeps_shape[T=64]"].message.startswith("KeyError: 'too long' (")
    assert not results["keeps_shape[T=64]"].ok
    assert results["state_has_declared_size[T=5]"].outcome == "skipped"
    assert "no init_state, extend and state_size" in results["state_has_declared_size[T=5]"].message
    maps = results["attention_map_is_forward[float32]"]
    assert (maps.outcome, maps.ok) == ("skipped", True)
    assert str(maps).startswith("- attention_map_is_forward[float32]: skipped: mixer 'under_test' has no attention_map")


def test_names_are_unique_and_reasons_are_given() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.why for check in CHECKS)
    with pytest.raises(ValueError, match="unknown mixer 'rebasd'; did you mean 'rebased'"):
        run_mixer_contract("rebasd")


def test_a_name_stands_for_one_class() -> None:
    assert register_mixer("under_test")(Good) is Good
    assert register_mixer("under_test")(Good) is Good  # again, as a notebook's cell does
    with pytest.raises(ValueError, match=r"mixer 'under_test' is taken by .*Good; choose another name"):
        register_mixer("under_test")(LooksAhead)
