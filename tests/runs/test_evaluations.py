"""Measurements that are kept beside a run, and how `lm compare` shows them."""

import json
from pathlib import Path

import pytest

from rebased.cli import main
from rebased.runs.evaluations import EVALUATIONS, append_evaluation, collect_task_scores, read_evaluations
from rebased.runs.record import read_record
from rebased.train import train
from tiny_lm_run import tiny, write_text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("evaluations")
    text = write_text(home / "text")
    for seed in (1, 2, 3):
        folder = home / "runs" / str(seed)
        train(tiny(text, {"train": {"seed": seed, "steps": 2, "warmup_steps": 1}}), folder)
        for value in (0.0, seed / 10):  # the newest counts
            score = {"task": "recall", "metric": "acc", "value": value, "stderr": None, "examples": 9, "version": "1"}
            append_evaluation(folder, {"type": "tasks", "scores": [score]})
    return home / "runs"


def test_lines_are_added_and_read(runs: Path) -> None:
    assert [entry["scores"][0]["value"] for entry in read_evaluations(runs / "2")] == [0.0, 0.2]
    assert read_evaluations(runs) == []


def test_the_newest_score_of_each_run_counts(runs: Path) -> None:
    digests = {seed: read_record(runs / str(seed))[0]["digest"] for seed in (1, 2, 3)}
    assert collect_task_scores([runs]) == {digests[seed]: {"recall: acc": seed / 10} for seed in (1, 2, 3)}


def test_compare_shows_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["lm", "compare", str(runs), "--json"])
    assert left.value.code == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert tasks[0]["task"] == "recall: acc"
    assert next(value for key, value in tasks[0].items() if isinstance(value, float)) == pytest.approx(0.2)
    with pytest.raises(SystemExit):
        main(["lm", "compare", str(runs)])
    assert "| recall: acc |" in capsys.readouterr().out


def test_a_damaged_file_is_left_out(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "record.jsonl").write_bytes((runs / "1" / "record.jsonl").read_bytes())
    (folder / EVALUATIONS).write_text("[\n")
    with pytest.raises(ValueError, match="line 1, is not a measurement"):
        read_evaluations(folder)
    assert collect_task_scores([tmp_path]) == {}
    assert "is left out" in caplog.text


def test_scores_that_belong_to_no_run_are_left_out_silently(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_evaluation(tmp_path, {"type": "tasks", "scores": []})  # as of a shipped model, in the working folder
    assert collect_task_scores([tmp_path]) == {}
    assert caplog.text == ""
