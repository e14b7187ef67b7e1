"""Load a trained language model, with the prepared text that it is measured on, or with its tokenizer alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rebased.data import Corpus
from rebased.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, vocabulary_digest
from rebased.files import read_json
from rebased.models import LanguageModel
from rebased.models.weights import WEIGHTS, load_model
from rebased.runs.configs import run_kind
from rebased.runs.folder import CONFIG
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import RECORD, read_record
from rebased.runs.shipped import ABOUT, TEXT_MODEL, find_model, model_name
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import TaskData

SPARE_ROWS = 1024  # embedding rows that a model may have beyond the vocabulary


class Trained(NamedTuple):
    """A trained model, prepared text, and how the text was read in training."""

    model: LanguageModel  # in eval mode
    corpus: Corpus
    seq_len: int  # tokens per window in training; the model's max_len where no record says
    isolate_documents: bool  # as in training; False where no record says


def open_trained(path: Path, data: Path | None = None, device: torch.device | str = "cpu") -> Trained:
    """The model of a run's folder or of one safetensors file, on `device`, with the prepared text `data`.

    Without `data` it is the text that the run was trained on. Raises ValueError if the files are missing, the run was
    not trained on text, or the text was made with another tokenizer than the model's.
    """
    run = _check_run(path)
    trained_on = run.get("config", {}).get("data", {})
    model = load_model(path, device)
    folder = data or trained_on.get("folder")
    if folder is None:
        raise ValueError(
            f"{model_name(path)} does not say which text it was trained on; name a prepared folder with --data"
        )
    if data is None and not Path(folder).exists():
        ours = f", or make it with: rebased data prepare -o {folder}" if model_name(path) == TEXT_MODEL else ""
        raise ValueError(
            f"{model_name(path)} was trained on {folder}, which does not exist here; give its present place with "
            f"--data{ours}"
        )
    corpus = Corpus(folder)
    name, size = corpus.manifest.tokenizer.name, corpus.vocab_size
    said = f"{corpus.folder} was made with the tokenizer {name} of {size:,} tokens, and the model"
    remedy = "prepare the text with the tokenizer that the model was trained with"
    _check_tokenizer(model, size, corpus.vocabulary, run.get("corpus"), said, remedy)
    seq_len = int(trained_on.get("seq_len", model.config.max_len))
    return Trained(model, corpus, seq_len, bool(trained_on.get("isolate_documents", False)))


class TextModel(NamedTuple):
    """A trained model and the tokenizer that it was trained with: enough to write text."""

    model: LanguageModel  # in eval mode
    tokenizer: Tokenizer


def open_text_model(
    path: Path | None, tokenizer: str | None = None, data: Path | None = None, device: torch.device | str = "cpu"
) -> TextModel:
    """The model of a run's folder or of one safetensors file, on `device`, and its tokenizer.

    Without `path` it is the model that comes with the package. `tokenizer` is a name as in load_tokenizer; otherwise it
    is that of the prepared folder `data`, or of the text that the run was trained on. Raises ValueError if files are
    missing, the run was not trained on text, or the tokenizer is another one than the model's.
    """
    path = find_model() if path is None else path
    run = _check_run(path)
    model = load_model(path, device)
    found = _tokenizer_of(path, run, tokenizer, data)
    said = f"the tokenizer {found.name} has {found.vocab_size:,} tokens, and the model"
    vocabulary, remedy = vocabulary_digest(found.to_json()), "give the tokenizer that it was trained with"
    _check_tokenizer(model, found.vocab_size, vocabulary, run.get("corpus"), said, remedy)
    return TextModel(model, found)


def open_tokenizer(path: Path, tokenizer: str | None = None, data: Path | None = None) -> Tokenizer:
    """The tokenizer that `open_text_model` returns, without the model. Whether it fits the model is not looked at."""
    return _tokenizer_of(path, _check_run(path), tokenizer, data)


def _tokenizer_of(path: Path, run: dict[str, Any], tokenizer: str | None, data: Path | None) -> Tokenizer:
    trained_on = run.get("corpus")
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if data is not None:
        return Corpus(data).tokenizer
    if trained_on is not None and trained_on["tokenizer"] == ByteTokenizer.name:
        return ByteTokenizer()
    folder = run.get("config", {}).get("data", {}).get("folder")
    if folder is None or not Path(folder).exists():
        where = f"the text that it was trained on, {folder}, does not exist here"
        where = "it does not say which tokenizer it was trained with" if folder is None else where
        raise ValueError(f"{path}: {where}; give its tokenizer with --tokenizer tokenizer.json, or bytes")
    return Corpus(folder).tokenizer


def _check_tokenizer(
    model: LanguageModel, size: int, vocabulary: str, trained_on: dict[str, Any] | None, said: str, remedy: str
) -> None:
    """Raise ValueError if the model was trained with another tokenizer than one of `size` tokens, `vocabulary`.

    `trained_on` describes the text of the run. Without it the embedding's rows are compared with the vocabulary: there
    may be a few more rows than tokens, because round sizes are fast, but not many.
    """
    rows = model.config.vocab_size
    if trained_on is not None:
        own = f"{said} was trained with {trained_on['tokenizer']}"
        if trained_on["vocab_size"] != size:
            raise ValueError(f"{own} of {trained_on['vocab_size']:,}; {remedy}")
        if trained_on.get("vocabulary") not in (None, vocabulary):
            raise ValueError(f"{own}, which has other tokens; {remedy}")
    if size > rows or (trained_on is None and rows - size > max(SPARE_ROWS, size // 10)):
        raise ValueError(f"{said} has a vocabulary of {rows:,}; {remedy}")


def _check_run(path: Path) -> dict[str, Any]:
    """The first line of the record beside the weights. Raises ValueError if there is no model of text at `path`."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a run's folder or its model.safetensors")
    if path.is_dir() and not (path / CONFIG).exists() and not (path / WEIGHTS).exists():
        raise ValueError(f"{path} is not a run's folder (no {CONFIG}); give one, or a model.safetensors")
    run = next(iter(record_beside(path)), {})
    if run and "corpus" not in run:
        raise ValueError(
            f"{model_name(path)} was not trained on text: it is a run of `rebased train`; give a run of "
            "`rebased lm train`"
        )
    return run


def record_beside(path: Path) -> list[dict[str, Any]]:
    """The record beside a model's weights; of a shipped model its first and last line; empty if there is none."""
    folder = path if path.is_dir() else path.parent
    if (folder / RECORD).is_file():
        return read_record(folder)
    if not (folder / ABOUT).is_file():
        return []
    about = read_json(folder / ABOUT)
    tokens, bits = about.get("measured_tokens", {}), about.get("bits_per_byte", {})
    measured = {split: {"all": {"perplexity": 2 ** bits[split]}, "tokens": tokens[split]} for split in bits}
    return [about, {"type": "end", "status": "done", "step": about.get("steps"), **measured}]


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
    if not config or run_kind(config) is LMRunConfig:
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
    check_done(folder, lines)
    return dict(lines[0].get("config", {}))


def check_done(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless the run in `folder`, with these lines in its record, has left a trained model."""
    if not lines or lines[-1]["type"] != "end":
        raise ValueError(f"{folder} has not ended, so it has no trained model yet; finish it with --resume")
    if (status := lines[-1]["status"]) != "done":
        raise ValueError(f"{folder} {status} and left no trained model; give another run")
