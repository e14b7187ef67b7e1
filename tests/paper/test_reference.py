"""The paper's numbers, held against its own means; and when ours agree with them."""

from statistics import fmean

import pytest

from fake_records import fake_run
from rebased.analysis.spread import describe
from rebased.paper.reference import PAPER, deviations
from rebased.paper.values import FIGURE_1, READINGS, TABLE_1, Place, printed, read_off
from rebased.report.reference_values import ReferenceValue, agreement
from rebased.runs.finished import Run

MEANS = {  # the two columns "Mean" of Table 1
    256: {"Based": 0.58, "x²": 0.54, "norm(x)²": 0.57, "(γx)²": 0.51, "(γx + β)²": 0.61, "ReBased": 0.63},
    2048: {"Based": 0.51, "x²": 0.44, "norm(x)²": 0.58, "(γx)²": 0.48, "(γx + β)²": 0.60, "ReBased": 0.61},
}
PAPERS = {
    "task": {"vocab_size": 8192, "train": [{"seq_len": 256, "kv_pairs": 32, "examples": 100_000}]},
    "train": {"epochs": 64},
}


@pytest.mark.parametrize("seq_len", MEANS)
def test_table_1_has_the_means_it_prints(seq_len: int) -> None:
    for model, mean in MEANS[seq_len].items():
        cells = [reading.mean for place, reading in TABLE_1.items() if place[:2] == (model, seq_len)]
        assert len(cells) == 4
        assert fmean(cells) == pytest.approx(mean, abs=0.0076)  # sums of values rounded to two digits


def test_no_place_is_in_both() -> None:
    assert len(READINGS) == len(TABLE_1) + len(FIGURE_1) == 48 + 83


def accuracy_of(run: Run) -> ReferenceValue | None:
    return PAPER.of(run).values.get("accuracy")


def test_a_run_finds_its_place() -> None:
    assert accuracy_of(fake_run(seq_len=256, pairs=(32,))) == printed(0.59, 0.06)
    assert accuracy_of(fake_run("based", seq_len=2048, pairs=(512,), d_model=128)) == read_off(0.49, 0.16)
    assert accuracy_of(fake_run()) is None
    assert accuracy_of(fake_run(seq_len=256, pairs=(32, 64))) is None
    assert READINGS[Place("ReBased", 256, 64, 64)].at_least


def test_deviations() -> None:
    assert deviations(fake_run(seq_len=256, pairs=(32,), changes=PAPERS)) == []
    changes = {"model": {"mixers": {1: {"n_heads": 2}}}}
    assert deviations(fake_run(changes=changes)) == [
        "epochs 5 instead of 64",
        "vocabulary 64 instead of 8,192",
        "10 examples instead of 100,000",
        "heads 2 instead of 12",
    ]


def test_agreement() -> None:
    ours = describe([0.50, 0.52, 0.48, 0.51, 0.49])  # a standard error of 0.007
    assert agreement(ours, printed(0.53, 0.03)) == "agrees"
    assert agreement(ours, printed(0.70, 0.03)) == "differs"
    assert agreement(ours, printed(0.53, 0.30)) == "too wide to tell"
    assert agreement(describe([0.50]), printed(0.50, 0.06)) == "too wide to tell"  # one seed
    assert agreement(describe([0.96, 0.96]), read_off(0.97, at_least=True)) == "agrees"
    assert agreement(describe([0.94, 0.94]), read_off(0.97, at_least=True)) == "differs"


def test_readings_in_words() -> None:
    assert [str(one) for one in (read_off(0.5, 0.1), read_off(1.0), read_off(0.97, at_least=True))] == [
        "0.50 ± 0.10",
        "1.00",
        "≥ 0.97",
    ]
