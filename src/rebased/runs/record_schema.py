"""What the lines of a record must hold for tables and figures. Records may come from other code, or be damaged.

Only what a report reads is described here. Other settings may be anything: users have mixers and tasks of their own.
"""

from math import isfinite
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rebased.config import short
from rebased.runs.configs import run_kind

MAX_LINES = 10**6  # of one record: a line per ten steps of ten million
MAX_TEXT = 1000  # characters of a name or another setting
MAX_SIZE = 2**24  # of a width, a length, a vocabulary
MAX_LAYERS = 1024
MAX_COUNT = 2**53  # of examples, tokens, parameters, steps: whole numbers that a float holds

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=MAX_TEXT)]
Number = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,14})$")]  # as a key
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=MAX_COUNT)]
Scalar = str | int | float | bool | None


class Part(BaseModel):
    """A mapping in a record. Types are strict, and numbers are finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Code(Part):
    version: Text
    commit: Text | None
    dirty: bool | None


class _Machine(Part):
    cpu: Text
    cores: Count | None
    threads: Count | None
    gpu: Text | None
    system: Text
    python: Text
    torch: Text


class _Where(Part):
    """A line of type "run" or "resume"."""

    code: _Code
    machine: _Machine


class _Mixer(Part):
    name: Name
    n_heads: Size | None = None
    qk_transform: Text | None = None


class _Model(Part):
    mixers: Annotated[list[_Mixer], Field(min_length=1, max_length=MAX_LAYERS)]
    d_model: Size
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    vocab_size: Size
    max_len: Size


class _Segment(Part):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Word, Scalar]

    seq_len: Size
    examples: Count


Segments = Annotated[list[_Segment], Field(min_length=1)]


class _Task(Part):
    name: Name
    train: Segments
    test: Segments
    held_out: list[_Segment] | None = None


class _Training(Part):
    seed: int


class _SyntheticTraining(_Training):
    protocol: Literal["paper", "held_out"]
    lr: Annotated[float, Field(gt=0)]


class _SyntheticConfig(Part):
    task: _Task
    model: _Model
    train: _SyntheticTraining


class _Run(Part):
    digest: Name
    parameters: Count


class _SyntheticRun(_Run):
    state_bytes: dict[Number, Annotated[int, Field(ge=1, le=MAX_COUNT)]] = {}
    config: _SyntheticConfig


class _Corpus(Part):
    sha256: Name


class _Data(Part):
    folder: Text
    seq_len: Size
    isolate_documents: bool


class _LMConfig(Part):
    data: _Data
    model: _Model
    train: _Training


class _LMRun(_Run):
    corpus: _Corpus
    config: _LMConfig


_RUNS: dict[str, type[Part]] = {"task": _SyntheticRun, "data": _LMRun}  # by the section of the config


class _Split(Part):
    accuracy: Share
    by_length: dict[Number, Share]
    by_pairs: dict[Number, Share] = {}
    slices: dict[Name, Share] = {}


class _Norm(Part):
    mean: float | None  # None: not finite
    sd: float | None


class _Epoch(Part):
    epoch: Annotated[int, Field(ge=0, le=MAX_LINES)]
    seconds: Seconds
    test_seconds: Seconds
    test: _Split
    held_out: _Split | None = None
    norms: dict[Number, dict[Text, _Norm]] | None = None


class _AtDistance(Part):
    """AR tokens whose bigram was last seen 2^i to 2^(i+1) - 1 tokens ago."""

    nearest: Size
    farthest: Size
    tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    perplexity: Annotated[float, Field(gt=0, le=MAX_COUNT)]


class _ByDistance(Part):
    classes: list[_AtDistance]


def check(schema: type[BaseModel], value: object) -> None:
    """Raise ValueError, which names the first wrong field, if a value does not fit a schema."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f", not {short(first['input'])}"
        raise ValueError(f"{where}: {first['msg']}{given}") from error


def fits(schema: type[BaseModel], value: object) -> bool:
    """True if a value fits a schema."""
    try:
        check(schema, value)
    except ValueError:
        return False
    return True


def is_whole(line: dict[str, Any]) -> bool:
    """True if the line has the fields of its type that every kind of run has."""
    return line["type"] not in ("run", "resume") or fits(_Where, line)


def is_whole_epoch(line: dict[str, Any], run: dict[str, Any]) -> bool:
    """True if the line of an epoch has all its numbers and they are possible. `run` is the record's first line."""
    return fits(_Epoch, line) and (not run["config"].get("task", {}).get("held_out") or bool(line.get("held_out")))


def check_run(run: dict[str, Any]) -> None:
    """Raise ValueError if a record's first line lacks something that a report needs, or has an impossible setting."""
    check(_RUNS[run_kind(run.get("config")).section], run)
    left = [run["config"]]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            left += [*node, *node.values()]
        elif isinstance(node, list):
            left += node
        elif isinstance(node, str) and len(node) > MAX_TEXT:
            raise ValueError(f"a setting has {len(node):,} characters: {node[:40]!r}...")
        elif isinstance(node, float) and not isfinite(node):
            raise ValueError(f"a setting is {node}")


def is_by_distance(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """True if it is what a run records of AR tokens by distance, with all numbers that a report needs."""
    if not fits(_ByDistance, {"classes": value}):
        return False
    spans = [(at["nearest"], at["farthest"]) for at in value]  # type: ignore[attr-defined]
    powers = all(nearest.bit_count() == 1 and farthest == 2 * nearest - 1 for nearest, farthest in spans)
    return powers and spans == sorted(set(spans))
