"""rebased sweep, as it is typed."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from command_line import rebased
from fake_records import fake_run
from rebased.cli.sweep_board import LineBoard, LiveBoard, Tally
from rebased.files import locked
from rebased.runs.collect import write_bundle
from rebased.runs.record import lines_so_far, read_record
from rebased.train import RunStart, StepReport
from rebased.train.sweep.cost import Estimate
from rebased.train.sweep.grid import load_sweep
from rebased.train.sweep.plan import make_plan
from rebased.train.sweep.queue import TimeBudget

COMMAND = [sys.executable, "-c", "from rebased.cli import main; main()"]
BASE: dict[str, Any] = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 16}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 16}],
    },
    "model": {"preset": "rebased", "d_model": 12, "mixers": {1: {"n_heads": 1}}},
    "train": {"epochs": 3, "batch_size": 8, "lr": 0.01, "device": "cpu"},
}
WORDS = ["sweep", "tiny.yaml", "-o", "out"]
HANGS = 300  # seconds: no machine is so slow


@pytest.fixture
def timed() -> None:
    """Models are timed, as they are for a user."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "timed" not in request.fixturenames:
        request.getfixturevalue("untimed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    write({"model.preset": ["rebased", "based"], "train.seed": [1, 2]})


def write(grid: dict[str, Any], **train: float) -> None:
    base = BASE | {"train": {**BASE["train"], **train}}
    Path("tiny.yaml").write_text(yaml.safe_dump({"base": base, "grid": grid}))


def records() -> dict[str, list[dict[str, Any]]]:
    return {path.parent.name: read_record(path) for path in Path("out").glob("*/record.jsonl")}


def epochs_of(lines: list[dict[str, Any]]) -> list[int]:
    return [line["epoch"] for line in lines if line["type"] == "epoch"]


@pytest.mark.usefixtures("timed")
def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased(*WORDS, "--dry-run", "--workers", "1") == 0
    out = capsys.readouterr().out
    assert re.search(r"^ReBased +T = 12, 2 pairs +12 +2 *$", out, flags=re.MULTILINE)
    assert re.search(r"^Based +T = 12, 2 pairs +12 +2 ", out, flags=re.MULTILINE)
    assert "4 runs: 0 done, 4 to train in out" in out
    assert "1 process of this machine, one CPU thread each" in out
    assert re.search(r"(about )?\d+ s( to \d+ s)?, from 3 steps of each model, timed just now", out)
    assert os.listdir() == ["tiny.yaml"]


@pytest.mark.usefixtures("timed")
def test_a_time_that_is_not_known_is_not_0(capsys: pytest.CaptureFixture[str]) -> None:
    Path("moody.py").write_text(MOODY)
    Path("mood.txt").touch()
    write({"model.mixers": [["short_conv", "moody"]]})
    words = ["--import", "moody.py", "--workers", "1", "--dry-run", "--json", "plan.json"]
    assert rebased(*WORDS, *words) == 0
    out = capsys.readouterr().out
    assert "\nthe time is not known: short_conv + moody could not be timed (mixer 'moody' (class Moody of " in out
    assert "RuntimeError: not today)\n" in out
    assert "about 0 s" not in out
    assert json.loads(Path("plan.json").read_text())["estimated_seconds"] is None


def test_a_sweep_from_start_to_end_and_over_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased(*WORDS) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    runs = records()
    assert len(runs) == 4
    for digest, lines in runs.items():
        assert lines[0]["digest"] == digest
        assert epochs_of(lines) == [1, 2, 3]
        assert lines[0]["machine"]["threads"] == 1
    for line in re.findall(r"^\d/4  .*", captured.out, flags=re.MULTILINE):
        found = re.search(r"(\w+), T = 12, 2 pairs, D = 12, lr 0\.01, seed (\d): accuracy (\d\.\d+)", line)
        assert found, line
        model, seed, accuracy = found.groups()
        (run,) = [
            lines
            for lines in runs.values()
            if lines[0]["config"]["model"]["mixers"][1]["name"] == model.lower()
            and lines[0]["config"]["train"]["seed"] == int(seed)
        ]
        assert accuracy == f"{run[-1]['accuracy']:.4f}"
    assert captured.out.endswith("4 of 4 runs done; out\n")

    before = {path: path.read_bytes() for path in Path("out").glob("*/*")}
    write({"model.preset": ["rebased", "based"], "train.seed": [1, 2, 3]})
    assert rebased(*WORDS) == 0  # a larger grid in the same folder: only what is new is trained
    out = capsys.readouterr().out
    assert "6 runs: 4 done, 2 to train" in out
    assert "the records of this folder" in out
    assert len(re.findall(r"accuracy \d", out)) == 2
    assert {path: path.read_bytes() for path in before} == before
    asked = [json.loads(line) for line in Path("out/sweep.jsonl").read_text().splitlines()]
    assert [(line["type"], line["file"], len(line["runs"])) for line in asked] == [
        ("sweep", "tiny.yaml", 4),
        ("sweep", "tiny.yaml", 6),
    ]


MOODY = """
import pathlib, torch
from rebased import register_mixer

@register_mixer("moody")
class Moody(torch.nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out_proj = torch.nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if pathlib.Path("mood.txt").exists():
            raise RuntimeError("not today")
        return self.out_proj(x)
"""


@pytest.mark.usefixtures("timed")
def test_a_failed_run_is_written_down_and_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("moody.py").write_text(MOODY)
    Path("mood.txt").touch()
    write({"model.preset": ["attention"], "model.mixers": [["short_conv", "moody"], ["short_conv", "short_conv"]]})
    words = [*WORDS, "--import", "moody.py", "--workers", "1"]
    assert rebased(*words) == 1
    out = capsys.readouterr().out
    why = f"mixer 'moody' (class Moody of {Path('moody.py').absolute()}) failed at x [1, 12, 12] in torch.float32 "
    why += "(line 13): RuntimeError: not today"
    assert re.search(
        r"^(about )?\d+ s( to \d+ s)?, from 3 steps of each model, timed just now", out, flags=re.MULTILINE
    )
    assert f"; short_conv + moody could not be timed and is left out ({why})" in out
    assert f"1/2  short_conv + moody, T = 12, 2 pairs, D = 12, lr 0.01, seed 42: failed: {why}" in out
    assert "2/2  short_conv, T = 12, 2 pairs, D = 12, lr 0.01, seed 42: accuracy" in out
    assert "1 of 2 runs done, 1 failed; out" in out
    assert "again with: rebased sweep tiny.yaml -o out --import moody.py --workers 1 --retry-failed" in out
    lines = [json.loads(line) for line in Path("out/sweep.jsonl").read_text().splitlines()]
    (failed,) = [line for line in lines if line["type"] == "failed"]
    assert failed["error"] == why
    assert not (Path("out") / failed["digest"]).exists()  # it was seen before anything was written

    Path("mood.txt").unlink()
    assert rebased(*words) == 1  # without a word it is not tried again
    out = capsys.readouterr().out
    assert "2 runs: 1 done, 0 to train in out" in out
    assert "1 failed before, not repeated; --retry-failed tries again" in out
    assert rebased(*words, "--retry-failed") == 0
    assert "2 of 2 runs done; out" in capsys.readouterr().out
    assert rebased(*words) == 0


def test_runs_of_a_mixer_that_has_changed_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A digest holds a mixer's name and arguments, so runs of its old code are the same runs; nobody was told."""
    Path("moody.py").write_text(MOODY)
    write({"model.mixers": [["moody"]], "train.seed": [1, 2]}, epochs=1)
    words = [*WORDS, "--import", "moody.py", "--workers", "1"]
    assert rebased(*words) == 0
    assert rebased(*words, "--dry-run") == 0
    assert "warning" not in capsys.readouterr().out
    (one, other) = (lines[0]["own_code"] for lines in records().values())
    assert one.keys() == other.keys() == {"mixer 'moody'"}
    Path("moody.py").write_text(MOODY.replace("self.out_proj(x)", "self.out_proj(2 * x)"))
    assert rebased(*words) == 0
    out = capsys.readouterr().out
    assert "warning: mixer 'moody' has changed since 2 runs began; they count as they are. To train all" in out


def test_after_lost_processes_the_advice_is_the_command_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Once the error said to run the same command again, which leaves out the runs that failed."""
    death = "import os; os.kill(os.getpid(), 9)"
    Path("moody.py").write_text(MOODY.replace('raise RuntimeError("not today")', death))
    Path("mood.txt").touch()
    write({"model.mixers": [["moody"]], "train.seed": [1]}, epochs=1)
    words = [*WORDS, "--import", "moody.py", "--workers", "1"]
    assert rebased(*words) == 1
    out = capsys.readouterr().out
    assert "ended 3 times, the last time with exit code -9" in out
    assert "same command" not in out
    assert out.count("again") == 1
    assert "again with: rebased sweep tiny.yaml -o out --import moody.py --workers 1 --retry-failed" in out
    Path("mood.txt").unlink()
    assert rebased(*words) == 1
    assert "0 to train" in capsys.readouterr().out
    assert rebased(*words, "--retry-failed") == 0


def test_failures_that_are_tried_again_are_counted_anew(capsys: pytest.CaptureFixture[str]) -> None:
    Path("moody.py").write_text(MOODY)
    Path("mood.txt").touch()
    write({"model.mixers": [["moody"]], "train.seed": [1, 2, 3]}, epochs=1)
    words = [*WORDS, "--import", "moody.py", "--workers", "1"]
    assert rebased(*words) == 1
    log = Path("out/sweep.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:-1], "{torn\n"]))  # the failure of the last run can no longer be read
    capsys.readouterr()
    assert rebased(*words) == 1
    out = capsys.readouterr().out
    assert "skipped 1 damaged line of out/sweep.jsonl" in out
    assert "3 runs: 0 done, 1 to train in out" in out
    Path("mood.txt").unlink()
    assert rebased(*words, "--retry-failed") == 0
    assert re.findall(r"^\d/\d", capsys.readouterr().out, flags=re.MULTILINE) == ["1/3", "2/3", "3/3"]


def test_lines_of_the_log_that_lack_something_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    write({"train.seed": [1]}, epochs=1)
    Path("out").mkdir()
    lines = [{"type": "failed"}, {"type": "failed", "digest": "a", "error": 1}, {"type": "retry"}, {"type": "sweep"}]
    Path("out/sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"type": []}]))
    assert rebased(*WORDS, "--workers", "1") == 0
    assert "skipped 5 damaged lines of out/sweep.jsonl" in capsys.readouterr().out


def test_runs_under_way_stand_below_the_table(tmp_path: Path) -> None:
    plan = make_plan(load_sweep(Path("tiny.yaml"), {}).points, tmp_path, {})
    tally = Tally(plan, Estimate({run.digest: 100.0 for run in plan.runs}, 200.0, ""), workers=2)
    console = Console(force_terminal=True, width=80, file=io.StringIO())
    board = LiveBoard(console, tally)
    sink = board.sink(plan.runs[0])

    def shown() -> str:
        with console.capture() as drawn:
            console.print(board._render())
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.get())

    name = "ReBased, seed 1"  # what all runs share is left out
    assert name not in shown()
    sink.start(RunStart(plan.runs[0].config, 1000, "cpu", processes=1, step=0, steps=12, lines=[]))
    assert f"\n{name}: epoch 1/3  starting" in shown()
    sink.line({"type": "epoch", "epoch": 1, "test": {"accuracy": 0.25}})
    sink.step(StepReport(step=6, epoch=2, loss=1.0, lr=0.01, tokens_per_second=1.0))
    assert f"\n{name}: epoch 2/3  loss 1.000  1 tokens/s  accuracy 0.250" in shown()
    assert re.search(r"ReBased +0/2 +1 +- +- ", shown())
    assert tally.fraction[plan.runs[0].digest] == 0.5
    board.ended(replace(plan.runs[0], status="done"), 0.5)
    assert name not in shown()
    assert re.search(r"ReBased +1/2 +- +- +0\.500 +lr 0\.01, D = 12 ", shown())
    assert re.search(r"\n━{5}╺?━* +1 of 4 runs done", shown())  # a quarter of the bar


def test_a_log_names_the_runs_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebased.cli.sweep_board.SILENCE", 0.0)
    plan = make_plan(load_sweep(Path("tiny.yaml"), {}).points, tmp_path, {})
    tally = Tally(plan, Estimate({run.digest: 100.0 for run in plan.runs}, 200.0, ""), workers=2)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as log:
        start = RunStart(plan.runs[0].config, 1000, "cpu", processes=1, step=0, steps=12, lines=[])
        LineBoard(console, tally).sink(plan.runs[0]).start(start)
    progress = "  ReBased, seed 1: epoch 1/3  starting\n"
    assert log.get() == "0 of 4 runs done, 1 running, about 3 min left:\n" + progress


def test_stopping_stands_below_the_table_until_it_is_over(tmp_path: Path) -> None:
    plan = make_plan(load_sweep(Path("tiny.yaml"), {}).points, tmp_path, {})
    tally = Tally(plan, Estimate({run.digest: 100.0 for run in plan.runs}, 200.0, ""), workers=2)
    tally.progress = {plan.runs[0].digest: "epoch 1/3, accuracy -"}
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with LiveBoard(console, tally) as board, console.capture() as shown:
        board.stopping(2)
    during = shown.get()
    assert "1 running" in during
    assert "stopping: saving 2 runs; Ctrl-C again ends at once" in during.splitlines()[-1]
    with console.capture() as left:
        console.print(board._render())
    assert "running, about" not in left.get()
    assert "stopping" not in left.get()


def test_the_time_left_begins_with_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    plan = make_plan(load_sweep(Path("tiny.yaml"), {}).points, tmp_path, {})
    tally = Tally(plan, Estimate({run.digest: 100.0 for run in plan.runs}, 200.0, ""), workers=2)
    assert tally.seconds_left() == pytest.approx(200)
    clock[0] = 10.0  # it took long to begin, and nothing can be said of the pace yet
    tally.fraction[plan.runs[0].digest] = 0.01
    assert tally.seconds_left() == pytest.approx(199.5 * 219 / 200)
    clock[0] = 300.0  # both have done one run, in three times as long as was thought
    for run in plan.runs[:2]:
        tally.ended(replace(run, status="done"), 0.5)
    assert tally.seconds_left() == pytest.approx(300)


def test_divergence_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    write({"train.lr": [1e30]}, eps=1e-30)
    assert rebased(*WORDS) == 0
    out = capsys.readouterr().out
    assert "seed 42: diverged: the loss became nan" in out
    assert "0 of 1 run done, 1 diverged; out" in out
    assert rebased(*WORDS, "--retry-failed") == 0
    assert "1 run: 1 done, 0 to train" in capsys.readouterr().out


SLOW = """
import pathlib, time, torch
from rebased import register_mixer

@register_mixer("slow")
class Slow(torch.nn.Linear):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and pathlib.Path("slow.txt").exists() and [*pathlib.Path("out").glob("*/record.jsonl")]:
            time.sleep(0.2)  # but not while it is timed
        return super().forward(x)
"""


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs take seconds, on a machine of any speed, until the signal was sent."""
    Path("slow.py").write_text(SLOW)
    Path("slow.txt").touch()
    write({"model.mixers": [["slow"]], "train.seed": [1, 2, 3]}, epochs=6, stop_above=1)
    words = [*WORDS, "--workers", "2", "--import", "slow.py"]
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(epochs_of(lines) for lines in records().values()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    Path("slow.txt").unlink()
    assert process.returncode == 130
    assert err == ""
    assert re.search(r"^stopping: saving (1 run|2 runs); Ctrl-C again ends", out, flags=re.MULTILINE)
    last = "interrupted, saved; continue with: rebased sweep tiny.yaml -o out --workers 2 --import slow.py"
    assert out.splitlines()[-1] == last
    done = {digest: epochs_of(lines) for digest, lines in records().items()}
    assert any(0 < len(epochs) < 6 for epochs in done.values())
    assert rebased(*words) == 0
    assert [epochs_of(lines) for lines in records().values()] == [list(range(1, 7))] * 3
    assert "3 of 3 runs done" in capsys.readouterr().out


def test_ctrl_c_while_models_are_timed_is_quiet() -> None:
    """In a terminal it reaches the server that forks processes, too, which is still importing torch."""
    process = subprocess.Popen(
        [*COMMAND, *WORDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("model")  # the plan
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    assert (process.returncode, err) == (130, "")


def test_two_sweeps_in_one_folder_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with locked(Path("out")):
        assert rebased(*WORDS) == 2
    assert "out is in use by another process; wait until it ends, or choose another" in capsys.readouterr().err
    assert os.listdir("out") == [".lock"]  # which is no longer held, and so stands in nobody's way
    write({"train.seed": [1]}, epochs=1)
    assert rebased(*WORDS) == 0


PYTHON = (
    MOODY
    + """
from rebased.runs.synthetic_config import SyntheticRunConfig
segment = {"seq_len": 12, "kv_pairs": 2, "examples": 16}
run = {
    "task": {"vocab_size": 24, "train": [segment], "test": [segment]},
    "model": {"d_model": 12, "mixers": ["short_conv", "moody"]},
    "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
}
configs = [run, SyntheticRunConfig.model_validate(run | {"train": run["train"] | {"seed": 7}})]
"""
)


def test_a_python_file_with_configs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(PYTHON)
    assert rebased("sweep", "mine.py", "--train.lr", "3e-3") == 0
    assert "2 of 2 runs done; runs/mine" in capsys.readouterr().out
    assert {read_record(path)[0]["config"]["train"]["lr"] for path in Path("runs/mine").glob("*/record.jsonl")} == {
        3e-3
    }
    Path("mine.py").write_text(MOODY)
    assert rebased("sweep", "mine.py") == 2
    assert "mine.py has no `configs`" in capsys.readouterr().err
    Path("mine.py").write_text("configs = nothing")
    assert rebased("sweep", "mine.py") == 2
    assert capsys.readouterr().err.startswith("error: mine.py failed: NameError: name 'nothing' is not defined")


def test_in_a_terminal_a_table_lives(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    write({"model.preset": ["rebased", "based"]})
    assert rebased(*WORDS) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"model +done +running +failed +best accuracy +with", shown)
    for name, model in (("ReBased", "rebased"), ("Based", "based")):
        (lines,) = [lines for lines in records().values() if lines[0]["config"]["model"]["mixers"][1]["name"] == model]
        accuracy = f"{lines[-1]['accuracy']:.3f}"
        assert re.search(rf"{name} +1/1 +- +- +{accuracy} +lr 0\.01, D = 12 ", shown)


BAD = [
    (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    (["nowhere.py"], "nowhere.py: there is no such file"),
    (["nowhere.yaml", "-o", "."], "nowhere.yaml: No such file or directory"),  # not that the folder is in use
    (["tiny.yaml", "--workers", "0"], "--workers 0: give 1 or more"),
    (["tiny.yaml", "--executor", "slurm"], "slurm"),
    (
        ["tiny.yaml", "--executor", "ray"],
        "--executor ray needs Ray, which is not installed: pip install 'rebased[sweep]'",
    ),
    (["tiny.yaml", "--retry-faild"], "unknown option '--retry-faild'; did you mean '--retry-failed'?"),
    (["tiny.yaml", "--train.lrr", "1"], "--train.lrr: unknown key 'lrr'; did you mean 'lr'?"),
    (["tiny.yaml", "--train.lr", "fast"], "error: --train.lr: should be a valid number"),
    (["tiny.yaml", "--grid.train.lr", "[0.1, -1]"], "error: --grid.train.lr: should be greater than 0; got -1"),
    (["tiny.yaml", "--grid.train.lr", "0.1"], "error: --grid.train.lr should be a list of values of that setting"),
    (["tiny.yaml", "--select.seeds", "0"], "error: --select.seeds: should be greater than or equal to 1; got 0"),
    (["tiny.yaml", "-o", "tiny.yaml"], "tiny.yaml is a file; choose a folder (--out)"),
    (["tiny.yaml", "-o", "."], ". is not empty and not a sweep's (no sweep.jsonl); choose another folder (--out)"),
    (["tiny.yaml", "--import", "mine.py"], "--import mine.py: there is no such file"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it raises ImportError
    assert rebased("sweep", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert message in error
    assert os.listdir() == ["tiny.yaml"]


def test_the_smallest_shipped_table_1(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"task.train.0": 64, "task.test.0": 16, "task.held_out.0": 16}
    words = [word for part, n in tiny.items() for word in (f"--{part}.examples", str(n))]
    words += ["--train.epochs", "2", "--grid.train.seed", "[42]"]  # seconds: nothing is learned
    assert rebased("sweep", "table1-cpu", "-o", "out", *words, "--json") == 0
    captured = capsys.readouterr()
    assert "3 of 3 runs done; out" in captured.err
    found = json.loads(captured.out)
    assert found["complete"]
    assert [(run["model"], run["status"]) for run in found["runs"]] == [
        (model, "done") for model in ("ReBased", "x²", "Based")
    ]
    assert all(0 <= run["accuracy"] <= 1 for run in found["runs"])
    names = set()
    for lines in records().values():
        mixer = lines[0]["config"]["model"]["mixers"][1]
        names.add(mixer.get("qk_transform", mixer["name"]))
        assert [line["held_out"].keys() for line in lines[1:-1]] == [{"accuracy", "by_pairs", "by_length"}] * 2
    assert names == {"norm_affine", "none", "based"}


def test_pieces_of_a_sweep_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    write({"model.preset": ["rebased", "based"], "train.seed": [1, 2]}, epochs=1)
    one = ["sweep", "tiny.yaml", "--jobs", "1"]
    assert rebased(*one, "-o", "a", "--grid.train.seed", "[1]", "--bundle", "a.jsonl.gz") == 0
    assert "wrote a.jsonl.gz: 2 runs" in capsys.readouterr().out
    assert rebased(*one, "-o", "b", "--known", "a.jsonl.gz", "--bundle", "b.jsonl.gz", "--for", "9m") == 0
    out = capsys.readouterr().out
    assert "known: 2 of 4 runs" in out
    assert "4 runs: 2 done, 2 to train in b" in out
    assert "from the records of this folder" in out  # known records give the rates: nothing was timed
    assert re.search(r"\nwrote b\.jsonl\.gz: 4 runs, \d kB\n4 of 4 runs done; b\n$", out)
    assert len(list(Path("b").glob("*/record.jsonl"))) == 2
    before = Path("b.jsonl.gz").read_bytes()
    assert rebased(*one, "-o", "c", "--known", "b.jsonl.gz", "a.jsonl.gz", "--bundle", "c.jsonl.gz") == 0
    assert Path("c.jsonl.gz").read_bytes() == before
    assert rebased(*one, "-o", "c", "--bundle", "b.jsonl.gz") == 0  # what is written is read first
    assert Path("b.jsonl.gz").read_bytes() == before


def test_a_full_disk_at_the_end_is_named_and_stops_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"train.seed": [1]}, epochs=1)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rebased.cli.sweep_files.write_union", full)
    assert rebased(*WORDS, "--jobs", "1", "--bundle", "b.jsonl.gz", "--carry-unfinished", "rest") == 1
    out = capsys.readouterr().out
    assert "could not write b.jsonl.gz (No space left on device): make room there" in out
    assert "wrote rest: 0 unfinished runs" in out
    assert "1 of 1 run done; out" in out


@pytest.mark.usefixtures("timed")
def test_time_that_is_too_short_and_files_that_are_not_bundles(capsys: pytest.CaptureFixture[str]) -> None:
    write({"train.seed": [1, 2]}, epochs=100_000)
    assert rebased(*WORDS, "--for", "30s", "--workers", "1") == 75
    assert re.search(
        r"0 of 2 runs done; out\ntime is up with 2 runs left, and none fits into --for 30 s: the shortest takes about "
        r"[\d.]+ (s|min|h)\. Give more time, or --carry-unfinished FOLDER, .*; go on with: rebased sweep tiny.yaml",
        capsys.readouterr().out,
    )
    for words, message in (
        (["--known", "nowhere.jsonl.gz"], "--known nowhere.jsonl.gz: there is no such file or folder"),
        (["--bundle", "x.zip"], "the name of a bundle must end in .jsonl.xz or .jsonl.gz"),
        (
            ["--carry-unfinished", "tiny.yaml"],
            "tiny.yaml: give a name that ends in .tar, or a folder",
        ),
        (["--for", "0s"], "--for: give a time, such as 9m"),
        (["--for", "99999999999999999999d"], "--for: give a time, such as 9m"),
        (["--for", "9"], "--for: give a time, such as 9m, 45s or 1h30m, not 9"),
        (["--bundle", "tiny.yaml/x.jsonl.gz"], "--bundle tiny.yaml/x.jsonl.gz: nothing can be written in tiny.yaml"),
        (["--carry-unfinished", "tiny.yaml/rest"], "--carry-unfinished tiny.yaml/rest: nothing can be written in"),
    ):
        assert rebased(*WORDS, *words) == 2
        assert message in capsys.readouterr().err
    Path("torn.jsonl.gz").write_bytes(b"no archive")
    assert rebased(*WORDS, "--dry-run", "--bundle", "torn.jsonl.gz") == 2
    assert "torn.jsonl.gz: this file is damaged; move it" in capsys.readouterr().err


def test_a_bundle_with_records_that_cannot_be_read_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    write({"train.seed": [1]}, epochs=1)
    strange = fake_run()
    del strange.lines[0]["parameters"]  # as of a version of the code to come
    write_bundle([strange], Path("b.jsonl.gz"))
    assert rebased(*WORDS, "--dry-run", "--bundle", "b.jsonl.gz") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "b.jsonl.gz: this file holds 1 record that cannot be read here" in error
    assert "parameters: Field required" in error
    assert rebased(*WORDS, "--dry-run", "--known", "b.jsonl.gz") == 0
    assert "left out 1 record that cannot be read here: " in capsys.readouterr().out


def test_the_time_begins_with_the_command_not_after_its_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"train.seed": [1]}, epochs=1)
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_bundle([fake_run()], Path(name))
    words = ["--bundle", "c.jsonl.gz", "--known", "a.jsonl.gz", "b.jsonl.gz", "--json", "found.json"]
    an_hour_ago = time.monotonic() - 3600
    with monkeypatch.context() as late:
        late.setattr("rebased.cli.time", SimpleNamespace(monotonic=lambda: an_hour_ago))
        assert rebased(*WORDS, "--for", "59m", "--jobs", "1", *words) == 75
    out = capsys.readouterr().out
    said = re.search(r"time is up with 1 run left, and none fits into --for 59 min: .*; go on with: rebased (.*)", out)
    assert said
    assert not json.loads(Path("found.json").read_text())["complete"]
    assert rebased(*shlex.split(said[1])) == 0  # it works as printed, and replaces its own result
    assert re.search(
        r"--for 36\d\ds --jobs 1 --bundle c.jsonl.gz --known a.jsonl.gz b.jsonl.gz --json found.json$", said[1]
    )
    assert json.loads(Path("found.json").read_text())["complete"]
    Path("found.json").write_text("{}")  # not a result of ours
    assert rebased(*shlex.split(said[1])) == 2
    assert "found.json is there already" in capsys.readouterr().err


def test_a_sweep_that_runs_out_of_time_goes_on_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"train.seed": [1]}, epochs=100_000, stop_above=1)
    words = ["sweep", "tiny.yaml", "--jobs", "1", "--bundle", "all.jsonl.gz", "--carry-unfinished", "rest.tar"]

    def until(folder: str, epochs: int) -> None:
        """Let the time be up when the record in a folder has so many epochs."""

        def is_up(budget: TimeBudget) -> bool:
            return any(
                len(epochs_of(lines_so_far(path.parent))) >= epochs for path in Path(folder).glob("*/record.jsonl")
            )

        monkeypatch.setattr(TimeBudget, "is_up", property(is_up))

    until("a", 2)
    assert rebased(*words, "-o", "a", "--for", "9m", "--carry-mib", "3") == 75
    out = capsys.readouterr().out
    assert "time is up: saving 1 run; Ctrl-C ends at once" in out
    assert out.splitlines()[-1].endswith("--carry-unfinished rest.tar -o a --for 9m --carry-mib 3")
    assert "wrote rest.tar: 1 unfinished run, " in out
    assert re.search(r"time is up with 1 run left.*; go on with: rebased sweep tiny.yaml .*-unfinished rest.tar", out)
    assert "--known" not in out  # what is written is read
    (first,) = (epochs_of(read_record(path)) for path in Path("a").glob("*/record.jsonl"))
    Path("torn.tar").write_bytes(Path("rest.tar").read_bytes()[:-12_000])
    assert rebased("sweep", "tiny.yaml", "-o", "d", "--known", "rest.tar", "torn.tar") == 2
    assert "torn.tar is not a file of unfinished runs, or is damaged" in capsys.readouterr().err
    assert rebased("sweep", "tiny.yaml", "-o", "d", "--dry-run") == 0  # the folder is a sweep's, with the unpacked run
    capsys.readouterr()
    assert rebased("sweep", "tiny.yaml", "-o", "e", "--known", "rest.tar", "--dry-run") == 0
    assert "rest.tar: 1 unfinished run to go on with" in capsys.readouterr().out
    assert not Path("e").exists()
    until("b", len(first) + 1)
    assert rebased(*words, "-o", "c", "--train.lr", "0.5") == 2
    assert "rest.tar holds unfinished runs of another sweep" in capsys.readouterr().err
    assert rebased(*words, "-o", "b", "--for", "9m") == 75  # what is to be replaced is read first
    assert "rest.tar: 1 unfinished run to go on with" in capsys.readouterr().out
    (second,) = (epochs_of(read_record(path)) for path in Path("b").glob("*/record.jsonl"))
    assert second == list(range(1, len(second) + 1))
    assert len(second) > len(first)
