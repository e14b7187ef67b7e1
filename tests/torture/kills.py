"""Commands that are killed, lose a worker or find the disk full, then go on: their results must be the uninterrupted.

A trial is one scenario (a command and the command that goes on), one accident and its place, all drawn from the seed.
"""

import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.torture.outcome import Limits, Outcome, judge, run_forked

NOISE = ("seconds", "test_seconds", "tokens_per_second", "code", "processes", "machine", "sha256")
"""Keys of record lines that may differ between two equal runs: times, what computed them, and a checksum of these."""
IGNORED_FILES = (".lock", "sweep.jsonl")  # the log of a sweep says how often it was begun
PATIENCE = Limits(seconds=120.0, memory=6 * 2**30)
TRIES = 6
"""How often a command is called again until it is done: an accident may also come while it goes on."""


class Scenario(NamedTuple):
    """A command, the one that goes on after an accident, and the folder with its results."""

    name: str
    first: tuple[str, ...]
    again: tuple[str, ...]
    out: str
    workers: bool  # whether it starts processes of its own


SCENARIOS = (
    Scenario(
        "train",
        ("train", "--config", "kill-run.yaml", "--out", "out"),
        ("train", "--config", "kill-run.yaml", "--out", "out", "--resume"),
        "out",
        False,
    ),
    Scenario(
        "lm train",
        ("lm", "train", "--config", "kill-lm.yaml", "--out", "out"),
        ("lm", "train", "--config", "kill-lm.yaml", "--out", "out", "--resume"),
        "out",
        False,
    ),
    Scenario(
        "data prepare",
        ("data", "prepare", "text.txt", "-o", "out", "--workers", "1", "--shard-size", "2kB"),
        ("data", "prepare", "text.txt", "-o", "out", "--workers", "1", "--shard-size", "2kB", "--resume"),
        "out",
        False,
    ),
    Scenario(
        "data prepare, 2 workers",
        ("data", "prepare", "text.txt", "-o", "out", "--workers", "2", "--shard-size", "2kB"),
        ("data", "prepare", "text.txt", "-o", "out", "--workers", "2", "--shard-size", "2kB", "--resume"),
        "out",
        False,
    ),
    Scenario(
        "sweep, 2 workers",
        ("sweep", "kill-sweep.yaml", "--out", "out", "--workers", "2"),
        ("sweep", "kill-sweep.yaml", "--out", "out", "--workers", "2"),
        "out",
        True,
    ),
)


RUN: dict[str, Any] = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 40}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 20}],
    },
    "model": {"d_model": 8, "mixers": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]},
    "train": {"epochs": 4, "batch_size": 8, "lr": 0.01, "checkpoint_seconds": 0.01, "device": "cpu"},
}
TEXT_RUN: dict[str, Any] = {
    "data": {"folder": "text", "seq_len": 16},
    "model": {"vocab_size": 257, "d_model": 8, "n_layers": 1, "mixers": [{"name": "based", "n_heads": 2}]},
    "train": {"steps": 12, "batch_size": 2, "lr": 0.01, "warmup_steps": 1, "eval_windows": 2, "final_windows": 2}
    | {"log_every": 2, "eval_every": 4, "checkpoint_every": 3, "device": "cpu"},
}


def write_configs(folder: Path) -> None:
    """The configs that scenarios train, and a folder to save to."""
    (folder / "kept").mkdir()
    (folder / "kill-run.yaml").write_text(json.dumps(RUN))
    (folder / "kill-lm.yaml").write_text(json.dumps(TEXT_RUN))
    (folder / "kill-sweep.yaml").write_text(json.dumps({"base": RUN, "grid": {"train.seed": [1, 2, 3]}}))


class Reference(NamedTuple):
    """An uninterrupted run of a scenario."""

    result: Any
    seconds: float
    events: int  # changes of files that Python made


def make_reference(scenario: Scenario, world: Path, scratch: Path) -> Reference:
    """Run a scenario without an accident and count its changes of files."""
    folder = scratch / "reference"
    shutil.copytree(world, folder)
    counter = folder / "events"
    began = time.monotonic()
    outcome = run_forked(scenario.first, folder, PATIENCE, prepare=partial(_count_events, counter))
    if outcome.code != 0:
        raise RuntimeError(f"{scenario.name} failed without an accident: {outcome}")
    seconds = time.monotonic() - began
    reference = Reference(read_result(folder / scenario.out), seconds, int(counter.read_text()))
    shutil.rmtree(folder)
    return reference


class Accident(NamedTuple):
    """What happens to a command: a kind and its place."""

    kind: str
    place: float

    def __str__(self) -> str:
        return f"{self.kind} at {self.place:g}"


def draw_accident(random: Random, scenario: Scenario, reference: Reference) -> Accident:
    """An accident that this scenario can meet."""
    kinds = ["kill", "kill worker"] if scenario.workers else ["kill", "kill before a change", "disk full"]
    kind = random.choice(kinds)
    if kind in ("kill", "kill worker"):
        return Accident(kind, round(random.uniform(0, 1.05 * reference.seconds), 4))
    return Accident(kind, random.randint(1, reference.events))


