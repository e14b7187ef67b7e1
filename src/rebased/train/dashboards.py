"""Sinks that send the numbers of a record to TensorBoard or Weights & Biases."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from rebased.train.sinks import RunStart, Sink

MEASURED = ("loss", "perplexity", "grad_norm", "lr", "tokens_per_second", "mfu")


class TensorBoard(Sink):
    """Writes TensorBoard event files. A resumed run replaces what was written after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer_class = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter

    def start(self, run: RunStart) -> None:
        self._writer = self._writer_class(str(self._folder), purge_step=run.step + 1)

    def line(self, line: dict[str, Any]) -> None:
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])
        if line["type"] in ("eval", "epoch"):
            self._writer.flush()

    def end(self, line: dict[str, Any]) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """Logs to a project of Weights & Biases; the run has the name of its folder. WANDB_MODE=offline sends nothing."""

    def __init__(self, project: str, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._wandb = _load("wandb", "wandb")

    def start(self, run: RunStart) -> None:
        name, config = self._folder.name, run.config.model_dump(mode="json")
        # the same config in another folder is another run
        run_id = re.sub(r"[^\w-]", "-", f"{name[-100:]}-{run.config.digest()}")
        self._run = self._wandb.init(
            project=self._project, name=name, id=run_id, resume="allow", config=config, dir=self._folder
        )

    def line(self, line: dict[str, Any]) -> None:
        if values := scalars(line):
            self._run.log({**values, "step": line["step"]})

    def end(self, line: dict[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in line.items() if key != "type"})
        self._run.finish()


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers in a line of the record that dashboards draw, by names such as "train/loss"."""
    splits = {"step": ("train",), "eval": ("valid",), "epoch": ("train", "test", "held_out")}.get(line["type"], ())
    found: dict[str, float] = {}
    for split in splits:
        values = line.get(split, {}) if split in ("test", "held_out") else line
        names = MEASURED if values is line else ("accuracy",)
        found |= {f"{split}/{name}": values[name] for name in names if values.get(name) is not None}
    return found


def dashboards(folder: Path, *, tensorboard: bool, wandb: str | None) -> list[Sink]:
    """The sinks that a user asked for: `wandb` is the name of a project of Weights & Biases."""
    sinks: list[Sink] = [TensorBoard(folder / "tensorboard")] if tensorboard else []
    return [*sinks, WeightsAndBiases(wandb, folder)] if wandb else sinks


def _load(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{package} is not installed; it comes with: pip install 'rebased[log]'") from error
