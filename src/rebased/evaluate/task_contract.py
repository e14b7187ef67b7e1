"""The contract of every task: named checks over a registered task, for users' own tasks and for the test suite."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import torch
from pydantic import ValidationError

from rebased.config import explain
from rebased.evaluate.checks import CheckResult, NotApplicable, require, run_check
from rebased.tasks import IGNORE, Examples, Split, Task, TaskData, task_class, task_data, task_name

ROWS = 64
SPLITS: tuple[Split, ...] = get_args(Split)


Check = Callable[[Task], None]
CHECKS: dict[str, Check] = {}
"""By name; each raises AssertionError or ValueError if a task breaks the contract, and NotApplicable to be skipped."""


def check(name: str) -> Callable[[Check], Check]:
    """A decorator that adds a function to CHECKS under this name."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def run_task_contract(name: str, settings: Mapping[str, Any] | None = None) -> list[CheckResult]:
    """Every check over the task registered under `name`, with these fields and the defaults of the others. Choose small
    ones: a check builds some thousand rows."""
    try:
        task = task_class(name).model_validate(dict(settings or {}))
    except ValidationError as error:
        message = f"give settings that the task takes: {explain(error)}".replace("\n", "; ")
        return [CheckResult("settings are valid", "failed", message)]
    return [run_check(each, partial(function, task)) for each, function in CHECKS.items()]


@check("shapes, dtypes, device and vocabulary")
def _rows(task: Task) -> None:
    for split in SPLITS:
        task.check_rows(task.build(ROWS, 0, "cpu", split), ROWS, torch.device("cpu"))


@check("every row asks something")
def _asks(task: Task) -> None:
    for split in SPLITS:
        asked = (task.build(ROWS, 0, "cpu", split).labels != IGNORE).any(1)
        silent = (~asked).nonzero().flatten().tolist()
        found = f"{len(silent)} of {ROWS} rows of the {split} split have no label, the first of them row {silent[:1]}"
        require(not silent, f"{found}; label at least one position in every row")


@check("the same seed gives the same rows")
def _law(task: Task) -> None:
    require(
        _equal(task.build(ROWS, 7), task.build(ROWS, 7)),  # global generators go on between the two
        "two builds with seed 7 differ: draw all random numbers from the generator that draw is given, none from "
        "torch's, numpy's or Python's global ones",
    )


@check("another seed gives other rows")
def _other_seed(task: Task) -> None:
    one, other = (task.build(ROWS, seed) for seed in (7, 8))
    require(not torch.equal(one.inputs, other.inputs), "seeds 7 and 8 give the same rows: use the generator")


@check("fewer rows are a prefix of more")
def _prefix(task: Task) -> None:
    many = task.build(1100, 7)
    for n in (1, 1024, 1025):  # below, at and above the size of a block
        few = task.build(n, 7)
        require(
            _equal(few, many.map(lambda part, n=n: part[:n])),  # type: ignore[misc]
            f"the {n} rows of one build are not the first {n} of 1,100: rows must not depend on how many there are",
        )


@check("no example in two splits")
def _disjoint(task: Task) -> None:
    count = task.count()
    examples = ROWS if count is None else max(1, min(ROWS, count // 8))
    rows = [{tuple(row) for each in split for row in each.inputs.tolist()} for split in _data(task, examples).build(0)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        shared = len(rows[i] & rows[j])
        require(not shared, f"{SPLITS[i]} and {SPLITS[j]} share {shared} examples")


@check("slices cover labelled positions")
def _slices(task: Task) -> None:
    for split in ("test", "held_out"):
        examples = task.build(ROWS, 0, "cpu", split)
        if not examples.slices:
            raise NotApplicable(f"task {task_name(type(task))!r} has no slices")
        asked = examples.labels != IGNORE
        for name, mask in examples.slices.items():
            covered = asked & (mask if mask.ndim == 2 else mask.unsqueeze(1))
            require(
                bool(covered.any()),
                f"slice {name!r} covers no labelled position in {ROWS} rows of the {split} split: its accuracy would "
                "never be reported",
            )


@check("answers stand where the task says")
def _answers(task: Task) -> None:
    examples = task.build(ROWS, 0, "cpu", "test")
    positions = task.answer_positions(examples)
    if positions is None:
        raise NotApplicable(f"task {task_name(type(task))!r} has no answer_positions")
    require(positions.shape == examples.labels.shape, "answer_positions must return [N, T], one position per label")
    asked = examples.labels != IGNORE
    require(bool((positions[~asked] == -1).all()), "answer_positions must be -1 where nothing is asked")
    at = torch.arange(task.seq_len).expand_as(positions)[asked]
    found = positions[asked]
    require(bool(((found >= 0) & (found <= at)).all()), "answer_positions names a position after the question")
    require(bool((found < task.context_length).all()), "an answer stands outside of context_length")
    shown = examples.inputs.gather(1, positions.clamp(min=0))[asked]
    require(bool((shown == examples.labels[asked]).all()), "the token at an answer's position is not the label")


@check("a config survives being written")
def _config(task: Task) -> None:
    data = _data(task, 1)
    again = task_data(task_name(type(task))).model_validate(data.model_dump(mode="json"))
    require(again == data, f"written and read again, {data} became {again}")
    require(again.digest() == data.digest(), "written and read again, the config has another digest")


@check("words are of segment fields")
def _words(task: Task) -> None:
    if not task.segment_words:
        raise NotApplicable(f"task {task_name(type(task))!r} has no segment_words")
    for key, words in task.segment_words.items():
        require(key in task.segment_fields, f"segment_words has {key!r}, which is not in segment_fields")
        require("{}" in words, f"segment_words writes {key!r} as {words!r}; it needs {{}}, where the value goes")


def _data(task: Task, examples: int) -> TaskData:
    """A task section with that many examples in each split."""
    fields = task.model_dump()
    segment = {key: fields.pop(key) for key in task.segment_fields} | {"examples": examples}
    splits = {split: [segment] for split in SPLITS}
    name = task_name(type(task))
    return task_data(name).model_validate({"name": name, **fields, **splits})


def _equal(one: Examples, other: Examples) -> bool:
    first, second = one.tensors(), other.tensors()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
