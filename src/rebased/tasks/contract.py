"""What a synthetic task is, and the register of those that exist.

A task is a class of settings with one method, `draw`, which makes rows of tokens and their labels. Its fields are its
schema: what a config may say about the task is exactly its fields. `build` calls `draw` for blocks of a fixed number of
rows with one generator, so for every task the same seed gives the same rows, and fewer rows are a prefix of more.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from rebased.config import Config, did_you_mean
from rebased.ops import IGNORE
from rebased.tasks.draws import mix_seed

BLOCK_ROWS = 1024  # rows are drawn so many at a time: it bounds the scratch memory

Split = Literal["train", "test", "held_out"]


_NO_SLICES: Mapping[str, Tensor] = {}


class Examples(NamedTuple):
    """Rows of a task. A slice names positions [N,T] or rows [N] (bool) whose accuracy is reported by itself."""

    inputs: Tensor  # [N,T] int64
    labels: Tensor  # [N,T] int64: the right answer at that same position, IGNORE where nothing is asked
    slices: Mapping[str, Tensor] = _NO_SLICES

    def map(self, function: Callable[[Tensor], Tensor]) -> "Examples":
        """The same function applied to every tensor, such as one that selects rows."""
        slices = {name: function(mask) for name, mask in self.slices.items()}
        return Examples(function(self.inputs), function(self.labels), slices)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by what they are called in messages."""
        slices = {f"slice {name!r}": self.slices[name] for name in sorted(self.slices)}
        return {"inputs": self.inputs, "labels": self.labels, **slices}


class Task(Config):
    """The base of every task. Derive a class, give it fields and `draw`, and register it with @register_task(name).

    The first paragraph of a task's docstring is what pages say about it.
    """

    segment_fields: ClassVar[tuple[str, ...]] = ("seq_len",)
    """The fields that each segment of a split sets for itself; the others are set once for all splits."""

    segment_words: ClassVar[Mapping[str, str]] = {"seq_len": "T = {}"}
    """How reports write a segment field: {} is its value, or "4–16" where segments differ."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named settings, {"quick": {"seq_len": 64, "train": 8000, "test": 1000}}: fields of the task, and the numbers of
    examples to train on and to test on. `task: {name: ..., size: quick}` of a config stands for them."""

    readout: ClassVar[Literal["each", "last"]] = "each"
    """What the model's logits are made of: the features of each position, or those of the last (LMConfig.readout)."""

    seq_len: int  # T, the length of every row
    vocab_size: int  # tokens are 0 .. vocab_size - 1

    def draw(self, rows: int, generator: Generator, split: Split) -> Examples:
        """That many rows, on the generator's device. All randomness comes from the generator. Inputs and labels may
        depend on the split."""
        raise NotImplementedError

    def count(self) -> int | None:
        """How many different rows of inputs there are; None where nobody has counted them."""
        return None

    def chance(self) -> float | None:
        """The accuracy of a guess; None where it is not known."""
        return None

    def answer_positions(self, examples: Examples) -> Tensor | None:
        """Where each row shows the answer of a question, for probes of attention: [N,T] int64, -1 where nothing is
        asked. None where the task does not say."""
        return None

    @property
    def context_length(self) -> int:
        """How many positions come before the first that can ask something; answers stand there."""
        return self.seq_len

    @classmethod
    def about(cls) -> str:
        """The first paragraph of the docstring, in one line."""
        return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())

    def build(self, n: int, seed: int, device: torch.device | str = "cpu", split: Split = "train") -> Examples:
        """n examples, the same for the same seed on the same kind of device; fewer rows are a prefix of more."""
        if n < 1:
            raise ValueError(f"n, the number of examples, must be at least 1, got {n}")
        generator = Generator(device).manual_seed(mix_seed(seed, 0))
        whole: Examples | None = None
        for start in range(0, n, BLOCK_ROWS):
            block = self._draw_block(generator, split)  # the last one is drawn whole too: hence the prefix
            whole = whole or block.map(lambda part: part.new_empty(n, *part.shape[1:]))
            for part, target in zip(block.tensors().values(), whole.tensors().values(), strict=True):
                rows = target[start : start + BLOCK_ROWS]
                rows.copy_(part[: len(rows)])
        assert whole is not None
        return whole

    def _draw_block(self, generator: Generator, split: Split) -> Examples:
        """What `draw` gives, checked; an error of the task's own is named as such."""
        try:
            block = self.draw(BLOCK_ROWS, generator, split)
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a user's code raises
            raise ValueError(
                f"task {task_name(type(self))!r}: draw failed: {type(error).__name__}: {error} "
                "(--debug shows where it comes from)"
            ) from error
        self.check_rows(block, BLOCK_ROWS, generator.device)
        return block

    def check_rows(self, block: Any, rows: int, device: torch.device) -> None:
        """Raise ValueError if so many rows are not what the contract asks for. Tokens outside of the vocabulary would
        fail much later, inside of a kernel."""
        name = task_name(type(self))
        if not isinstance(block, Examples):
            raise ValueError(f"task {name!r}: draw must return Examples(inputs, labels); got {type(block).__name__}")
        for what, part in block.tensors().items():
            dtype = torch.int64 if what in ("inputs", "labels") else torch.bool
            if not isinstance(part, Tensor):
                raise ValueError(f"task {name!r}: draw gave {type(part).__name__} for {what}; give a tensor")
            shapes = [(rows, self.seq_len)] + ([(rows,)] if dtype == torch.bool else [])
            if tuple(part.shape) not in shapes or part.dtype != dtype or part.device.type != device.type:
                wanted = " or ".join(str(list(shape)) for shape in shapes)
                raise ValueError(
                    f"task {name!r}: draw gave {what} of shape {list(part.shape)}, {part.dtype} on {part.device}; "
                    f"expected {wanted} ([rows, seq_len]), {dtype} on {device}"
                )
        labels = block.labels
        highest = labels.max()
        lowest = torch.where(labels == IGNORE, highest, labels).min()
        found = torch.stack([*block.inputs.aminmax(), lowest, highest]).tolist()  # waits for the device once
        for what, least, most in (("inputs", *found[:2]), ("labels", *found[2:])):
            if what == "labels" and most == IGNORE:
                raise ValueError(f"task {name!r}: no position of any row has a label; label those that are asked")
            if least < 0 or most >= self.vocab_size:
                raise ValueError(
                    f"task {name!r}: {what} lie between {least} and {most}, outside of the vocabulary, 0 to "
                    f"{self.vocab_size - 1}; raise vocab_size, or draw smaller numbers (labels may be IGNORE, {IGNORE})"
                )


