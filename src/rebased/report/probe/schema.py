"""What the record of a probe must hold for the page. Records may come from other code, or be damaged."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rebased.runs.record_schema import check_run

Numbers = list[float]
Row = Annotated[list[int], Field(min_length=1)]
Ends = tuple[float | None, float | None]


class _Part(BaseModel):
    """A mapping in a record. Numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class _Measure(_Part):
    mean: float
    best: float


class _Drawn(_Part):
    queries: Row
    targets: Row
    mean: Annotated[list[Row], Field(min_length=1)]
    best: Annotated[list[Row], Field(min_length=1)]


class _Scores(_Part):
    density: Annotated[Numbers, Field(min_length=1)]
    low: float
    high: float


class _Learned(_Part):
    scores: _Scores
    parabola: Annotated[Numbers, Field(min_length=3, max_length=3)]
    low: list[float | None]
    high: list[float | None]


class _Similarity(_Part):
    scores: _Scores
    similarity: Numbers
    mean: Annotated[float, Field(gt=0)]
    least: float
    lowest: float
    small: dict[str, float]
    learned: _Learned | None


class _TaskLayer(_Part):
    iou: _Measure
    mass: _Measure
    entropy: _Measure
    noisy: _Measure
    matrix_iou: float
    similarity: _Similarity | None
    drawn: list[_Drawn]


class _TaskProbe(_Part):
    kind: Literal["task"]
    model: str
    folder: str
    split: Literal["train", "test", "held_out"]
    accuracy: float
    examples: int
    context: Annotated[int, Field(ge=1, le=2**16)]
    layers: Annotated[list[_TaskLayer], Field(min_length=1)]


class _Distance(_Part):
    nearest: Annotated[int, Field(ge=1)]
    uniform: float


class _ByDistance(_Part):
    best: float


class _TextLayer(_Part):
    layer: int
    heads: int
    mean: float
    best_head: int
    best: float
    best_interval: Ends
    by_distance: list[_ByDistance]


class _Best(_Part):
    layer: int


class _TextProbe(_Part):
    kind: Literal["text"]
    model: str
    folder: str
    uniform: float
    best: _Best
    distances: Annotated[list[_Distance], Field(min_length=1)]
    layers: Annotated[list[_TextLayer], Field(min_length=1)]


_TASK, _TEXT = TypeAdapter(_TaskProbe), TypeAdapter(_TextProbe)


def check_probe(record: dict[str, Any]) -> None:
    """Raise ValueError, which names what is wrong, if a record lacks something that the page needs."""
    try:
        if record.get("kind") == "text":
            probe = _TEXT.validate_python(record)
            if probe.best.layer not in {layer.layer for layer in probe.layers}:
                raise ValueError(f"best.layer: there is no layer {probe.best.layer}")
            check_run({**record, "corpus": {"sha256": "none"}})
        else:
            _TASK.validate_python(record)
            check_run(record)
            if not record["config"]["task"].get(record["split"]):
                raise ValueError(f"config.task: there is no split {record['split']!r}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
