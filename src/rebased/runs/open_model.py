"""Open a trained model of either kind: one that recalls values of keys (MQAR), or one that continues text."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from rebased.models import LanguageModel
from rebased.models.weights import load_model
from rebased.runs.load import TextModel, open_text_model, record_beside
from rebased.runs.record import RECORD
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import TaskData

RECALL_TASKS = ("mqar", "forgetting_mqar")


class RecallModel(NamedTuple):
    """A model that was trained to recall, and the task section of its run."""

    model: LanguageModel  # in eval mode
    task: TaskData


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
    folder = path if path.is_dir() else path.parent
    lines = record_beside(path)
    if not lines and not (folder / RECORD).is_file():
        return {}
    end = lines[-1] if lines else {}
    if end.get("type") != "end":
        raise ValueError(f"{folder} has not ended, so it has no trained model yet; finish it with --resume")
    if end.get("status") != "done":
        raise ValueError(f"{folder} {end.get('status')} and left no trained model; give another run")
    return dict(lines[0].get("config", {}))
