"""A named size stands for a task section: one segment per split, and what a config adds to it."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from pydantic import TypeAdapter

from rebased.tasks import AnyTask, Compression, TaskData, register_task, task_class, task_data, task_names

OURS = [name for name in task_names() if task_class(name).__module__.startswith("rebased.")]


def parse(section: object) -> TaskData:
    return TypeAdapter(AnyTask).validate_python(section)


@pytest.mark.parametrize("size", ["quick", "paper"])
@pytest.mark.parametrize("name", OURS)
def test_every_task_has_both_sizes(name: str, size: str) -> None:
    data, settings = parse({"name": name, "size": size}), task_class(name).sizes[size]
    assert len(data.train) == len(data.test) == 1
    assert data.train[0].examples == settings["train"]
    assert data.test == data.held_out
    assert data.test[0].settings() == data.train[0].settings()
    task = data.task(data.test[0])
    fields = {key: value for key, value in settings.items() if key not in ("train", "test")}
    assert {key: getattr(task, key) for key in fields} == fields
    assert task.build(2, 0, "cpu", "held_out").inputs.shape == (2, data.test[0].seq_len)
    assert parse(data.model_dump()) == data  # a record holds what the size stands for


@pytest.mark.parametrize("name", OURS)
def test_a_quick_size_has_enough_different_examples(name: str) -> None:
    data = parse({"name": name, "size": "quick"})
    splits = data.build(0)
    assert [len(split[0].inputs) for split in splits] == [data.train[0].examples] + 2 * [data.test[0].examples]


def test_a_config_may_change_what_a_size_says() -> None:
    data = parse({"name": "noisy_recall", "size": "quick", "noise": 0.4, "held_out": []})
    plain = parse({"name": "noisy_recall", "size": "quick"})
    assert data == task_data("noisy_recall").model_validate(plain.model_dump() | {"noise": 0.4, "held_out": []})
    assert data.digest() != plain.digest()
    fewer = parse({"name": "noisy_recall", "size": "quick", "train": {"0": {"examples": 7}}})  # --task.train.0.examples
    assert fewer.train[0].model_dump() == plain.train[0].model_dump() | {"examples": 7}


def test_a_field_of_a_users_own_may_be_called_size() -> None:
    class Own(Compression):
        sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
        size: int = 3

    register_task("own_size")(Own)
    assert parse({"name": "own_size", "size": 5}).size == 5  # type: ignore[attr-defined]
    Own.sizes = {"quick": {"train": 8, "test": 8}}
    with pytest.raises(ValueError, match="has a field 'size', a word of the task section"):
        register_task("own_size")(Own)


def test_an_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match="task 'noisy_recall' has no size 'quik'; did you mean 'quick'"):
        parse({"name": "noisy_recall", "size": "quik"})
    with pytest.raises(ValueError, match=r"has no size \[1\]"):
        parse({"name": "noisy_recall", "size": [1]})
