"""Files of probes: what `rebased probe --json` and probed runs have written, read within bounds and checked.

Records may come from other code, or be damaged. Only what the page needs is described here.
"""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rebased.config import plain_tree
from rebased.files import JSON_BYTES, parse_json, refuse_pipe, unseal
from rebased.runs.record_schema import Part, check, check_run

PROBES = ("*.json", "*.json.gz", "*.json.xz")
OPENERS: dict[str, Callable[..., Any]] = {".json": open, ".gz": gzip.open, ".xz": lzma.open}
Probe = dict[str, Any]

Real = Annotated[float, Field(ge=-9e18, le=9e18)]
"""A number that fits into 64 bits also where JSON has it as an integer: beyond, nothing can be drawn."""
Numbers = list[Real]
Row = Annotated[list[int], Field(min_length=1)]
Ends = Annotated[list[Real | None], Field(min_length=2, max_length=2)]


class _Measure(Part):
    mean: Real
    best: Real


class _Drawn(Part):
    queries: Row
    targets: Row
    mean: Annotated[list[Row], Field(min_length=1)]
    best: Annotated[list[Row], Field(min_length=1)]


class _Scores(Part):
    density: Annotated[Numbers, Field(min_length=1)]
    low: Real
    high: Real


class _Learned(Part):
    scores: _Scores
    parabola: Annotated[Numbers, Field(min_length=3, max_length=3)]
    low: list[Real | None]
    high: list[Real | None]

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        ends, bins = list(zip(self.low, self.high, strict=False)), len(self.scores.density)
        if not len(self.low) == len(self.high) == bins or any((low is None) != (high is None) for low, high in ends):
            raise ValueError("low and high should be given for the same bins as the scores")
        if all(low is None for low in self.low):
            raise ValueError("low and high are given for no bin")
        return self


class _Similarity(Part):
    scores: _Scores
    similarity: Numbers
    mean: Annotated[Real, Field(gt=0)]
    least: Real
    lowest: Real
    small: dict[str, Real]
    learned: _Learned | None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if len(self.similarity) != len(self.scores.density):
            raise ValueError("there should be one similarity per bin of the scores")
        return self


class _TaskLayer(Part):
    iou: _Measure
    mass: _Measure
    entropy: _Measure
    noisy: _Measure
    matrix_iou: Real
    similarity: _Similarity | None
    drawn: list[_Drawn]


class _TaskProbe(Part):
    kind: Literal["task"]
    model: str
    folder: str
    split: Literal["train", "test", "held_out"]
    accuracy: Real
    examples: int
    context: Annotated[int, Field(ge=1, le=2**16)]
    layers: Annotated[list[_TaskLayer], Field(min_length=1)]


class _Distance(Part):
    nearest: Annotated[int, Field(ge=1)]
    uniform: Real


class _ByDistance(Part):
    best: Real


class _TextLayer(Part):
    layer: int
    heads: int
    mean: Real
    best_head: int
    best: Real
    best_interval: Ends
    by_distance: list[_ByDistance]


class _Best(Part):
    layer: int


class _TextProbe(Part):
    kind: Literal["text"]
    model: str
    folder: str
    uniform: Real
    best: _Best
    distances: Annotated[list[_Distance], Field(min_length=1)]
    layers: Annotated[list[_TextLayer], Field(min_length=1)]


def check_probe(record: dict[str, Any]) -> None:
    """Raise ValueError, which names what is wrong, if a record lacks something that the page needs."""
    if record.get("kind") == "text":
        check(_TextProbe, record)
        if record["best"]["layer"] not in [layer["layer"] for layer in record["layers"]]:
            raise ValueError(f"best.layer: there is no layer {record['best']['layer']}")
        check_run({**record, "corpus": {"sha256": "none"}})
    else:
        check(_TaskProbe, record)
        check_run(record)
        if not record["config"]["task"].get(record["split"]):
            raise ValueError(f"config.task: there is no split {record['split']!r}")


class OtherJson(ValueError):
    """A JSON file that is whole but holds no probe."""


def is_probe_file(path: Path) -> bool:
    """Whether the name is that of a file of probes: .json, .json.gz or .json.xz."""
    return path.suffix == ".json" or path.suffixes[-2:] in ([".json", ".gz"], [".json", ".xz"])


def read_probes(path: Path) -> list[Probe]:
    """The records of probes in a file that `rebased probe --json` or a probed run has written. ValueError if none."""
    refuse_pipe(path)
    try:
        with OPENERS[path.suffix](path, "rb") as file:
            content = file.read(JSON_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) > JSON_BYTES:
        raise ValueError(f"{path} holds more than {JSON_BYTES:,} bytes; files of probes are smaller")
    tree = parse_json(content, str(path))
    kind = tree.get("type") if isinstance(tree, dict) else None
    if kind == "probes" and "sha256" in tree:  # archives (.gz, .xz) have one of their own
        try:
            tree = unseal(tree)
        except ValueError as error:
            raise ValueError(f"{path} was changed after it was written: {error}") from error
    if kind not in ("probe", "probes"):
        raise OtherJson(f"{path} is not the record of a probe; give what `rebased probe --json` wrote")
    records = plain_tree(tree.get("records") if kind == "probes" else [tree])
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} has no list of probes; write it again with `rebased probe --json`")
    for n, record in enumerate(records, start=1):
        try:
            check_probe(record)
        except ValueError as error:
            raise ValueError(f"{path} is damaged, or of other code: probe {n}: {error}") from error
    return records
