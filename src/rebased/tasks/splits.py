"""The data of one run: a task's segments to train on and to test on, no example in more than one split."""

from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, create_model, model_validator
from torch import Generator, Tensor

from rebased.config import Config, check_added_later, did_you_mean, explain, merge, nearest_word, short
from rebased.ops.backend import check_memory
from rebased.tasks.contract import BLOCK_ROWS, Examples, Split, Task, task_class
from rebased.tasks.draws import mix_seed

DEFAULT_TASK = "mqar"  # of a config that names none, as those written before there were others
TRAIN_EXAMPLES, TEST_EXAMPLES = 100_000, 3_000  # the paper's
_ROUNDS = 16  # of redrawing; a task that still lacks examples then has too few
_ROUND_SIZE = 1024  # at least this many candidates a round, so that small splits of small tasks find theirs


class Segment(Config):
    """A number of examples of one length and one load. Each task has a subclass with its own segment fields."""

    if TYPE_CHECKING:  # every subclass has both, the task's other fields between them
        seq_len: int
        examples: int

    def settings(self) -> dict[str, Any]:
        """The task's fields that this segment sets: all but `examples`."""
        return {key: value for key, value in self if key != "examples"}


class Splits(NamedTuple):
    """One Examples per segment, in the order of the config."""

    train: tuple[Examples, ...]
    test: tuple[Examples, ...]
    held_out: tuple[Examples, ...]  # empty unless the config asks for it


class TaskData(Config):
    """The task section of a run. Each task has a subclass, made by `task_data`, with its shared fields and segments.

    The paper selects on `test`; nothing is selected on `held_out`.
    """

    task_type: ClassVar[type[Task]]
    segment_type: ClassVar[type[Segment]]

    name: str = DEFAULT_TASK
    vocab_size: int = Field(description="number of tokens N")
    train: tuple[Segment, ...] = Field(description="what is trained on: a list of segments, each with its own settings")
    test: tuple[Segment, ...] = Field(description="what is tested on after every epoch: a list of segments")
    held_out: tuple[Segment, ...] = Field((), description="what nothing is chosen on: a list of segments")
    train_seed: int = Field(default=42, ge=0, description="of the examples to train on")
    test_seed: int = Field(default=52, ge=0, description="of the examples to test on")
    held_out_seed: int = Field(default=62, ge=0, description="of the held-out examples")
    seeds: Literal["shared", "per_run"] = Field(
        "shared", description="shared: every run sees the same examples, as in the paper; per_run: train.seed decides"
    )

    @model_validator(mode="before")
    @classmethod
    def _segments_set_their_own_fields(cls, values: Any) -> Any:
        own = list(cls.segment_type.model_fields)
        for key, value in values.items() if isinstance(values, dict) else ():
            if key in cls.model_fields:
                continue
            near = key if key in own else nearest_word(str(key), [*cls.model_fields, *own])
            if near in own:
                lists = {split: values[split] for split in get_args(Split) if isinstance(values.get(split), list)}
                each = [f" --task.{split}.{i}.{near} {value}" for split in lists for i in range(len(lists[split]))]
                raise ValueError(
                    f"{'' if key == near else f'unknown key {key!r}; '}{near} is set for each segment: write it into "
                    f"train and test, [{{{', '.join(f'{name}: ...' for name in own)}}}]"
                    f"{', or for all segments give' if each else ''}{''.join(each)}"
                )
        return values

    @model_validator(mode="after")
    def _check(self) -> "TaskData":
        for split in ("train", "test"):
            if not getattr(self, split):
                fields = list(self.segment_type.model_fields)
                raise ValueError(
                    f"{split} is empty: give at least one segment of {', '.join(fields[:-1])} and {fields[-1]}"
                )
        for split in get_args(Split):
            for i, segment in enumerate(getattr(self, split)):
                try:
                    self.task(segment)
                except ValidationError as error:
                    raise ValueError(f"{split}[{i}]: {explain(error)}") from None
        return self

    def task(self, segment: Segment) -> Task:
        """The task with this segment's settings and the shared ones."""
        shared = [key for key in self.task_type.model_fields if key not in self.task_type.segment_fields]
        return self.task_type(**{key: getattr(self, key) for key in shared}, **segment.settings())

    def data_bytes(self) -> int:
        """The bytes of inputs and labels of all splits, and of the block of rows that is drawn at a time."""
        segments = (*self.train, *self.test, *self.held_out)
        scratch = BLOCK_ROWS * max(segment.seq_len for segment in segments)
        return 16 * (scratch + sum(segment.examples * segment.seq_len for segment in segments))

    def check_fits(self) -> None:
        """Raise ValueError if the main memory cannot hold the data."""
        check_memory(self.data_bytes(), f"the examples of task {self.name!r} need")

    def build(self, run_seed: int, device: torch.device | str = "cpu") -> Splits:
        """The data of a run. `run_seed` matters only where seeds is "per_run".

        Raises ValueError if the memory of a CPU cannot hold them.
        """
        if torch.device(device).type == "cpu":
            self.check_fits()
        run = (run_seed,) if self.seeds == "per_run" else ()
        seen: dict[int, Tensor] = {}  # seq_len -> hashes of the rows of the splits made so far
        splits: list[tuple[Examples, ...]] = []
        for split in get_args(Split):
            segments: tuple[Segment, ...] = getattr(self, split)
            seed: int = getattr(self, f"{split}_seed")
            made = []
            for i, segment in enumerate(segments):
                streams = [mix_seed(seed, attempt, i, *run) for attempt in range(_ROUNDS)]
                made.append(_build_unseen(self.task(segment), segment.examples, streams, seen, device, split))
            for segment, examples in zip(segments, made, strict=True):
                # Only now: a split may repeat its own examples, as independent draws do.
                hashes = _hash_rows(examples.inputs)
                seen[segment.seq_len] = torch.cat([seen.get(segment.seq_len, hashes[:0]), hashes])
            splits.append(tuple(made))
        return Splits(*splits)


