"""Tables say what the records say."""

import csv
import io
from pathlib import Path

import pytest

from fake_records import fake_run
from rebased.report.tables import Table
from rebased.runs.finished import Run
from rebased.runs.record import read_record
from rebased.train import train


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+SUM(A1)", "-1+cmd|x", "@x", "\t=1", "--1"])
def test_a_text_is_no_formula_in_csv(text: str) -> None:
    (_, cells) = csv.reader(io.StringIO(Table(("model", "x"), [(text, text)]).to_csv()))
    assert cells == [f"'{text}"] * 2


@pytest.mark.parametrize("number", ["-0.5", "+3", "-1e-05", "+0.012 (0.010–0.300)", "-0.1 to +0.2", "+12%", "7"])
def test_a_number_stays_a_number_in_csv(number: str) -> None:
    (_, cells) = csv.reader(io.StringIO(Table(("model", "x"), [("ReBased", number)]).to_csv()))
    assert cells == ["ReBased", number]


def test_cells_are_escaped() -> None:
    table = Table(("model", "x"), [("<b>", "1 & 2")])
    assert '<th scope="row">&lt;b&gt;</th><td>1 &amp; 2</td>' in table.to_html()


def test_what_all_rows_share_is_said_once_above_a_table() -> None:
    folded = Table(("run", "precision", "lr"), [("a", "tf32", "0.1"), ("b", "tf32", "0.2")]).folded()
    assert folded.startswith("<p>In all rows: precision tf32.</p>")
    assert folded.count("tf32") == 1
    assert "<td>0.1</td></tr>" in folded
    one = Table(("run", "precision"), [("a", "tf32")])
    assert one.folded() == one.to_html()  # a single row shares nothing


def test_a_real_run_is_read(tmp_path: Path) -> None:
    config = fake_run().config
    config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2, "device": "cpu"})})
    result = train(config, tmp_path / "run")
    run = Run("run", read_record(tmp_path / "run"))
    assert run.config == config
    assert run.reported.accuracy == result.accuracy
    assert len(run.accuracies) == 2
