"""A suite: mixers compared on the same tasks with the same bytes of state, by one protocol.

The protocol has two stages. Every rate is tried with the first seeds, and the best one on the test split is chosen.
Then the other seeds are trained at the chosen rate and scored on the held-out split. The sizes of a mixer are solved
from the bytes that its state may have.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from rebased.config import Config, did_you_mean, load_config, merge
from rebased.mixers import CONTEXT, can_extend, mixer_class, mixer_names
from rebased.models import LMConfig, shape_of
from rebased.runs.finished import Run
from rebased.runs.synthetic_config import SuitePart, SyntheticRunConfig, longest

PLACE = "MIXER"
"""Stands in `model.mixers` of a suite file for the mixer that is compared."""
SIZES = ("key_width", "d_state", "window")
"""Arguments of a mixer that the size of its state can be solved by; the first that it has. Otherwise it is d_model."""
NUMBER = 4  # bytes of a number of the state, in fp32
WIDEST = 2**14  # of a width that is solved
WIDER = 8  # a model whose d_model is solved is at most so many times as wide as the others
_WIDTHS: dict[str, int | None] = {}
"""Solved widths, by what they depend on: each takes dozens of models without weights."""


class SuiteTask(Config):
    """A task of a suite."""

    task: dict[str, Any] = Field(description="the section task of its runs, with a test and a held_out split")
    train: dict[str, Any] = Field({}, description="changes to the section train of the suite")
    began: float = Field(gt=0, lt=1, description="a run whose test accuracy is above this has begun to learn")


class SuiteMixer(Config):
    """A mixer of a suite."""

    mixer: dict[str, Any] = Field(description="its name and arguments, without the one that is solved")
    solve: str | None = Field(None, description="the argument, or d_model, that is solved; none: the first of SIZES")
    factors: dict[str, bool] = Field({}, description="what distinguishes it from others: {square: true, gate: false}")
    unsized: bool = Field(False, description="its state cannot be given a size: it is shown with its own, not ranked")


class Suite(Config):
    """The content of a suite file. Everything but `mixers`, `drawn` and `about` is the protocol."""

    about: str = Field(description="what the suite is for, in a sentence")
    tasks: dict[str, SuiteTask] = Field(min_length=1, description="by the names that pages use, the cheapest first")
    model: dict[str, Any] = Field(description=f"the section model; {PLACE} among its mixers is the one compared")
    train: dict[str, Any] = Field(description="the section train, without rate, seed and protocol")
    state_bytes: tuple[int, ...] = Field(min_length=1, description="what the state of one layer may have, in fp32")
    rates: tuple[float, ...] = Field(min_length=1, description="learning rates")
    choose_seeds: tuple[int, ...] = Field(min_length=1, description="seeds with which every rate is tried")
    score_seeds: tuple[int, ...] = Field(min_length=2, description="seeds at the chosen rate, which are scored")
    mixers: dict[str, SuiteMixer] = Field(min_length=1, description="by the names that pages use")
    drawn: tuple[str, ...] = Field((), description="mixers that figures draw as lines; the others are dots")

    @model_validator(mode="after")
    def _check(self) -> "Suite":
        if both := set(self.choose_seeds) & set(self.score_seeds):
            raise ValueError(f"seed {min(both)} both chooses rates and is scored; give score_seeds other seeds")
        if PLACE not in self.model.get("mixers", ()):
            raise ValueError(f"model.mixers should have {PLACE} where the compared mixer stands")
        if unknown := [name for name in self.drawn if name not in self.mixers]:
            remedy = did_you_mean(unknown[0], [*self.mixers])
            raise ValueError(f"drawn: the suite has no mixer {unknown[0]!r}; {remedy}")
        return self

    @cached_property
    def protocol(self) -> str:
        """Twelve hex digits that name the protocol. Every run has them in its config."""
        tree = self.model_dump(mode="json", exclude={"mixers", "drawn", "about"})
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]

    def budgets(self, mixer: SuiteMixer) -> tuple[int | None, ...]:
        """The bytes that a mixer's state may have, one entry per size; (None,) if it has no fixed size."""
        return (None,) if mixer.unsized else self.state_bytes

    def configs(self, name: str, label: str, mixer: SuiteMixer, device: str | None = None) -> list[SyntheticRunConfig]:
        """The configs of all runs of a mixer: budgets, tasks, rates and seeds. `name` is the suite's, `label` the
        mixer's. Runs of rates that are not chosen are among them. Budgets that are too small for the mixer are not, nor
        those that give the same model as a smaller one."""
        found = []
        for task_name, task in self.tasks.items():
            models: list[dict[str, Any]] = []
            for budget in self.budgets(mixer):
                model = self.solved_model(mixer, budget, task)
                if model is None or model in models:  # none fits, or none is larger than that of the budget before
                    continue
                models.append(model)
                suite: dict[str, Any] = {"name": name, "protocol": self.protocol, "task": task_name, "mixer": label}
                suite |= {"state_bytes": budget, "choosing_seeds": self.choose_seeds}
                tree = {"task": task.task, "model": model, "suite": suite}
                train = merge(self.train, task.train) | {"protocol": "held_out"}
                train |= {"device": device} if device else {}
                found += [
                    SyntheticRunConfig.model_validate(tree | {"train": train | {"lr": rate, "seed": seed}})
                    for seed in (*self.choose_seeds, *self.score_seeds)
                    for rate in self.rates
                ]
        if not found:
            raise ValueError(f"{label}: its smallest state is larger than {max(self.state_bytes):,} bytes")
        return found

    def solved_model(self, mixer: SuiteMixer, budget: int | None, task: SuiteTask) -> dict[str, Any] | None:
        """The section model with a mixer whose state fits into a budget, as large as possible; None if none fits."""
        if budget is None:
            return self.place(mixer.mixer)
        name = mixer.solve or solved_by(mixer.mixer["name"])

        def model(width: int) -> dict[str, Any]:
            change = {name: width}
            return self.place(mixer.mixer) | change if name == "d_model" else self.place(mixer.mixer | change)

        def size(width: int) -> int | None:
            try:
                return self.layer_bytes(model(width), longest(data))
            except ValueError:  # a width that the mixer does not take, such as an odd one
                return None

        data = SyntheticRunConfig.model_validate({"task": task.task, "model": self.place(mixer.mixer)}).task
        known = json.dumps((self.model, mixer.mixer, name, budget, longest(data)))
        if known not in _WIDTHS:
            most = WIDER * self.model["d_model"] if name == "d_model" else WIDEST
            _WIDTHS[known] = widest(size, budget, most)
        width = _WIDTHS[known]
        return None if width is None else model(width)

    def place(self, mixer: Mapping[str, Any]) -> dict[str, Any]:
        """The section model with the compared mixer in its place."""
        return self.model | {"mixers": [dict(mixer) if each == PLACE else each for each in self.model["mixers"]]}

    def layer_bytes(self, model: Mapping[str, Any], seq_len: int) -> int:
        """Bytes of the state of the compared layer after `seq_len` tokens of one sequence, in fp32."""
        compared = model["mixers"][self.model["mixers"].index(PLACE)]
        alone = {**model, "mixers": [compared], "n_layers": 1, "max_len": self.max_len, "vocab_size": 2}
        key = json.dumps(alone, sort_keys=True)
        if key not in self._layers:
            self._layers[key] = shape_of(LMConfig.model_validate(alone)).blocks[0].mixer
        if not can_extend(self._layers[key]):
            raise ValueError("it has no state_size")
        return NUMBER * self._layers[key].state_size(seq_len)

    @cached_property
    def max_len(self) -> int:
        """The tokens of the longest sequences of all tasks."""
        tree = {"model": self.place({"name": "short_conv"})}
        return max(
            longest(SyntheticRunConfig.model_validate(tree | {"task": each.task}).task) for each in self.tasks.values()
        )

    @cached_property
    def _layers(self) -> dict[str, Any]:
        """Layers without weights whose state was asked for: one serves all tasks."""
        return {}

    def why_not(self, run: Run) -> str | None:
        """Why a run does not enter a ranking, in words after "N runs left out: "; None if it does."""
        part = part_of(run)
        if part is None:
            return "not of a suite"
        if part.protocol != self.protocol or part.task not in self.tasks:
            return "made by another protocol"
        expected, theirs = self._expected[part.task], run.settings["train"]
        same = all(theirs.get(key) == value for key, value in expected["train"].items())
        if run.settings["task"] != expected["task"] or not same or theirs["protocol"] != "held_out":
            return "with settings that are not those of the protocol they name"
        seeds = (*self.choose_seeds, *self.score_seeds)
        if run.lr not in self.rates or run.seed not in seeds or part.choosing_seeds != self.choose_seeds:
            return "with a rate or a seed that the protocol does not have"
        sizes = self.budgets(self.mixers[part.mixer]) if part.mixer in self.mixers else (None, *self.state_bytes)
        if part.state_bytes not in sizes:
            return "with a size of state that the protocol does not have"
        known = json.dumps((part.mixer, part.task, part.state_bytes, run.settings["model"]), sort_keys=True)
        if known not in self._judged:
            self._judged[known] = self._is_expected(part, run.settings["model"])
        return None if self._judged[known] else "with another model than the protocol gives to this mixer"

    @cached_property
    def _expected(self) -> dict[str, dict[str, Any]]:
        """The sections task and train that runs of each task must have, without what the protocol leaves free."""
        found = {}
        for name, task in self.tasks.items():
            tree = {"task": task.task, "model": self.place({"name": "short_conv"})}
            config = SyntheticRunConfig.model_validate(tree | {"train": merge(self.train, task.train)})
            free = {path.removeprefix("train.") for path in config.execution} | {"lr", "seed", "protocol"}
            ours = config.model_dump(mode="json")
            found[name] = {"task": ours["task"], "train": {k: v for k, v in ours["train"].items() if k not in free}}
        return found

    @cached_property
    def _judged(self) -> dict[str, bool]:
        """What is known of models: all runs of a cell have the same one."""
        return {}

    def _is_expected(self, part: SuitePart, model: dict[str, Any]) -> bool:
        """Whether a run has the model that the protocol gives to its mixer. If the suite has no such mixer, its
        arguments are free: then the bytes of its state are compared, if its class is known here."""
        task, mixer, alone = self.tasks[part.task].task, self.mixers.get(part.mixer), self.place({"name": "short_conv"})

        def whole(tree: Mapping[str, Any]) -> SyntheticRunConfig:
            return SyntheticRunConfig.model_validate({"task": task, "model": tree})

        try:
            if mixer:
                expected = self.solved_model(mixer, part.state_bytes, self.tasks[part.task])
                return expected is not None and whole(model).model == whole(expected).model
            at = self.model["mixers"].index(PLACE)
            name, around = model["mixers"][at]["name"], [*model["mixers"]]
            around[at] = {"name": "short_conv"}
            is_known = name in mixer_names()
            if part.state_bytes and (not is_known or solved_by(name) == "d_model"):
                alone["d_model"] = min(model["d_model"], WIDER * self.model["d_model"])
            found = whole({**model, "mixers": around})
            if found.model != whole(alone).model:
                return False
            if part.state_bytes is None or not is_known:
                return True
            return self.layer_bytes(model, longest(found.task)) <= part.state_bytes
        except (LookupError, ValueError):  # settings that no model has, or a mixer without a state
            return False