def task_data(name: str) -> type[TaskData]:
    """The class of the task section for a registered task: its shared fields, and segments of its segment fields."""
    return _task_data(name, task_class(name))


@cache  # one class per task: configs of two classes are never equal
def _task_data(name: str, cls: type[Task]) -> type[TaskData]:
    fields: dict[str, Any] = {key: (field.annotation, copy(field)) for key, field in cls.model_fields.items()}
    own = {key: fields.pop(key) for key in cls.segment_fields}
    segment = create_model(f"{name}Segment", __base__=Segment, **own, examples=(int, Field(ge=1)))
    segment.added_later = tuple(key for key in cls.added_later if key in own)
    check_added_later(segment)
    complete = not any(segment.model_fields[key].is_required() for key in own)
    for split, examples in {"train": TRAIN_EXAMPLES, "test": TEST_EXAMPLES}.items():
        default: Any = (segment.model_validate({"examples": examples}),) if complete else ...
        fields[split] = (tuple[segment, ...], default)
    fields["held_out"] = (tuple[segment, ...], ())
    fields["name"] = (Literal[name], name)
    data = create_model(f"{name}Data", __base__=TaskData, **fields)
    data.task_type, data.segment_type = cls, segment
    # Runs were recorded before tasks had names: MQAR's is left out of the digest. Other tasks' names are always in it.
    named = ("name",) if name == DEFAULT_TASK else ()
    data.added_later = (*named, *(key for key in cls.added_later if key not in own))
    check_added_later(data)
    return data


def _parse_task(value: Any) -> Any:
    """'copying' and {name: copying, ...} both say which task, the latter with settings."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, TaskData):
        value = value.model_dump()
    if not isinstance(value, dict) or not isinstance(value.get("name", DEFAULT_TASK), str):
        raise ValueError(
            f"a task is a name, or a mapping of settings ({{name: mqar, vocab_size: 64}}); got {short(value)}"
        )
    name = value.get("name", DEFAULT_TASK)
    if "size" in value and "size" not in task_class(name).model_fields:
        changes = {key: entry for key, entry in value.items() if key != "size"}
        value = merge(sized(name, value["size"]), changes, "task")
    return task_data(name).model_validate(value)


def sized(name: str, size: str) -> dict[str, Any]:
    """The task section that a named size of a task stands for: one segment per split, the held-out split like test."""
    cls = task_class(name)
    if str(size) not in cls.sizes:
        raise ValueError(f"task {name!r} has no size {short(size)}; {did_you_mean(str(size), list(cls.sizes))}")
    shared = dict(cls.sizes[size])
    counts = {"train": shared.pop("train"), "test": shared["test"], "held_out": shared.pop("test")}
    segment = {key: shared.pop(key) for key in cls.segment_fields if key in shared}
    return shared | {"name": name} | {split: [segment | {"examples": n}] for split, n in counts.items()}


AnyTask = Annotated[SerializeAsAny[TaskData], BeforeValidator(_parse_task)]
"""A run's task section, of the class that belongs to its name."""


def _build_unseen(
    task: Task, n: int, seeds: list[int], seen: dict[int, Tensor], device: torch.device | str, split: Split
) -> Examples:
    """Draw rows, drop those that another split has, and draw again until none is missing."""
    if task.seq_len not in seen:
        return task.build(n, seeds[0], device, split)
    parts: list[Examples] = []
    missing = n
    for seed in seeds:
        drawn = task.build(max(n, _ROUND_SIZE), seed, device, split)
        new = torch.isin(_hash_rows(drawn.inputs), seen[task.seq_len], invert=True).nonzero().squeeze(1)[:missing]
        parts.append(drawn.map(partial(torch.index_select, dim=0, index=new)))
        missing -= len(new)
        if not missing:
            inputs, labels, _ = zip(*parts, strict=True)
            slices = {name: torch.cat([part.slices[name] for part in parts]) for name in parts[0].slices}
            return Examples(torch.cat(inputs), torch.cat(labels), slices)
    settings = ", ".join(f"{key}={getattr(task, key)}" for key in task.segment_fields)
    count = task.count()
    raise ValueError(
        f"{split}: {missing} of {n} examples ({settings}) would repeat those of another split: the task has "
        f"{'too few' if count is None else f'only {count:,}'} different ones; raise vocab_size, "
        f"{' or '.join(task.segment_fields)}, or ask for fewer examples"
    )


def _hash_rows(inputs: Tensor) -> Tensor:
    """[N] int64: equal rows have equal hashes. Unequal rows practically never do, and then a row is redrawn in vain."""
    generator = Generator().manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (inputs.shape[1],), generator=generator).to(inputs.device)
    return torch.cat([(rows * weights).sum(1) for rows in inputs.split(BLOCK_ROWS)])  # int64 wraps around
