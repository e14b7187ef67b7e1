"""rebased report, as it is typed."""

import csv
import json
from pathlib import Path

import pytest

from command_line import rebased
from fake_records import fake_run, write_record


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of sixteen runs in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    for model, level in (("rebased", 0.8), ("based", 0.5)):
        for d_model in (24, 48):
            for seed in (42, 43):
                for lr in (1e-3, 1e-2):
                    best = level + d_model / 1000 + seed / 1e4 - lr
                    write_record(fake_run(model, [0.1, best], seed=seed, lr=lr, d_model=d_model), Path("sweep"))


def test_a_page_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("report", "sweep") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.endswith("wrote report.html\n")
    page = Path("report.html").read_text()
    assert "16 runs, 2 models, 1 task, 2 widths, 2 learning rates, 2 seeds." in page
    first = Path("report.html").read_bytes()
    assert rebased("report", "sweep") == 0  # an older page gives way, and the same records make the same page
    assert Path("report.html").read_bytes() == first


def test_a_warning_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep/sweep.jsonl").write_text('{"type": "failed", "digest": "a", "error": "shape [/3] is [red]"}\n')
    assert rebased("report", "sweep") == 0
    warning = "warning: 1 run failed: in no result. The first error: shape [/3] is [red]\n"
    assert capsys.readouterr().err == warning


def test_tables_and_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", "sweep", "--tables", "tables", "--formats", "md,tex,csv", "--bundle", "records.jsonl.xz"]
    assert rebased(*words) == 0
    assert not Path("report.html").exists()
    rows = list(csv.DictReader(Path("tables/results.csv").read_text().splitlines()))
    assert [rows[0][key] for key in ("model", "D", "lr", "seeds")] == ["Based", "24", "0.001", "2"]
    assert float(rows[0]["test"]) == pytest.approx(0.5 + 0.024 + 0.00425 - 0.001, abs=6e-4)
    assert Path("tables/results.md").read_text().startswith("| model | task | D | lr |")
    assert "\\begin{tabular}{lr" in Path("tables/results.tex").read_text()
    assert rebased("report", "records.jsonl.xz", "-o", "again.html") == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert rebased(*words) == 2
    assert "add --replace" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert rebased(*words, "--replace") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: there is no such file or folder"),
        (["empty"], "there is no record.jsonl and no bundle (*.jsonl.gz, *.jsonl.xz) in empty or below"),
        (["sweep", "-o", "page.pdf"], "-o page.pdf: the page is HTML, give a name ending in .html"),
        (["sweep", "-o", "notes.html"], "notes.html is not a page that rebased has written"),
        (["sweep", "--tables", "t", "--formats", "csv,eps"], "--formats eps: there is no such format here; tables are"),
        (["sweep", "--json", "notes.json"], "notes.json is there already; choose another file"),
        (["sweep", "--bundle", "records.zip"], "records.zip: the name of a bundle must end in .jsonl.xz or .jsonl.gz"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    Path("empty").mkdir()
    Path("notes.html").write_text("my notes")
    Path("notes.json").write_text("{}")
    before = sorted(Path().rglob("*"))
    assert rebased("report", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert sorted(Path().rglob("*")) == before
    assert Path("notes.html").read_text() == "my notes"


def test_json_is_all_of_stdout_and_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("report", "--json", "sweep", "-o", "page.html") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["wrote"] == ["page.html"]
    assert found["summary"][0].startswith("Perhaps trained too short: 8 of 8 runs")  # two rising epochs each
    assert found["summary"][1].startswith("T = 32, 4 pairs: ReBased")
    assert found["tables"]["results"][0]["test"] == pytest.approx(0.5 + 0.024 + 0.00425 - 0.001)
    assert found["tables"]["results"][0]["95% from"] is None  # of two seeds
    assert "wrote page.html" in captured.err
    assert rebased("report", "sweep", "--quiet", "--json", "out.json") == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads(Path("out.json").read_text())["tables"] == found["tables"]


def test_figures_are_written_beside_tables() -> None:
    assert rebased("report", "sweep", "--tables", "both", "--formats", "csv,svg") == 0
    names = {path.name for path in Path("both").iterdir()}
    assert {"results.csv", "figure-by-width.svg", "figure-curves.svg"} <= names
    assert {name.rpartition(".")[2] for name in names} == {"csv", "svg"}
    assert "T = 32, 4 pairs" in Path("both/figure-by-width.svg").read_text()


def test_values_of_a_users_own_paper(capsys: pytest.CaptureFixture[str]) -> None:
    Path("survey.json").write_text('{"name": "survey", "entries": [{"model": "Based", "values": {"accuracy": 0.5}}]}')
    assert rebased("report", "sweep", "--reference-values", "survey.json") == 0
    assert "The survey has a value for 2 of these 4 cells: 2 agree within 0.1" in capsys.readouterr().out
    assert "--reference-values survey.json" in Path("report.html").read_text()
    assert rebased("report", "sweep", "--reference-values", "nowhere.json") == 2
    assert capsys.readouterr().err == "error: nowhere.json: No such file or directory\n"
