"""rebased probe: from trained runs to a table, a file of numbers and a page; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import rebased
from page_reader import assert_self_contained
from rebased.cli.output import Output
from rebased.config import merge
from rebased.runs.record import RECORD
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train
from tiny_lm_run import tiny as tiny_lm
from tiny_lm_run import write_text
from tiny_run import tiny

SEGMENT = {"seq_len": 16, "kv_pairs": 4, "examples": 24}
ONE = {"task": {"train": [SEGMENT], "test": [SEGMENT]}, "train": {"epochs": 1}}
KERNELS = {
    "rebased": {"name": "rebased", "n_heads": 2, "key_width": 4},
    "based": {"name": "based", "n_heads": 2, "key_width": 4},
    "attention": {"name": "attention"},
}


def trained(folder: Path, mixer: Any, changes: dict[str, Any] | None = None) -> Path:
    settings = merge(merge(ONE, {"model": {"mixers": ["previous_token", mixer]}}), changes or {})
    train(tiny(settings), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of ReBased, and one of Based and attention."""
    top = tmp_path_factory.mktemp("runs")
    for name, mixer in KERNELS.items():
        trained(top / name, mixer)
    trained(top / "again", KERNELS["rebased"], {"train": {"seed": 43}})
    return top


def test_from_runs_to_a_page_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, numbers = tmp_path / "probe.html", tmp_path / "probe.json"
    assert rebased("probe", folder, "--device", "cpu", "-o", page, "--json", numbers) == 0
    said = capsys.readouterr().out
    assert "Soft IoU of attention and answers: T = 16, 4 pairs" in said
    assert "Weights below a tenth (a hundredth) of the uniform one: Based " in said
    reader = assert_self_contained(page.read_text())
    texts = " ".join(reader.texts["h2"])
    assert "Made with rebased 0." in " ".join(reader.texts["footer"])
    for heading in ("Summary", "Attention maps", "The last question", "Similarity of queries and keys"):
        assert heading in texts
    records = json.loads(numbers.read_text())["records"]
    assert sorted(record["model"] for record in records) == ["Attention", "Based", "ReBased", "ReBased"]
    assert all(record["examples"] == 24 for record in records)
    kept = json.loads((folder / "based" / "probe.json").read_text())
    assert kept in records
    capsys.readouterr()
    assert rebased("probe", numbers) == 0
    assert capsys.readouterr().out.splitlines() == said.splitlines()[:-2]  # all but the two files it wrote
    values = tmp_path / "survey.json"
    values.write_text('{"name": "survey", "entries": [{"model": "Based", "values": {"iou": 0.5}}]}')
    assert rebased("probe", numbers, "--reference-values", values) == 0
    assert "The survey has an IoU for 1 of these cells" in capsys.readouterr().out
    records[0]["accuracy"] = 1 - records[0]["accuracy"]
    numbers.write_text(json.dumps(json.loads(numbers.read_text()) | {"records": records}))
    assert rebased("probe", numbers) == 2
    assert "was changed after it was written" in capsys.readouterr().err


def test_a_page_needs_nothing_but_the_record(folder: Path, tmp_path: Path) -> None:
    pages = tmp_path / "first.html", tmp_path / "second.html"
    assert rebased("probe", folder / "based", "--device", "cpu", "-o", pages[0]) == 0
    assert rebased("probe", (folder / "based" / "probe.json").rename(tmp_path / "moved.json"), "-o", pages[1]) == 0
    first, second = (page.read_text().split("How to make")[0] for page in pages)
    assert first == second


def test_a_second_probe_computes_what_changed_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = folder / "attention"
    assert rebased("probe", one, "--device", "cpu") == 0
    with monkeypatch.context() as patch:
        patch.setattr("rebased.evaluate.probe_record.probe_task", None)  # it is not called
        assert rebased("probe", one, "--device", "cpu") == 0
    assert rebased("probe", one, "--device", "cpu", "--examples", "5", "--split", "train") == 0
    kept = json.loads((one / "probe.json").read_text())
    assert (kept["examples"], kept["split"]) == (5, "train")


