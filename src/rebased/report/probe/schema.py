"""What the record of a probe must hold for the page. Records may come from other code, or be damaged."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from rebased.runs.record_schema import check_run

Real = Annotated[float, Field(strict=True, ge=-9e18, le=9e18)]
"""A number that fits into 64 bits also where JSON has it as an integer: beyond, nothing can be drawn."""
Numbers = list[Real]
Row = Annotated[list[int], Field(min_length=1)]
Ends = tuple[Real | None, Real | None]


class _Part(BaseModel):
    """A mapping in a record. Numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class _Measure(_Part):
    mean: Real
    best: Real


class _Drawn(_Part):
    queries: Row
    targets: Row
    mean: Annotated[list[Row], Field(min_length=1)]
    best: Annotated[list[Row], Field(min_length=1)]


class _Scores(_Part):
    density: Annotated[Numbers, Field(min_length=1)]
    low: Real
    high: Real


class _Learned(_Part):
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


class _Similarity(_Part):
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


class _TaskLayer(_Part):
    iou: _Measure
    mass: _Measure
    entropy: _Measure
    noisy: _Measure
    matrix_iou: Real
    similarity: _Similarity | None
    drawn: list[_Drawn]


class _TaskProbe(_Part):
    kind: Literal["task"]
    model: str
    folder: str
    split: Literal["train", "test", "held_out"]
    accuracy: Real
    examples: int
    context: Annotated[int, Field(ge=1, le=2**16)]
    layers: Annotated[list[_TaskLayer], Field(min_length=1)]


class _Distance(_Part):
    nearest: Annotated[int, Field(ge=1)]
    uniform: Real


class _ByDistance(_Part):
    best: Real


class _TextLayer(_Part):
    layer: int
    heads: int
    mean: Real
    best_head: int
    best: Real
    best_interval: Ends
    by_distance: list[_ByDistance]


class _Best(_Part):
    layer: int


class _TextProbe(_Part):
    kind: Literal["text"]
    model: str
    folder: str
    uniform: Real
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
