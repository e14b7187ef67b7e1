"""Tables say what the records say."""

import csv
import io
from pathlib import Path

import pytest

from fake_records import fake_run
from rebased.report import Table, accuracy_by_pairs, epochs_by_seed, summary
from rebased.runs.finished import by_model, read_run
from rebased.train import train

RUNS = [
    fake_run("rebased", [0.2, 0.75, 0.7]),
    fake_run("rebased", [0.2, 0.25], seed=43),
    fake_run("based", [0.1]),
    fake_run("conv_attention", [0.5, 0.995]),
    fake_run("hyena", [0.3]),
]


def test_summary() -> None:
    table = summary(RUNS, mark=0.7)
    assert table.head == ("model", "epochs to 0.7", "accuracy", "parameters", "state, T = 32", "with T", "time")
    # 12 heads of 136 or 153 features by 2 values and 1 norm; 2 tokens of the convolution; keys and values of 24
    assert table.rows[0] == (
        "ReBased",
        ">2 (2 to >2)",
        "0.500 (0.250–0.750)",
        "1,234",
        f"{4 * (12 * 136 * 3 + 48):,} B",
        "constant",
        "9 s",
    )
    assert table.rows[1] == ("Based", ">1", "0.100", "1,234", f"{4 * (12 * 153 * 3 + 48):,} B", "constant", "4 s")
    assert table.rows[2] == ("ConvAttention", "2", "0.995", "1,234", f"{4 * (2 * 32 * 24 + 48):,} B", "grows", "7 s")
    assert table.rows[3][0] == "Hyena"


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+SUM(A1)", "-1+cmd|x", "@x", "\t=1", "--1"])
def test_a_text_is_no_formula_in_csv(text: str) -> None:
    (_, cells) = csv.reader(io.StringIO(Table(("model", "x"), [(text, text)]).to_csv()))
    assert cells == [f"'{text}"] * 2


@pytest.mark.parametrize("number", ["-0.5", "+3", "-1e-05", "+0.012 (0.010–0.300)", "-0.1 to +0.2", "+12%", "7"])
def test_a_number_stays_a_number_in_csv(number: str) -> None:
    (_, cells) = csv.reader(io.StringIO(Table(("model", "x"), [("ReBased", number)]).to_csv()))
    assert cells == ["ReBased", number]


def test_epochs_by_seed() -> None:
    table = epochs_by_seed(RUNS, mark=0.7)
    assert table.head == ("model", "seed 42", "seed 43")
    assert table.rows == [
        ("ReBased", "2", ">2"),
        ("Based", ">1", "-"),
        ("ConvAttention", "2", "-"),
        ("Hyena", ">1", "-"),
        ("Based − ReBased", ">−1", "-"),
        ("ConvAttention − ReBased", "0", "-"),
        ("Hyena − ReBased", ">−1", "-"),
    ]


def test_differences_of_the_same_seed() -> None:
    base, other = [2, 4, 1, None, None], [5, 3, None, 2, None]
    runs = [
        fake_run(model, [0.9 if n == epoch else 0.1 for n in range(1, 7)], seed=seed)
        for model, epochs in (("rebased", base), ("based", other))
        for seed, epoch in enumerate(epochs)
    ]
    assert epochs_by_seed(runs, mark=0.9).rows[2] == ("Based − ReBased", "+3", "−1", ">+5", "<−4", "-")


@pytest.mark.parametrize(
    ("epochs", "shown"),
    [
        ([3], "3"),
        ([5, 2, 3], "3 (2 to 5)"),
        ([2, 3], "3 (2 to 3)"),
        ([None, 2, 3], "3 (2 to >6)"),
        ([None, None], ">6 (>6 to >6)"),
    ],
)
def test_epochs_are_summed_up_by_their_median(epochs: list[int | None], shown: str) -> None:
    runs = [
        fake_run(accuracies=[0.9 if n == epoch else 0.1 for n in range(1, 7)], seed=seed)
        for seed, epoch in enumerate(epochs)
    ]
    assert summary(runs, mark=0.9).rows[0][1] == shown


def test_models_are_grouped_in_order() -> None:
    assert {name: len(group) for name, group in by_model(RUNS).items()} == {
        "ReBased": 2,
        "Based": 1,
        "ConvAttention": 1,
        "Hyena": 1,
    }


def test_by_pairs_is_the_reported_epochs() -> None:
    assert accuracy_by_pairs(RUNS) is None
    table = accuracy_by_pairs([fake_run(accuracies=[0.2, 0.8, 0.4], pairs=[4, 8])])
    assert table is not None
    assert table.head == ("model", "4 pairs", "8 pairs")
    assert table.rows == [("ReBased", "0.800", "0.400")]


def test_cells_are_escaped() -> None:
    table = summary(RUNS, mark=0.7)._replace(rows=[("<b>", "1 & 2")])
    assert '<th scope="row">&lt;b&gt;</th><td>1 &amp; 2</td>' in table.to_html()


def test_a_real_run_is_read(tmp_path: Path) -> None:
    config = fake_run().config
    config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2, "device": "cpu"})})
    result = train(config, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.config == config
    assert run.reported.accuracy == result.accuracy
    assert len(run.accuracies) == 2
    assert run.folder == "run"
    assert summary([run], mark=0.9).rows[0][2] == f"{result.accuracy:.3f}"


def test_a_run_without_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text('{"type": "run"}\n')
    with pytest.raises(ValueError, match="no epoch in its record yet; train it first"):
        read_run(tmp_path)
