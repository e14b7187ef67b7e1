"""rebased demo: train small models on MQAR on the CPU, time the operator, and write a page with three answers."""

from os.path import relpath
from pathlib import Path
from typing import Annotated

from rebased.cli import same_page
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.cli.sweep import Command, run_sweep
from rebased.cli.sweep_files import SweepFiles
from rebased.evaluate.attention_speed import time_attention
from rebased.evaluate.readout import Readout, read_out, read_pairs
from rebased.models.weights import load_model
from rebased.report.demo import demo_page, three_sentences, verdicts
from rebased.report.demo_figures import label, labelled
from rebased.report.page import check_replaceable, write_page
from rebased.runs.collect import collect
from rebased.runs.finished import Run
from rebased.runs.record import read_record
from rebased.runs.shipped import MODELS

SWEEP = Path("demo")
SHIPPED = MODELS / "demo.jsonl.xz"
"""Runs of the same sweep with other seeds, by the command in shipped/README.md."""
OUT = Path("runs") / "demo"
SUITE_PAGE = Path("runs") / "suite-quick" / "report.html"
SEEDS = 2  # some 280 seconds of one core; the shipped seeds decide
FIRST_SEED = 42  # the paper's


def demo(
    *, out: Annotated[Path, OUT_OPTION] = OUT, seeds: int = SEEDS, config: Path = SWEEP, to: Output = TO_TERMINAL
) -> int:
    """Train five small models on one recall task, time the operator, and write a page with what was found.

    The task is MQAR. The models are linear attention (two widths of keys), Based, ReBased and softmax attention. The
    operator is timed beside softmax attention. This takes two to three minutes on two cores. The same command resumes
    it; runs that are done are not repeated.

    Parameters
    ----------
    out
        Folder for the runs and for report.html.
    seeds
        Number of runs per model.
    config
        YAML file or name of a shipped sweep to train instead of the demo's own. It needs a ReBased model, and a grid
        with train.seed, which is replaced.
    """
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: give 1 or more")
    to.check()
    console, page = to.console(), out / "report.html"
    check_replaceable(page)  # before minutes of training, not after
    settings = ("--grid.train.seed", str(list(range(FIRST_SEED, FIRST_SEED + seeds))))
    command = Command(config, settings, out, SweepFiles())
    points = command.read().points
    code, _ = run_sweep(command, to, retry_failed=True)
    if code:
        return code
    runs = [Run(digest, read_record(out / digest)) for digest in (point.config.digest() for point in points)]
    if diverged := [run for run in runs if run.status != "done"]:
        raise ValueError(f"{label(diverged[0])}, seed {diverged[0].seed}, diverged; the page needs all models")
    shipped = [] if config != SWEEP else collect([SHIPPED]).runs
    say(console, "timing attention, 256 to 8,192 tokens ...")
    timings = time_attention()
    maps = {name: read_state(out / group[0].folder, group[0]) for name, group in labelled(runs).items()}
    answers = three_sentences(runs, shipped, timings, maps)
    suite = Path(relpath(SUITE_PAGE, out)).as_posix() if SUITE_PAGE.exists() else None
    write_page(demo_page(runs, shipped, timings, maps, same_page(), suite), page)
    for answer in answers:
        say(to.result_console(), answer)
    say(console, f"wrote {page}: open it in a browser")
    decided = {one.b: one.is_decided for one in verdicts(shipped or runs)}
    to.emit({"answers": answers, "decided": decided, "page": page, "timings": [one._asdict() for one in timings]})
    return 0


def read_state(folder: Path, run: Run) -> Readout:
    """What the state of a run's model holds while it reads one test sequence with the most pairs."""
    task = run.config.task
    hardest = max(task.test, key=lambda segment: segment.settings()["kv_pairs"])
    tokens = task.task(hardest).build(1, task.test_seed, split="test").inputs[0].tolist()
    pairs = read_pairs(tokens, task.vocab_size // 2).pairs
    return read_out(load_model(folder), tokens, pairs, range(2, len(tokens) + 1, 2))
