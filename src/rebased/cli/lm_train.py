"""rebased lm train: train one language model, as a config file says."""

from pathlib import Path
from typing import Any

from rebased.cli.output import TO_TERMINAL, Output
from rebased.cli.train import DEFAULT, Described, Settings, TrainOptions, train_one
from rebased.config import plural
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.runs.shipped import find_config
from rebased.train import RunResult


def lm_train(*settings: Settings, config: Path, options: TrainOptions = DEFAULT, to: Output = TO_TERMINAL) -> int:
    """Train one language model on prepared text as a config file says.

    Several GPUs or machines: torchrun --nproc-per-node 8 --no-python rebased lm train ... --train.parallel ddp

    Parameters
    ----------
    config
        YAML file with the sections data, model and train, or the name of a shipped one, such as lm/quick (`rebased
        list configs` lists them). Any setting in it can be changed on the command line: --train.lr 3e-4
        --model.n_layers 6
    """
    return train_one(LMRunConfig, find_config(config, "lm"), settings, options, describe, to)


def describe(run: LMRunConfig, result: RunResult) -> Described:
    """The perplexities of a trained model."""
    end = read_record(result.folder)[-1] if result.status != "interrupted" else {}
    measured: dict[str, Any] = {split: end[split] for split in ("valid", "test") if split in end}
    found = ", ".join(f"{split} perplexity {in_parts(scores)}" for split, scores in measured.items())
    return [f"{found} after {plural(result.step, 'step')}"], measured


def in_parts(measured: dict[str, Any]) -> str:
    """The perplexities of all, AR and non-AR tokens in words: "16.451 (AR 3.672, non-AR 56.310)"."""
    values = (measured[part]["perplexity"] for part in ("all", "ar", "non_ar"))
    every, ar, non_ar = ("-" if value is None else f"{value:.3f}" for value in values)
    return f"{every} (AR {ar}, non-AR {non_ar})"