def part_of(run: Run) -> SuitePart | None:
    """What the record of a run says about its suite; None if it is of none."""
    try:
        return SuitePart.model_validate(run.settings.get("suite"))
    except ValidationError:
        return None


def load_suite(path: Path) -> Suite:
    """The suite in a YAML file."""
    return load_config(Suite, path)


def own_mixer(name: str, heads: int) -> SuiteMixer:
    """A user's registered mixer as one of a suite: with its defaults, and `heads` heads if it has heads. It is unsized
    if it cannot tell the size of its state."""
    cls = mixer_class(name)
    settings: dict[str, Any] = {"name": name}
    if "n_heads" in inspect.signature(cls).parameters:
        settings["n_heads"] = heads
    return SuiteMixer(mixer=settings, unsized=not hasattr(cls, "state_size"))


def solved_by(name: str) -> str:
    """The argument of a mixer that its size is solved by."""
    arguments = inspect.signature(mixer_class(name)).parameters
    return next((size for size in SIZES if size in arguments and size not in CONTEXT), "d_model")


def widest(size: Callable[[int], int | None], budget: int, most: int = WIDEST) -> int | None:
    """The largest width, at most `most`, whose size is at most `budget`; None if there is none. Sizes grow with the
    width. A width without a size is left out."""
    powers = (2**n for n in range(most.bit_length()))
    low, high = 0, next((width for width in powers if (size(width) or 0) > budget), most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if (size(middle) or 0) > budget else (middle, high)
    return next((width for width in range(low, 0, -1) if (found := size(width)) is not None and found <= budget), None)
