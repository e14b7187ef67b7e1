"""Open a trained model of either kind: one that recalls values of keys (MQAR), or one that continues text."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from rebased.config import did_you_mean
from rebased.files import read_json
from rebased.models import LanguageModel
from rebased.models.weights import load_model
from rebased.runs.load import TextModel, open_text_model
from rebased.runs.record import RECORD, read_record
from rebased.runs.shipped import ABOUT, MODELS
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import TaskData

RECALL_TASKS = ("mqar", "forgetting_mqar")


class RecallModel(NamedTuple):
    """A model that was trained to recall, and the task section of its run."""

    model: LanguageModel  # in eval mode
    task: TaskData


def shipped_models() -> dict[str, Path]:
    """Return the folders of the models that come with the package, by name: the MQAR models, then the text model."""
    recall = {f"mqar/{name}": MODELS / "mqar" / name for name in ("rebased", "based", "attention")}
    return recall | {"lm/stdlib-bytes": MODELS}


def find_model(name: Path | str) -> Path:
    """Return the path of a model: the file or folder of that path if there is one, else the shipped model's."""
    path, shipped = Path(name), shipped_models()
    if path.exists():
        return path
    if path.as_posix() in shipped:
        return shipped[path.as_posix()]
    raise ValueError(
        f"{name} does not exist, and no shipped model has this name; give a run's folder, or "
        f"{did_you_mean(path.as_posix(), list(shipped))}"
    )


def open_model(
    path: Path, tokenizer: str | None = None, data: Path | None = None, device: torch.device | str = "cpu"
) -> RecallModel | TextModel:
    """Return the model of a run's folder, or of a shipped one's, on `device`. A file alone is a model of text.

    `tokenizer` and `data` are as in `open_text_model`. Raises ValueError if the run has not ended, was trained on a
    task without keys and values, or cannot be opened as a model of text.
    """
    config = _config(path)
    if "task" not in config:
        return open_text_model(path, tokenizer, data, device)
    task = config["task"]["name"]
    if task not in RECALL_TASKS:
        raise ValueError(
            f"{path} was trained on the task {task!r}, which has no keys and values; give a run on "
            f"{' or '.join(RECALL_TASKS)}, or one of `rebased lm train`"
        )
    return RecallModel(load_model(path, device), SyntheticRunConfig.model_validate(config).task)


def _config(path: Path) -> dict[str, Any]:
    """The config of the run that a model is from; empty where nothing beside the weights says.

    Raises ValueError if the record there says that the run has not ended, or diverged.
    """
    if not path.is_dir():
        path = path.parent
    if (path / RECORD).is_file():
        lines = read_record(path)
        end = lines[-1] if lines else {}
        if end.get("type") != "end":
            raise ValueError(f"{path} has not ended, so it has no trained model yet; finish it with --resume")
        if end.get("status") != "done":
            raise ValueError(f"{path} {end.get('status')} and left no trained model; give another run")
        return dict(lines[0].get("config", {}))
    return dict(read_json(path / ABOUT).get("config", {})) if (path / ABOUT).is_file() else {}