def test_one_command_trains_and_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two learning rates the better one is probed. A sweep that was interrupted is not."""

    def fake_sweep(file: Path, *, out: Path, imports: tuple[str, ...], retry_failed: bool, to: Output) -> int:
        assert (file, imports, retry_failed) == (Path("table3-cpu"), (), True)
        for lr in (1e-3, 1e-2):
            trained(out / str(lr), KERNELS["rebased"], {"train": {"lr": lr}})
        return 0

    monkeypatch.setattr("rebased.cli.probe.train_sweep", fake_sweep)
    assert rebased("probe", tmp_path / "runs", "--sweep", "table3-cpu", "--device", "cpu") == 0
    assert len(list((tmp_path / "runs").rglob(RECORD))) == 2
    assert len(list((tmp_path / "runs").rglob("probe.json"))) == 1
    monkeypatch.setattr("rebased.cli.probe.train_sweep", lambda file, **options: 130)
    assert rebased("probe", tmp_path / "none", "--sweep", "table3-cpu") == 130


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text")
    train(tiny_lm(text, {"train": {"steps": 2, "warmup_steps": 0}}), tmp_path / "lm")
    page = tmp_path / "lm.html"
    assert rebased("probe", tmp_path / "lm", "--device", "cpu", "--windows", "3", "-o", page) == 0
    said = capsys.readouterr().out
    assert "AR tokens, head" in said
    assert "of layer 1 puts" in said
    record = json.loads((tmp_path / "lm" / "probe.json").read_text())
    assert (record["kind"], record["windows"], record["split"]) == ("text", 3, "valid")
    other = write_text(tmp_path / "other", seed=1)
    assert rebased("probe", tmp_path / "lm", "--device", "cpu", "--windows", "3", "--data", other) == 0
    assert json.loads((tmp_path / "lm" / "probe.json").read_text()) == record  # not replaced by another text's
    assert "Attention on the token to be recalled" in " ".join(assert_self_contained(page.read_text()).texts["h2"])


def test_what_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*words: object) -> str:
        assert rebased("probe", *words, "--device", "cpu") == 2
        return capsys.readouterr().err.replace("\n", " ")

    broken = tmp_path / "broken"
    broken.mkdir()
    lines = (folder / "based" / RECORD).read_text().splitlines(keepends=True)
    (broken / RECORD).write_text("".join(lines[:-1]))
    assert "has not ended, so it has no trained model yet; finish it with --resume" in refusal(broken)
    (broken / RECORD).write_text("".join(lines[:-1]) + '{"type": "end", "status": "diverged"}\n')
    assert "diverged and left no trained model" in refusal(broken)
    assert "has no run that is done (1 begun)" in refusal(tmp_path)
    assert "there is no such folder" in refusal(tmp_path / "nowhere")
    mamba = trained(tmp_path / "mamba", "mamba")
    assert "no layer of this model has an attention matrix: its mixers are previous_token, mamba" in refusal(mamba)
    assert "has no split 'held_out'; its splits are train, test" in refusal(folder / "based", "--split", "held_out")
    other = {"seq_len": 20, "min_length": 2, "max_length": 4, "examples": 10}
    task = {"name": "copying", "train": [other], "test": [other]}
    train(_copying(task), tmp_path / "copying")
    assert "task 'copying' does not say where its answers stand" in refusal(tmp_path / "copying")
    (tmp_path / "x.json").write_text('{"type": "sweep"}')
    assert "is not the record of a probe" in refusal(tmp_path / "x.json")
    assert "is neither a run's folder nor the record of a probe" in refusal(folder / "based" / RECORD)
    assert "give one, such as runs/table3, not 2" in refusal(folder, tmp_path, "--sweep", "table3")


def _copying(task: dict[str, Any]) -> SyntheticRunConfig:
    model = {"d_model": 8, "mixers": ["previous_token", KERNELS["rebased"]]}
    return SyntheticRunConfig.model_validate({"task": task, "model": model, "train": {"epochs": 1, "device": "cpu"}})
