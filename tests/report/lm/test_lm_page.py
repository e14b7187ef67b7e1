"""The page of language models: alone, beside synthetic tasks, and over runs that must not be averaged."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fake_records import fake_lm_run, fake_run, write_record
from page_reader import assert_self_contained
from rebased.cli import main
from rebased.paper.reference import PAPER
from rebased.report.lm.models import group_language_models
from rebased.report.lm.tables import perplexity_table, runs_table, settings_table
from rebased.report.page import Page
from rebased.report.report import Report
from rebased.runs.collect import Collection, collect
from rebased.runs.finished import Run

LEVELS = {"attention": (25.0, 25.3, 25.1), "based": (21.0, 21.6, 21.2), "rebased": (20.5, 20.7, 20.9)}


def nine(**more: Any) -> list[Run]:
    return [
        fake_lm_run(model, (value, value / 5, value * 3), seed=42 + i, **more)
        for model, values in LEVELS.items()
        for i, value in enumerate(values)
    ]


@cache
def page_of(report: Report) -> Page:
    """The page, drawn once per report."""
    return report.page(None, "rebased report x")


def headings(report: Report) -> list[str]:
    return [section.heading for section in page_of(report).sections]


def body(report: Report, heading: str) -> str:
    (text,) = [part.body for part in page_of(report).sections if part.heading == heading]
    return text


@pytest.fixture(scope="module")
def report() -> Report:
    return Report(Collection(lm_runs=nine()))


def test_holms_correction_is_over_what_was_tested(report: Report) -> None:
    compared = "Perplexity: paired comparisons"
    assert "over the 6 comparisons of this table" in body(report, compared)
    runs = [run for run in nine() if not (run.model == "Attention" and run.seed > 42)]  # one seed: no test
    text = body(Report(Collection(lm_runs=runs)), compared)
    assert "over the 3 tested ones of 6 comparisons of this table" in text


def test_the_page_is_whole(report: Report) -> None:
    assert headings(report) == [
        "",
        "Perplexity",
        "Perplexity: paired comparisons",
        "Training curves",
        "Settings of the language models",
        "All runs of language models",
        "How to make this page again",
    ]
    html = page_of(report).to_html()
    reader = assert_self_contained(html)
    assert "<h1>Perplexity of language models</h1>" in html
    assert "9 runs of language models: 3 models, 1 text, 3 seeds." in html
    assert "20.700 ± 0.200" in reader.texts["td"]  # the mean and the sample standard deviation of 20.5, 20.7, 20.9
    assert "rebased report x" in reader.texts["code"]
    assert (
        "rebased lm train --config attention-42/config.yaml --data.folder PREPARED_TEXT --out again"
        in reader.texts["code"]
    )
    data = json.loads(reader.texts["script"][0])["language_models"]
    assert [run["folder"] for run in data["runs"]] == [run.folder for run in nine()]
    assert data["runs"][0]["training_loss"] == [[5, 10], [9.0, 4.0]]
    assert data["runs"][0]["valid_perplexity"] == [[5], [150.0]]


def test_models_are_compared_with_the_rebased_of_most_seeds() -> None:
    wide = fake_lm_run(
        "rebased", settings={"model.mixers": "[short_conv, {name: rebased, n_heads: 4, key_width: 128}]"}
    )
    report = Report(Collection(lm_runs=[wide, *nine()]))
    assert any("on 3 paired seeds" in sentence for sentence in report.summary)


BY_DISTANCE = "Perplexity of AR tokens by distance"


def test_ar_tokens_by_distance_are_a_table_and_a_figure() -> None:
    report = Report(Collection(lm_runs=nine(distances=(2.0, 4.0, 8.0, 16.0))))
    assert headings(report).index(BY_DISTANCE) == headings(report).index("Perplexity") + 1
    assert report.warnings == []
    text = body(report, BY_DISTANCE)
    assert "<td>4.000 ± 0.000</td>" in text
    assert text.count('<svg role="img"') == 1
    assert "<title>ReBased, 4 to 7 ago: 8.000 (8.000 to 8.000)</title>" in text
    assert (
        report.tables()["lm_by_distance"].to_csv().startswith("AR tokens nearest,AR tokens farthest,number,Attention,")
    )
    assert report.figures()["by-distance-1"].to_file("svg").startswith(b"<?xml")
    assert_self_contained(page_of(report).to_html())
    one = Report(Collection(lm_runs=[fake_lm_run("rebased", distances=(2.0,))]))
    assert body(one, BY_DISTANCE).count('<svg role="img"') == 1


def test_runs_without_distances_are_named_once_if_others_have_them(report: Report) -> None:
    assert BY_DISTANCE not in headings(report)
    assert "by-distance-1" not in report.figures()
    assert not any("distance" in warning for warning in report.warnings)
    mixed = Report(Collection(lm_runs=[*nine()[:6], *nine(distances=(2.0, 4.0))[6:]]))
    assert mixed.tables()["lm_by_distance"].head == ("AR tokens", "number", "ReBased")
    (warning,) = mixed.warnings
    assert warning.startswith(
        "AR tokens by distance: 6 of 9 runs left out, whose records do not have them: attention-42, "
    )
    assert warning.endswith(", ....")


def test_the_paper_is_never_beside_ours_without_a_word() -> None:
    report = Report(Collection(lm_runs=nine()), values=PAPER)
    text = body(report, "Perplexity")
    assert "<td>16.45 / 3.67 / 56.31</td>" in text
    assert "the Pile, GPT-NeoX's tokenizer, 84 billion training tokens" in text.replace("&#x27;", "'")
    assert "Its levels can be compared only with runs that share all of these." in text
    own = [fake_lm_run("rebased", settings={"model.mixers.1.n_heads": heads}) for heads in ("6", "12")]
    text = body(Report(Collection(lm_runs=own), values=PAPER), "Perplexity")
    assert "paper" not in text  # Table 2 has neither of them by that name
    assert "Pile" not in text


def test_comparisons_are_paired_and_corrected_together(report: Report) -> None:
    assert [line.split(":")[0] for line in report.summary] == ["Perplexity", "All tokens", "All tokens"]
    assert report.summary[0].startswith("Perplexity: ReBased 20.70, Based 21.27, Attention 25.13 (all tokens")
    assert "ReBased has lower perplexity than Attention by 4.433" in report.summary[1]
    table = report.tables()["lm_compared"]
    assert [row[:2] for row in table.rows] == [
        (f"ReBased − {other}", part) for other in ("Attention", "Based") for part in ("all", "AR", "non-AR")
    ]
    plain, corrected = (float(table.rows[3][table.head.index(head)]) for head in ("t test p", "t test p*"))
    assert corrected > plain
    turned = Report(Collection(lm_runs=nine()), "Attention")
    assert "Attention has higher perplexity than ReBased" in " ".join(turned.summary)
    with pytest.raises(ValueError, match="there is no model 'Bsed' in these runs; did you mean 'Based'"):
        Report(Collection(lm_runs=nine()), "Bsed")


def test_different_texts_and_windows_are_never_averaged() -> None:
    others = [*nine(sha256="b" * 64), *nine(tokens=999), *nine(settings={"data.seq_len": "1024"})]
    report = Report(Collection(lm_runs=[*nine(), *others]))
    assert "measured on 4 different sets of tokens" in report.warnings[0]
    assert "nothing is averaged or compared across them" in report.warnings[0]
    text = body(report, "Perplexity")
    assert text.count("<h3>") == 4
    assert text.count("<td>20.700 ± 0.200</td>") == 4
    assert [name for name in report.tables() if name.startswith("lm_perplexity")] == [
        f"lm_perplexity_{n}" for n in (1, 2, 3, 4)
    ]


def test_different_settings_are_different_models() -> None:
    slow = [fake_lm_run("rebased", (30.0, 5.0, 80.0), seed=seed, settings={"train.lr": "3e-4"}) for seed in (42, 43)]
    report = Report(Collection(lm_runs=[*nine()[6:], *slow]))
    (group,) = group_language_models(report.found.lm_runs)
    assert list(group.models) == ["ReBased (lr 0.0003)", "ReBased (lr 0.001)"]
    assert report.warnings == [f"Not all were trained alike: lr 0.0003 and 0.001 ({group.data})."]
    assert ("train.lr", "0.0003", "0.001") in settings_table(group, differing=True).rows
    assert "train.lr" not in [row[0] for row in settings_table(group, differing=False).rows]
    assert [row[2:4] for row in perplexity_table(group).rows] == [("2", "30.000 ± 0.000"), ("3", "20.700 ± 0.200")]


def test_runs_in_no_result_are_named() -> None:
    runs = [*nine()[:3], fake_lm_run("based", status="diverged"), fake_lm_run("rebased")]
    report = Report(Collection(lm_runs=runs))
    assert report.warnings[0].startswith(
        "One seed only, so no spread and no test: ReBased (text enwik8 (aaaaaaaaaaaa), T = 2,048"
    )
    assert report.warnings[1:] == ["1 run diverged: in no result, but in the list of all runs."]
    assert [row[-4] for row in runs_table(runs, {}).rows] == ["done", "done", "done", "diverged", "done"]
    with pytest.raises(ValueError, match=r"no run has a result \(1 diverged\)$"):
        Report(Collection(lm_runs=[fake_lm_run("based", status="diverged")]))


def test_curves_are_drawn_from_the_records(report: Report) -> None:
    text = body(report, "Training curves")
    assert text.count('<svg role="img"') == 3  # training and validation of each model in one panel
    assert text.count("validation</li>") == 1
    short = nine()
    for run in short:
        run.lines[:] = [line for line in run.lines if line["type"] != "eval"]
    assert body(Report(Collection(lm_runs=short)), "Training curves").count('<svg role="img"') == 3


def test_a_gap_between_training_and_test_is_a_warning() -> None:
    runs = nine()
    assert not any("Overfitting" in text for text in Report(Collection(lm_runs=runs)).warnings)
    for line in (line for run in runs for line in run.lines if line["type"] == "step"):
        line["loss"] = 2.0
    (said,) = (text for text in Report(Collection(lm_runs=runs)).warnings if text.startswith("Overfitting"))
    assert "ReBased 2.00 and " in said


def test_a_step_without_numbers_is_left_out() -> None:
    runs = nine()
    runs[0].lines.insert(1, {"type": "step", "step": 1, "tokens": 10, "loss": None})
    report = Report(Collection(lm_runs=runs))
    assert page_of(report).data["language_models"]["runs"][0]["training_loss"] == ([5, 10], [9.0, 4.0])  # type: ignore[index]
    assert [row[-4] for row in report.tables()["lm_runs"].rows] == ["done"] * 9


def test_a_folder_with_both_kinds_gives_one_page() -> None:
    both = Collection(runs=[fake_run(seed=seed) for seed in (42, 43)], lm_runs=nine()[:4])
    report = Report(both, "Attention")
    names = headings(report)
    assert names.index("Accuracy by width") < names.index("Perplexity") < names.index("How to make this page again")
    assert len(set(names)) == len(names)
    html = page_of(report).to_html()
    assert "<h1>Synthetic tasks and language models</h1>" in html
    data = json.loads(assert_self_contained(html).texts["script"][0])
    assert (len(data["runs"]), len(data["language_models"]["runs"])) == (2, 4)
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(set(ids)) == len(ids)
    assert {"results", "runs", "lm_perplexity", "lm_runs"} <= report.tables().keys()
    assert [warning.split(":")[0] for warning in report.warnings] == ["Language models"]
    half = Report(Collection(runs=[fake_run()], lm_runs=[fake_lm_run("based", status="diverged")]))
    assert "Runs of language models are not shown: no run has a result (1 diverged)." in half.warnings


def test_the_command_over_a_sweep_of_language_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in nine():
        write_record(run, Path("sweep"))
    asked = [*(run.digest for run in nine()), "missing"]
    lines = [
        {"type": "sweep", "file": "a.yaml", "runs": asked},
        {"type": "failed", "digest": "gone", "error": "no room"},
    ]
    Path("sweep/sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(SystemExit) as left:
        main(
            ["report", "sweep", "-o", "lm.html", "--tables", "tables", "--formats", "md,tex", "--bundle", "lm.jsonl.gz"]
        )
    assert not left.value.code
    captured = capsys.readouterr()
    assert "1 run failed: in no result. The first error: no room" in captured.err
    assert "1 run of a sweep without a record here: not begun yet" in captured.err
    assert captured.out.startswith("Perplexity: ReBased 20.70, Based 21.27, Attention 25.13")
    assert Path("tables/lm_perplexity.md").read_text().startswith("| model | parameters | seeds | all | AR | non-AR |")
    assert Path("tables/lm_runs.tex").read_text().isascii()
    assert len(collect([Path("lm.jsonl.gz")]).lm_runs) == 9
    page = Path("lm.html").read_bytes()
    with pytest.raises(SystemExit):
        main(["report", "sweep", "-o", "lm.html"])
    assert Path("lm.html").read_bytes() == page  # the same records make the same page
