"""Values that a user gives in a file stand beside those of runs; a file that cannot be used is explained in a line."""

from pathlib import Path

import pytest

from fake_records import fake_lm_run, fake_run
from rebased.report.reference_values import NO_VALUES, ReferenceValue, read_reference_values
from rebased.report.report import Report
from rebased.runs.collect import Collection

FILE = """
name: survey
source: its Table 2, as printed
entries:
  - model: ReBased
    task: T = 32, 4 pairs
    d_model: 24
    values: {accuracy: {mean: 0.59, sd: 0.06, seeds: 5}}
  - model: Based
    values: {accuracy: 0.5, all: 20.0, ar: 3.0, non_ar: 60.0}
"""


def test_a_file_of_values(tmp_path: Path) -> None:
    (tmp_path / "survey.yaml").write_text(FILE)
    runs, lm_runs = [fake_run(), fake_run("based"), fake_run("mamba")], [fake_lm_run("based")]
    values = read_reference_values(tmp_path / "survey.yaml", [*runs, *lm_runs])
    assert values.of(runs[0]).values == {"accuracy": ReferenceValue(0.59, 0.06, seeds=5)}
    assert values.of(fake_run(d_model=48)).values == values.of(fake_run(seq_len=64)).values == {}
    report = Report(Collection(runs=runs, lm_runs=lm_runs), values=values)
    rows = {row["model"]: row for row in report.tables()["results"].to_records()}
    assert {model: row["survey"] for model, row in rows.items()} == {"ReBased": 0.59, "Based": 0.5, "Mamba": None}
    (row,) = report.tables()["lm_perplexity"].to_records()
    assert (row["survey all"], row["survey AR"], row["survey non-AR"]) == (20.0, 3.0, 60.0)
    page = report.page(None, "rebased report").to_html()
    assert "The survey has a value for 2 of these 3 cells: " in page
    assert "The survey&#x27;s values are from its Table 2, as printed." in page


def test_without_values_no_column_is_empty() -> None:
    report = Report(Collection(runs=[fake_run()], lm_runs=[fake_lm_run("rebased")]), values=NO_VALUES)
    assert report.tables()["results"].head[-1] == "state bytes"
    assert report.tables()["lm_perplexity"].head[-1] == "tokens/s"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: survey\n", "entries: "),
        ("name: survey\nentries: [{model: X, values: {accuracy: much}}]", "accuracy"),
        ("name: survey\nentries: [{model: X, values: {acuracy: 0.5}}]", "acuracy"),
        ("name: survey\nentries: [{model: X, values: {accuracy: .nan}}]", "accuracy"),
        ("name: survey\nentries: [{model: X, valuess: {}}]", "did you mean 'values'"),
        (
            "name: survey\nentries: [{model: X, values: {accuracy: 0.5}}]",
            "any of these runs. Its models: X",
        ),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "survey.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"survey\.yaml") as raised:
        read_reference_values(tmp_path / "survey.yaml", [fake_run()])
    assert error in str(raised.value)


def test_an_entry_with_a_mistake_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "survey.yaml").write_text("name: survey\nentries: [{model: X, values: {acuracy: 0.5}}]")
    with pytest.raises(ValueError, match="acuracy") as raised:
        read_reference_values(tmp_path / "survey.yaml", [fake_run()])
    assert len(str(raised.value).splitlines()) == 1
