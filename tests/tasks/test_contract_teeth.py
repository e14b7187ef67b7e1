"""The contract suite finds tasks that break it, and the register refuses what is no task."""

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Generator

from forked_python import run_pytest
from rebased.evaluate.task_contract import CHECKS, run_task_contract
from rebased.tasks import IGNORE, MQAR, Examples, Split, Task, register_task, task_class, task_data
from registers import registers_kept
from task_option import find_task

ROOT = Path(__file__).parents[2]


class Last(Task):
    """Say the first token at the end."""

    seq_len: int = 6
    vocab_size: int = 11

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        inputs = torch.randint(self.vocab_size, (rows, self.seq_len), generator=generator, device=generator.device)
        labels = torch.full_like(inputs, IGNORE)
        labels[:, -1] = inputs[:, 0]
        return Examples(inputs, labels)


def failed(cls: type[Task], settings: dict[str, Any] | None = None) -> dict[str, str]:
    """What the suite finds wrong, by check."""
    register_task("own")(cls)
    return {result.name: result.message for result in run_task_contract("own", settings) if not result.ok}


def test_a_sound_task_passes_every_check() -> None:
    assert failed(Last) == {}
    assert [result.name for result in run_task_contract("own")] == list(CHECKS)


def test_a_task_whose_rows_come_from_elsewhere() -> None:
    class Torch(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            return super().draw(rows, Generator().manual_seed(int(torch.randint(99, ()))), split)

    class Python(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            return super().draw(rows, Generator().manual_seed(random.randrange(99)), split)

    class Fixed(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            return super().draw(rows, Generator().manual_seed(0), split)

    for cls in (Torch, Python):
        with registers_kept():
            found = failed(cls)
        assert "none from torch's, numpy's or Python's global ones" in found["the same seed gives the same rows"]
    found = failed(Fixed)
    assert "seeds 7 and 8 give the same rows" in found["another seed gives other rows"]
    assert found.keys() == {"another seed gives other rows"}


def test_a_task_of_too_few_examples() -> None:
    class Constant(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            inputs, labels, _ = super().draw(rows, generator, split)
            return Examples(inputs * 0, labels)

    message = failed(Constant)["no example in two splits"]
    assert "test: 64 of 64 examples (seq_len=6) would repeat those of another split" in message
    assert "the task has too few different ones; raise vocab_size, seq_len, or ask for fewer" in message


def test_a_task_whose_rows_depend_on_their_number() -> None:
    class Whole(Last):
        def build(self, n: int, seed: int, device: torch.device | str = "cpu", split: Split = "train") -> Examples:
            return self.draw(n, Generator(device).manual_seed(seed + n), split)

    assert "are not the first 1 of 1,100" in failed(Whole)["fewer rows are a prefix of more"]


def test_a_task_that_sometimes_asks_nothing() -> None:
    class Silent(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            inputs, labels, _ = super().draw(rows, generator, split)
            labels[3] = IGNORE
            return Examples(inputs, labels, {"never": torch.zeros(rows, dtype=torch.bool)})

    found = failed(Silent)
    assert found.keys() == {"every row asks something", "slices cover labelled positions"}
    assert found["every row asks something"].startswith(
        "1 of 64 rows of the train split have no label, the first of them row [3]"
    )
    assert "slice 'never' covers no labelled position" in found["slices cover labelled positions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, y: (i, y), "task 'own': draw must return Examples(inputs, labels); got tuple"),
        (lambda i, y: Examples(i.float(), y), "inputs of shape [1024, 6], torch.float32 on cpu; expected [1024, 6]"),
        (lambda i, y: Examples(i, y[:, 1:]), "draw gave labels of shape [1024, 5], torch.int64 on cpu"),
        (lambda i, y: Examples(i, y.tolist()), "draw gave list for labels; give a tensor"),
        (lambda i, y: Examples(i + 1, y), "inputs lie between 1 and 11, outside of the vocabulary, 0 to 10"),
        (lambda i, y: Examples(i, y - 1), "outside of the vocabulary, 0 to 10"),
        (lambda i, y: Examples(i, y * 0 + IGNORE), "no position of any row has a label"),
        (lambda i, y: Examples(i, y, {"some": i}), "slice 'some' of shape [1024, 6], torch.int64 on cpu; expected"),
    ],
)
def test_what_draw_returns_is_named(change: Any, message: str) -> None:
    class Wrong(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            inputs, labels, _ = super().draw(rows, generator, split)
            return change(inputs, labels)

    found = failed(Wrong)
    assert message in found["shapes, dtypes, device and vocabulary"]
    assert message in found["the same seed gives the same rows"]


def test_a_build_of_the_tasks_own_is_looked_at_too() -> None:
    class Own(Last):
        def build(self, n: int, seed: int, device: torch.device | str = "cpu", split: Split = "train") -> Examples:
            return super().build(n, seed, device, split).map(lambda part: part + 1)

    assert "outside of the vocabulary, 0 to 10" in failed(Own)["shapes, dtypes, device and vocabulary"]


def test_what_draw_raises_is_the_tasks_own() -> None:
    class Clumsy(Last):
        def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
            return super().draw(rows, generator, split) + 3  # type: ignore[operator]

    message = failed(Clumsy)["shapes, dtypes, device and vocabulary"]
    assert message.startswith("task 'own': draw failed: TypeError: can only concatenate tuple")
    assert "--debug shows where" in message


def test_a_task_without_draw_is_told_to_have_one() -> None:
    class Empty(Task):
        seq_len: int = 4
        vocab_size: int = 4

    with pytest.raises(ValueError, match=r"task 'own' has no draw\(self, rows, generator, split\); write one"):
        register_task("own")(Empty)


def test_settings_that_the_task_does_not_take() -> None:
    class Sized(Last):
        size: int

    assert failed(Sized) == {
        "settings are valid": "give settings that the task takes: size: is missing; give it a value"
    }
    assert failed(Sized, {"size": 3}) == {}


def test_words_of_unknown_fields() -> None:
    class Wordy(Last):
        segment_words: ClassVar = {"seq_len": "T", "length": "{}"}

    assert "needs {}, where the value goes" in failed(Wordy)["words are of segment fields"]


def test_the_register_refuses_what_is_no_task() -> None:
    with pytest.raises(ValueError, match=r"task 'x' must be a class derived from rebased\.tasks\.Task"):
        register_task("x")(int)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"task 'mqar' is taken by rebased\.tasks\.mqar\.MQAR; choose another name"):
        register_task("mqar")(Last)
    with pytest.raises(ValueError, match=r"unknown task 'mqr'; did you mean 'mqar'.*--import"):
        task_class("mqr")

    class Reserved(Last):
        train: int = 3

    class Misspelt(Last):
        segment_fields: ClassVar = ("seq_len", "sze")
        size: int = 3

    class NoLength(Last):
        segment_fields: ClassVar = ("vocab_size",)

    with pytest.raises(ValueError, match="has a field 'train', a word of the task section; choose another name"):
        register_task("x")(Reserved)
    with pytest.raises(ValueError, match="segment_fields names 'sze', which is no field; did you mean 'size'"):
        register_task("x")(Misspelt)
    with pytest.raises(ValueError, match="must have 'seq_len', and cannot have 'vocab_size'"):
        register_task("x")(NoLength)


def test_a_section_is_made_of_the_tasks_fields() -> None:
    class Sized(Last):
        """One."""

        added_later: ClassVar = ("noise", "depth")
        segment_fields: ClassVar = ("seq_len", "size", "depth")
        size: int
        depth: int = 2
        noise: float = 0.0

    register_task("sized")(Sized)
    data = task_data("sized")
    assert list(data.segment_type.model_fields) == ["seq_len", "size", "depth", "examples"]
    section = data.model_validate({split: [{"size": 3, "examples": 2}] for split in ("train", "test")})
    assert section.task(section.test[0]) == Sized(size=3)
    assert "noise" in section.model_dump()
    with pytest.raises(ValueError, match="train"):  # a segment cannot be made of defaults
        data.model_validate({})
    with pytest.raises(ValueError, match=r"size is set for each segment: write it into train and test, \[\{seq_len"):
        data.model_validate({"size": 3})
    assert Sized.about() == "One."
    assert MQAR.about().endswith("what was read (multi-query associative recall, MQAR).")


OWN = """
import torch
from rebased.tasks import IGNORE, Examples, Task, register_task

@register_task("first_token")
class FirstToken(Task):
    seq_len: int = 6
    vocab_size: int = 11

    def draw(self, rows, generator, split):
        inputs = torch.randint(self.vocab_size, (rows, self.seq_len), generator=generator, device=generator.device)
        labels = torch.full_like(inputs, IGNORE)
        labels[:, -1] = inputs[:, 0]
        return Examples(inputs, labels)
"""


def test_own_task_from_a_file(tmp_path: Path) -> None:
    """One that draws from torch's own generator fails. test_add_a_task.py shows one that passes."""
    (tmp_path / "own.py").write_text(OWN.replace("generator=generator, ", ""))
    result = run_pytest("--task", f"{tmp_path / 'own.py'}:first_token", "tests/tasks")
    assert result.returncode == 1
    assert "global ones" in result.output
    assert "deselected" in result.output


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("nowhere.py:mine", "nowhere.py: there is no such file"), ("mqr", "unknown task 'mqr'; did you mean 'mqar'?")],
)
def test_errors_name_what_was_not_found(wanted: str, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        find_task(wanted)
