"""Every task behind the contract trains, is recorded, reported and resumed like MQAR."""

from pathlib import Path
from typing import Any

import pytest

from rebased.report.report import Report
from rebased.runs.collect import collect
from rebased.runs.record import read_record
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train
from tiny_run import TINY, AtStep, everything

SEGMENTS: dict[str, list[dict[str, int]]] = {
    "forgetting_mqar": [{"seq_len": 12, "kv_pairs": 2, "updates": 1}, {"seq_len": 16, "kv_pairs": 3, "updates": 2}],
    "copying": [{"seq_len": 10, "min_length": 2, "max_length": 4}, {"seq_len": 12, "min_length": 5, "max_length": 5}],
    "selective_copying": [{"seq_len": 10, "n_tokens": 2}, {"seq_len": 14, "n_tokens": 3}],
    "word_problem": [{"seq_len": 6}, {"seq_len": 9}],
}
PARTS = {"forgetting_mqar": {"by_pairs", "slices"}, "word_problem": {"slices"}}  # besides accuracy and by_length


def run_of(name: str, **settings: Any) -> SyntheticRunConfig:
    segments = SEGMENTS[name]
    task = {
        "name": name,
        "vocab_size": 60 if name == "word_problem" else 24,
        "train": [{**segments[0], "examples": 40}],
        "test": [{**segment, "examples": 20} for segment in segments],
        "held_out": [{**segments[1], "examples": 10}],
    }
    return SyntheticRunConfig.model_validate({**TINY, "task": task, "train": {**TINY["train"], **settings}})


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_run_is_recorded_and_reported(name: str, tmp_path: Path) -> None:
    config = run_of(name, epochs=2)
    result = train(config, tmp_path / "run")
    first, *epochs, end = read_record(tmp_path / "run")
    assert SyntheticRunConfig.model_validate(first["config"]) == config
    for line in epochs:
        for split in ("test", "held_out"):
            assert line[split].keys() == {"accuracy", "by_length"} | PARTS.get(name, set())
    assert end["accuracy"] == result.accuracy
    report = Report(collect([tmp_path]))
    assert [cell.task.split(",")[0] for cell in report.parts[0].results.cells] == [name]
    assert not report.parts[0].results.cells[0].known.name
    html = report.page("Runs", "rebased report").to_html()
    assert ("Accuracy by slice" in html) == (name == "forgetting_mqar")
    assert ("slices" in report.tables()) == (name == "forgetting_mqar")


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    config = run_of("copying")
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "resumed", sinks=[AtStep(8, stop)])
    train(config, tmp_path / "resumed", resume=True)
    assert everything(tmp_path / "resumed") == everything(tmp_path / "whole")
