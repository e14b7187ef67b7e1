"""TensorBoard and Weights & Biases: the lines of the record, sent on as they are written."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from rebased.train.lm.sinks import TextSink, TextStart

MEASURED = ("loss", "perplexity", "grad_norm", "lr", "tokens_per_second", "mfu")


class TensorBoard(TextSink):
    """Event files in a folder of the run. Of a run that is resumed, what was written twice is shown once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer_class = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter

    def start(self, run: TextStart) -> None:
        self._writer = self._writer_class(str(self._folder), purge_step=run.step + 1)

    def report(self, line: dict[str, Any]) -> None:
        self._write("train", line)

    def evaluation(self, line: dict[str, Any]) -> None:
        self._write("valid", line)
        self._writer.flush()

    def end(self, line: dict[str, Any]) -> None:
        self._writer.close()

    def _write(self, where: str, line: dict[str, Any]) -> None:
        for name, value in scalars(line).items():
            self._writer.add_scalar(f"{where}/{name}", value, line["step"])


class WeightsAndBiases(TextSink):
    """A run in a W&B project, under the name of its folder. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, project: str, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._wandb = _load("wandb", "wandb")

    def start(self, run: TextStart) -> None:
        name, config = self._folder.name, run.config.model_dump(mode="json")
        known = re.sub(r"[^\w-]", "-", f"{name[-100:]}-{run.config.digest()}")  # the same run twice is two runs there
        self._run = self._wandb.init(
            project=self._project, name=name, id=known, resume="allow", config=config, dir=self._folder
        )

    def report(self, line: dict[str, Any]) -> None:
        self._send("train", line)

    def evaluation(self, line: dict[str, Any]) -> None:
        self._send("valid", line)

    def end(self, line: dict[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in line.items() if key != "type"})
        self._run.finish()

    def _send(self, where: str, line: dict[str, Any]) -> None:
        values = {f"{where}/{name}": value for name, value in scalars(line).items()}
        self._run.log(values | {"step": line["step"]})


def scalars(line: dict[str, Any]) -> dict[str, float]:
    return {name: line[name] for name in MEASURED if line.get(name) is not None}


def _load(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{package} is not installed; it comes with: pip install 'rebased[log]'") from error