def run_trial(
    scenario: Scenario, reference: Reference, random: Random, world: Path, folder: Path
) -> tuple[str, str | None]:
    """Let a command meet an accident and go on. Returns the kind of trial, and what is wrong; None if nothing is.

    `folder` is new and stays for inspection.
    """
    shutil.copytree(world, folder)
    accident = draw_accident(random, scenario, reference)
    kind = f"{scenario.name}: {accident.kind}"
    return kind, _go_on(scenario, reference, random, accident, folder)


def _go_on(scenario: Scenario, reference: Reference, random: Random, first: Accident, folder: Path) -> str | None:
    words, story = scenario.first, []
    for attempt in range(TRIES):
        again = (
            draw_accident(random, scenario, reference) if 0 < attempt < TRIES - 1 and random.random() < 0.3 else None
        )
        accident = again if attempt else first
        outcome = _meet(accident, words, folder)
        story.append(f"{accident or 'no accident'}: exit {outcome.code}, signal {outcome.signal}")
        words = scenario.again
        problem = _judge(outcome, accident)
        if problem is None and outcome.code == 0:
            problem = compare(read_result(folder / scenario.out), reference.result)
            return f"{problem} ({'; '.join(story)})" if problem else None
        if problem is not None:
            return f"{problem} ({'; '.join(story)}): ...{outcome.output[-400:]!r}"
    return f"it was not done after {TRIES} calls ({'; '.join(story)}): ...{outcome.output[-400:]!r}"


def _judge(outcome: Outcome, accident: Accident | None) -> str | None:
    """Commands end well, or are killed where that was the accident, or name a user's error where it was another."""
    if accident is not None and accident.kind.startswith("kill") and outcome.signal == signal.SIGKILL:
        return None
    if problem := judge(outcome, PATIENCE):
        return problem
    if accident is None and outcome.code != 0:
        return f"it ended with {outcome.code} without an accident"
    return None


def _meet(accident: Accident | None, words: Sequence[str], folder: Path) -> Outcome:
    """Run a command that meets an accident, or none."""
    if accident is None:
        return run_forked(words, folder, PATIENCE)
    if accident.kind == "kill":
        return run_forked(words, folder, PATIENCE, kill_after=accident.place)
    if accident.kind == "kill worker":
        return run_forked(words, folder, PATIENCE, kill_after=accident.place, victim=_a_worker)
    act = _die if accident.kind == "kill before a change" else _refuse
    return run_forked(words, folder, PATIENCE, prepare=partial(_at_event, int(accident.place), act))


def _a_worker(parent: int) -> int | None:
    """The youngest process among the descendants of a command that has burnt CPU time: a worker, not a helper."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdecimal() else []
        except OSError:  # it has just ended
            continue
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [parent]
    while waiting:
        waiting += (below := children.get(waiting.pop(), []))
        found += below
    return max(found, default=None)


# --- What happens at a change of a file, in the child ----------------------------------------------------------------

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")


def _is_change(event: str, arguments: tuple[Any, ...]) -> bool:
    """True if this audit event of Python changes a file: opens it for writing, renames it, removes it, ..."""
    if event == "open":
        path, _, flags = arguments
        writes = isinstance(path, str | bytes) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        return writes and b"/dev/" not in os.fsencode(path)
    return event in CHANGES


def _on_change(act: Callable[[int], None]) -> None:
    """Call act(number of the change) before each change of a file from now on, and before each fsync."""
    number, sync = 0, os.fsync

    def count() -> None:
        nonlocal number
        number += 1
        act(number)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _is_change(event, arguments):
            count()

    def counted_sync(file: Any) -> None:
        count()
        sync(file)

    sys.addaudithook(hook)
    os.fsync = counted_sync


def _count_events(counter: Path) -> None:
    """Write the number of changes to a file that is open already: opening it would count."""
    file = os.open(counter, os.O_CREAT | os.O_WRONLY, 0o644)

    def write(number: int) -> None:
        os.pwrite(file, str(number).encode(), 0)

    _on_change(write)


def _at_event(place: int, act: Callable[[], None]) -> None:
    _on_change(lambda number: act() if number >= place else None)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- Results, and whether they are equal -----------------------------------------------------------------------------


def read_result(folder: Path) -> dict[str, Any]:
    """Every file below a folder, by name: bytes, or the lines of a record without times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name in IGNORED_FILES:
            continue
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [
                {key: value for key, value in line.items() if key not in NOISE}
                for line in lines
                if line.get("type") not in ("resume",)
            ]
        elif path.name == "checkpoint.json":
            found[name] = "there"  # it holds checksums of the record, which holds times
        else:
            found[name] = path.read_bytes()
    return found


def compare(ours: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """How a result differs from the reference; None if it does not."""
    if missing := sorted(reference.keys() - ours.keys()):
        return f"{', '.join(missing)} is missing"
    if extra := sorted(ours.keys() - reference.keys()):
        return f"{', '.join(extra)} is there and should not be"
    for name, content in reference.items():
        if ours[name] != content:
            return f"{name} differs from that of the uninterrupted run"
    return None
