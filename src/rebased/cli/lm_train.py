"""rebased lm train: train one language model, as a config file says."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output
from rebased.cli.train import Ended, train_one
from rebased.config import plural
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.runs.shipped import find_config
from rebased.train import RunResult


def lm_train(
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Path,
    out: Annotated[Path | None, OUT_OPTION] = None,
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
    return train_one(
        LMRunConfig,
        find_config(config, "lm"),
        settings,
        describe,
        out=out,
        resume=resume,
        imports=imports,
        tensorboard=tensorboard,
        wandb=wandb,
        to=to,
    )


def describe(run: LMRunConfig, result: RunResult) -> Ended:
    """The perplexities of a trained model."""
    end = read_record(result.folder)[-1] if result.status != "interrupted" else {}
    measured: dict[str, Any] = {split: end[split] for split in ("valid", "test") if split in end}
    found = ", ".join(f"{split} perplexity {in_parts(scores)}" for split, scores in measured.items())
    return Ended("", f"{found} after {plural(result.step, 'step')}", measured)


def in_parts(measured: dict[str, Any]) -> str:
    """The perplexities of all, AR and non-AR tokens in words: "16.451 (AR 3.672, non-AR 56.310)"."""
    values = (measured[part]["perplexity"] for part in ("all", "ar", "non_ar"))
    every, ar, non_ar = ("-" if value is None else f"{value:.3f}" for value in values)
    return f"{every} (AR {ar}, non-AR {non_ar})"
