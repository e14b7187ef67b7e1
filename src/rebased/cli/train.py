"""rebased train: train one model on a synthetic task, as a config file says. `rebased lm train` shares its body."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rebased.cli import INTERRUPTED, USER_ERROR
from rebased.cli.imports import Imports, import_all
from rebased.cli.output import OPTIONS as OUTPUT
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, each_warning_once, say
from rebased.cli.overrides import parse_overrides
from rebased.cli.progress import progress_sink
from rebased.config import load_config, plural
from rebased.files import NotSaved
from rebased.runs.folder import CONFIG
from rebased.runs.record import read_record
from rebased.runs.run_config import RunConfig
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import RunResult
from rebased.train import train as run_training
from rebased.train.dashboards import dashboards
from rebased.train.oom import OUT_OF_MEMORY
from rebased.train.world import ReportedElsewhere

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class TrainOptions:
    """How one run is trained.

    Parameters
    ----------
    out
        Folder for the run. Default: runs/NAME-DIGEST, with the name of the config file and the digest of the run.
    resume
        Continue the run in that folder from its last checkpoint.
    imports
        Python file or module with mixers or tasks of your own (@register_mixer, @register_task). Can be given several
        times.
    tensorboard
        Also write event files into the run's folder, for tensorboard --logdir runs (pip install 'rebased[log]').
    wandb
        Also send the record to this project of Weights & Biases (pip install 'rebased[log]').
    """

    out: Annotated[Path | None, OUT_OPTION] = None
    resume: Annotated[bool, Parameter(negative="")] = False
    imports: Imports = ()
    tensorboard: Annotated[bool, Parameter(negative="")] = False
    wandb: str | None = None


DEFAULT = TrainOptions()


def train(*settings: Settings, config: Path, options: TrainOptions = DEFAULT, to: Output = TO_TERMINAL) -> int:
    """Train one model on a synthetic task, as a config file says.

    Parameters
    ----------
    config
        YAML file with the sections task, model and train, or the name of a shipped one, such as mqar/quick (`rebased
        list configs` lists them). Any setting in it can be changed on the command line: --train.lr 3e-3
        --model.mixers.1.n_heads 4
    """
    return train_one(SyntheticRunConfig, find_config(config, "run"), settings, options, describe, to)


Described = tuple[list[str], dict[str, Any]]
"""How a run has ended: lines of text, the last one the result; and numbers for --json."""


def train_one(
    kind: type[RunConfig],
    file: Path,
    settings: Sequence[str],
    options: TrainOptions,
    describe: Callable[[Any, RunResult], Described],
    to: Output,
) -> int:
    """Train the run of a config file, print how it ended, and return the exit code. `describe` gives the result."""
    to.check()
    import_all(options.imports)
    console, verb = to.console(), kind.verb
    with each_warning_once(console):
        run = load_config(kind, file, parse_overrides(settings, options_of(kind)))
    folder = options.out or Path("runs") / f"{file.stem}-{run.digest()}"
    if options.resume and not (folder / CONFIG).exists() and os.environ.get("RANK", "0") == "0":
        say(console, f"there is no run in {folder} to resume: this begins a new one")
    imports = [word for name in options.imports for word in ("--import", name)]
    words = ["rebased", *verb.split(), "--config", str(folder / CONFIG), "--out", str(folder), "--resume", *imports]
    again = f"continue with: {shlex.join(words)}"
    boards = dashboards(folder, tensorboard=options.tensorboard, wandb=options.wandb)
    try:
        with progress_sink(console) as sink:
            result = run_training(run, folder, resume=options.resume, sinks=[sink, *boards])
    except KeyboardInterrupt:  # the second Ctrl-C
        to_resume = f"to resume from the last checkpoint, {again}"
        say(console, f"ended at once; {to_resume if (folder / CONFIG).exists() else 'nothing was written yet'}")
        return INTERRUPTED
    except NotSaved as error:
        raise NotSaved(f"{error}; {again}") from error
    except ReportedElsewhere:
        return USER_ERROR
    if result.is_rank_zero:
        (*notes, ended), numbers = describe(run, result)
        if result.status == "interrupted":
            say(console, f"interrupted at step {result.step}, saved; {again}")
        else:
            begin = "this run is done already: " if result.status == "already_done" else ""
            say(console, "\n".join([*notes, f"{begin}{ended}; {result.folder}"]))
        about = {"status": result.status, "folder": result.folder, "digest": run.digest(), "step": result.step}
        to.emit(about | numbers)
    return INTERRUPTED if result.status == "interrupted" else 0


def options_of(kind: type[RunConfig]) -> list[str]:
    """The options of the command that trains such runs, to correct a misspelt one."""
    own = ["--config", "--out", "--resume", "--import", "--tensorboard", "--wandb", "--help", *OUTPUT]
    return own + [f"--train.{key}" for key in type(kind.model_fields["train"].default).model_fields]


def describe(run: Any, result: RunResult) -> Described:
    """The accuracy of a run, and why it ended early if it did."""
    numbers = {"epoch": result.epoch, "accuracy": result.accuracy, "split": split_of(run)}
    if result.status == "interrupted":
        return [""], numbers
    record, lines = read_record(result.folder), []
    if cuts := [line["micro_batch"] for line in record if line["type"] == OUT_OF_MEMORY]:
        lines = [f"out of GPU memory: continued with {plural(cuts[-1], 'sequence')} at once, the same batch"]
    epochs, train = [line for line in record if line["type"] == "epoch"], run.train
    if 0 < len(epochs) < train.epochs:
        why = f"no test accuracy reached {train.give_up.below:g} (train.give_up)" if train.give_up else ""
        if epochs[-1]["test"]["accuracy"] > train.stop_above:
            why = f"the test accuracy is above {train.stop_above:g} (train.stop_above)"
        lines += [f"ended after {len(epochs)} of {train.epochs} epochs: {why}"] if why else []
    return [*lines, f"{split_of(run)} accuracy {result.accuracy:.4f} at epoch {result.epoch}"], numbers


def split_of(run: SyntheticRunConfig) -> str:
    """The split whose accuracy is the run's result."""
    return "test" if run.train.protocol == "paper" else "held-out"
