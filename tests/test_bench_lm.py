"""The language models' benchmarks at a size for CI: they run whole, and what they leave says what was measured."""

import gzip
import json
import re
from pathlib import Path

import pytest
from benchmarks import enwik8, lm
from benchmarks.lm_report import ratios

from rebased.data import write_corpus


def test_steps_and_where_their_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--tokens", "64", "--lengths", "32", "16", "--compile", "none", "--device", "cpu", "--profile"]
    path = lm.main([*size, "--models", "attention", "paper-text", "--out", str(tmp_path)])
    record = json.loads(path.read_text())
    assert [(row["model"], row["T"], row["batch"]) for row in record["steps"]] == [
        ("attention", 32, 2),
        ("paper-text", 32, 2),
        ("attention", 16, 4),
        ("paper-text", 16, 4),
    ]
    for row in record["steps"]:
        assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
        assert sum(row["profile"]["groups"].values()) >= 0.99 * row["profile"]["wall_ms"]
    assert str(tmp_path) not in path.read_text()
    assert path.with_suffix(".svg").stat().st_size > 10_000
    assert "paper-text over attention" in capsys.readouterr().out


def test_nothing_is_begun_after_the_time_is_over(tmp_path: Path) -> None:
    path = lm.main(
        ["--minutes", "0", "--device", "cpu", "--lengths", "16", "--models", "based", "--out", str(tmp_path)]
    )
    record = json.loads(path.read_text())
    assert record["steps"] == []
    assert record["left_out"] == [{"model": "based", "T": 16, "reason": "the time was over"}]


def test_ratios_are_also_told_over_the_fastest_attention() -> None:
    speeds = {"attention": 100.0, "attention-cudnn": 120.0, "paper-text": 150.0}
    rows = [{"model": model, "T": 4096, "tokens_per_second": speed} for model, speed in speeds.items()]
    rows.append({"model": "paper-text", "T": 8192, "tokens_per_second": 150.0})
    assert ratios(rows) == [{"T": 4096, "over_attention": 1.5, "over_fastest_attention": 1.25}]


def test_three_models_on_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "text", {"train": ["abc " * 60], "valid": ["abc " * 10]})
    words = ["--data.folder", str(tmp_path / "text"), "--data.seq_len", "16", "--train.compile", "none"]
    words += ["--model.d_model", "24", "--model.n_layers", "2", "--model.vocab_size", "257", "--train.device", "cpu"]
    words += ["--train.steps", "2", "--train.warmup_steps", "1", "--train.batch_size", "2", "--seeds", "1", "2"]
    bundle = enwik8.main([*words, "--out", str(tmp_path / "out")])
    lines = [json.loads(line) for line in gzip.decompress(bundle.read_bytes()).splitlines()]
    names = [line["folder"] for line in lines if line["type"] == "folder"]
    assert names == ["attention-1", "attention-2", "based-1", "based-2", "rebased-1", "rebased-2"]
    ends = [line for line in lines if line["type"] == "end"]
    assert all(end["valid"]["ar"]["perplexity"] > 1 for end in ends)
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    shown = capsys.readouterr().out
    for model in ("Attention", "Based", "ReBased"):
        assert re.search(rf"\| {model} \| [\d,]+ \| 2 \| \d+\.\d+ ± \d+", shown)  # two seeds of each
    assert enwik8.main([*words, "--out", str(tmp_path / "out")]) == bundle  # nothing is done twice
    assert [json.loads(line) for line in gzip.decompress(bundle.read_bytes()).splitlines()] == lines