RESERVED = ("name", "train", "test", "held_out", "seeds", "train_seed", "test_seed", "held_out_seed", "examples")
"""What the task section of a config says besides a task's own fields."""

_REGISTER: dict[str, type[Task]] = {}
Class = TypeVar("Class", bound=Task)


def register_task(name: str) -> Callable[[type[Class]], type[Class]]:
    """Class decorator: makes a task known to configs, commands and the contract suite under this name."""

    def register(cls: type[Class]) -> type[Class]:
        if not name.isprintable():
            raise ValueError(f"task {name!r} has a control character in its name; choose another name")
        if not (isinstance(cls, type) and issubclass(cls, Task)):
            raise ValueError(f"task {name!r} must be a class derived from rebased.tasks.Task; got {cls!r}")
        known = _REGISTER.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"task {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another name")
        if cls.draw is Task.draw and cls.build is Task.build:
            raise ValueError(f"task {name!r} has no draw(self, rows, generator, split); write one")
        reserved = (*RESERVED, "size") if cls.sizes else RESERVED
        if taken := [key for key in cls.model_fields if key in reserved]:
            raise ValueError(f"task {name!r} has a field {taken[0]!r}, a word of the task section; choose another name")
        if unknown := [key for key in cls.segment_fields if key not in cls.model_fields]:
            hint = did_you_mean(unknown[0], list(cls.model_fields))
            raise ValueError(f"task {name!r}: segment_fields names {unknown[0]!r}, which is no field; {hint}")
        if "seq_len" not in cls.segment_fields or "vocab_size" in cls.segment_fields:
            raise ValueError(
                f"task {name!r}: segment_fields must have 'seq_len', and cannot have 'vocab_size', which all splits "
                f"share; got {list(cls.segment_fields)}"
            )
        _REGISTER[name] = cls
        return cls

    return register


def task_names() -> list[str]:
    """The names of all registered tasks, sorted."""
    return sorted(_REGISTER)


def task_class(name: str) -> type[Task]:
    """The class that is registered under this name."""
    if name not in _REGISTER:
        raise ValueError(
            f"unknown task {name!r}; {did_you_mean(str(name), task_names())} "
            "(@register_task makes your own known, in a file given with --import)"
        )
    return _REGISTER[name]


def task_name(cls: type[Task]) -> str:
    """The name a task is registered under; the class's own where it is not."""
    return next((name for name, known in _REGISTER.items() if known is cls), cls.__name__)
