"""rebased lm train: train one language model, as a config file says."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rebased.cli import INTERRUPTED, USER_ERROR
from rebased.cli.imports import import_user_code
from rebased.cli.interruption import continue_with, ended_at_once, nothing_to_resume
from rebased.cli.output import OPTIONS as OUTPUT
from rebased.cli.output import TO_TERMINAL, Output, say
from rebased.cli.overrides import parse_overrides
from rebased.cli.progress import progress_sink
from rebased.cli.warn_once import each_warning_once
from rebased.config import load_config, plural
from rebased.files import NotSaved
from rebased.runs.lm_config import LMRunConfig, LMTrainConfig
from rebased.runs.record import read_record
from rebased.runs.shipped import find_config
from rebased.train import RunResult, train
from rebased.train.dashboards import dashboards
from rebased.train.world import ReportedElsewhere

OPTIONS = (
    "--config",
    "--out",
    "--resume",
    "--import",
    "--tensorboard",
    "--wandb",
    "--help",
    *OUTPUT,
    *(f"--train.{key}" for key in LMTrainConfig.model_fields),
)


def lm_train(
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Path,
    out: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    imports: Annotated[tuple[str, ...], Parameter(name="--import", negative="", show_default=False)] = (),
    tensorboard: Annotated[bool, Parameter(negative="")] = False,
    wandb: str | None = None,
    to: Output = TO_TERMINAL,
) -> int:
    """Train one language model on prepared text as a config file says.

    Several GPUs or machines: torchrun --nproc-per-node 8 --no-python rebased lm train ... --train.parallel ddp

    Parameters
    ----------
    config
        YAML file with the sections data, model and train, or the name of a shipped one, such as lm/quick (`rebased
        list configs` lists them). Any setting in it can be changed on the command line: --train.lr 3e-4
        --model.n_layers 6
    out
        Folder for the run. Default: runs/NAME-DIGEST, with the name of the config file and the digest of the run.
    resume
        Continue the run in that folder from its last checkpoint.
    imports
        Python file or module with mixers of your own (@register_mixer). Can be given several times.
    tensorboard
        Also write event files into the run's folder, for tensorboard --logdir runs (pip install 'rebased[log]').
    wandb
        Also send the record to this project of Weights & Biases (pip install 'rebased[log]').
    """
    to.check()
    for name in imports:
        import_user_code(name)
    config = find_config(config, "lm")
    console = to.console()
    with each_warning_once(console):
        run = load_config(LMRunConfig, config, parse_overrides(settings, OPTIONS))
    folder = out or Path("runs") / f"{config.stem}-{run.digest()}"
    if resume and (message := nothing_to_resume(folder)):
        say(console, message)
    boards = dashboards(folder, tensorboard=tensorboard, wandb=wandb)
    try:
        with progress_sink(console) as sink:
            result = train(run, folder, resume=resume, sinks=[sink, *boards])
    except KeyboardInterrupt:  # the second Ctrl-C
        say(console, ended_at_once("lm train", folder, imports))
        return INTERRUPTED
    except NotSaved as error:
        raise NotSaved(f"{error}; {continue_with('lm train', folder, imports)}") from error
    except ReportedElsewhere:
        return USER_ERROR
    if result.is_rank_zero:
        say(console, describe(result, imports))
        end = read_record(result.folder)[-1] if result.status != "interrupted" else {}
        measured: dict[str, Any] = {split: end[split] for split in ("valid", "test") if split in end}
        to.emit(
            {"status": result.status, "folder": result.folder, "digest": run.digest(), "step": result.step, **measured}
        )
    return INTERRUPTED if result.status == "interrupted" else 0


def describe(result: RunResult, imports: tuple[str, ...]) -> str:
    """How the run ended, in words."""
    if result.status == "interrupted":
        return f"interrupted at step {result.step}, saved; {continue_with('lm train', result.folder, imports)}"
    begin = "this run is done already: " if result.status == "already_done" else ""
    end = read_record(result.folder)[-1]
    found = ", ".join(f"{split} perplexity {in_parts(end[split])}" for split in ("valid", "test") if split in end)
    return f"{begin}{found} after {plural(result.step, 'step')}; {result.folder}"


def in_parts(measured: dict[str, Any]) -> str:
    """The perplexities of all, AR and non-AR tokens in words: "16.451 (AR 3.672, non-AR 56.310)"."""
    values = (measured[part]["perplexity"] for part in ("all", "ar", "non_ar"))
    every, ar, non_ar = ("-" if value is None else f"{value:.3f}" for value in values)
    return f"{every} (AR {ar}, non-AR {non_ar})"
