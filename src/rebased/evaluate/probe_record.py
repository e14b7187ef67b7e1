"""The record of a probe of one run. Pages are drawn from such records alone.

`probe_run` keeps the record in the run's folder as probe.json. It is computed again only if the weights or what is
asked for have changed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from rebased.data.windows import spread_rows
from rebased.evaluate.probe import probe_task
from rebased.evaluate.probe_text import probe_text
from rebased.files import read_json, replacing, sha256_file, without_nan
from rebased.models.weights import WEIGHTS, load_model
from rebased.runs.configs import run_kind
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.load import check_done, open_trained
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.record import RECORD, read_record
from rebased.runs.run_names import kind_of
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import Examples, Split

PROBE = "probe.json"
FORMAT = 1
EXAMPLES = 10_000  # the paper's
WINDOWS = 32

OnProgress = Callable[[int, int], None]


def probe_run(
    folder: Path,
    *,
    split: str | None = None,
    examples: int = EXAMPLES,
    windows: int = WINDOWS,
    seq_len: int | None = None,
    data: Path | None = None,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """The record of a probe of the finished run in `folder`, computed or found there.

    split: of the task or of the text. Default: the held-out split of a task where there is one, else test; of a text
        test where there is one, else valid.
    examples: of a synthetic task, at most so many. windows, seq_len, data: of a text; data is a prepared folder,
        default the one that the run was trained on.

    Raises ValueError for a run that has not ended or has diverged, and for what `probe_task` and `probe_text` refuse.
    """
    for option, count in {"--examples": examples, "--windows": windows}.items():
        if count < 1:
            raise ValueError(f"{option} {count}: give 1 or more")
    lines = read_lines(folder)
    settings = lines[0]["config"]
    is_text = run_kind(settings) is LMRunConfig
    asked: dict[str, Any] = {"split": split}
    asked |= {"windows": windows, "seq_len": seq_len} if is_text else {"examples": examples}
    weights = folder / WEIGHTS
    if not weights.exists():
        raise ValueError(f"{weights} is missing, though the run is done; restore it, or train the run again")
    request = asked | {"format": FORMAT, "weights": sha256_file(weights)}
    if data is None and (known := _known(folder / PROBE, request)):
        return known
    where = torch.device(device)
    if is_text:
        found = _probe_text(folder, data, split, windows, seq_len, where, on_progress)
    else:
        found = _probe_task(folder, settings, split, examples, where, on_progress)
    record = without_nan(
        {
            "type": "probe",
            "kind": "text" if is_text else "task",
            "request": request,
            "folder": folder.name,
            "digest": lines[0]["digest"],
            "model": kind_of(settings["model"]),
            "parameters": lines[0]["parameters"],
            "config": settings,
            "code": describe_code(),
            "machine": describe_machine(where),
            **found,
        }
    )
    if data is None:  # what was found on another text is not kept: the file does not say which text it was
        with replacing(folder / PROBE) as file:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
    return record


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The record of a run that is done. ValueError if the folder has none, or the run has not ended or diverged."""
    if not (folder / RECORD).is_file():
        raise ValueError(f"{folder} is not a run's folder (no {RECORD}); give one, or a folder of them")
    lines = read_record(folder)
    if not lines or lines[0]["type"] != "run":
        raise ValueError(f"{folder / RECORD} does not begin with the line of a run; nothing can be probed")
    check_done(folder, lines)
    return lines


def _known(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The record that an earlier probe with the same request kept; None if there is none, or it is damaged."""
    try:
        record = read_json(path)
    except (ValueError, OSError):
        return None
    return record if isinstance(record, dict) and record.get("request") == request else None


def _probe_task(
    folder: Path,
    settings: dict[str, Any],
    split: str | None,
    most: int,
    device: torch.device,
    on_progress: OnProgress,
) -> dict[str, Any]:
    config = SyntheticRunConfig.model_validate(settings)
    splits = {name: getattr(config.task, name) for name in get_args(Split) if getattr(config.task, name)}
    chosen = split or ("held_out" if config.task.held_out else "test")
    if chosen not in splits:
        raise ValueError(f"{folder} has no split {chosen!r}; its splits are {', '.join(splits)}")
    segments = splits[chosen]
    if len(segments) > 1:
        sizes = ", ".join(str(segment.seq_len) for segment in segments)
        raise ValueError(
            f"the split {chosen} of {folder} has {len(segments)} segments (T = {sizes}), whose matrices differ in "
            "size; probe a run that is measured on one"
        )
    model = load_model(folder, device)
    data = getattr(config.task.build(config.train.seed, device), chosen)[0]
    data = Examples(data.inputs[:most], data.labels[:most])
    return {"split": chosen, **probe_task(model, config.task.task(segments[0]), data, on_progress=on_progress)}


def _probe_text(
    folder: Path,
    data: Path | None,
    split: str | None,
    most: int,
    seq_len: int | None,
    device: torch.device,
    on_progress: OnProgress,
) -> dict[str, Any]:
    trained = open_trained(folder, data, device)
    chosen = split or ("test" if "test" in trained.corpus.splits else "valid")
    length = trained.seq_len if seq_len is None else seq_len
    positions = trained.model.config.max_len
    if not 1 <= length <= positions:
        raise ValueError(f"--seq-len {length}: the model has {positions} positions; give 1 to {positions}")
    text = trained.corpus.windows(chosen, length, isolate_documents=trained.isolate_documents)
    rows = spread_rows(len(text), most)
    return {"split": chosen, **probe_text(trained.model, text, rows, on_progress=on_progress)}
