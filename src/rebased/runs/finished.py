"""A run as its record describes it. Tables and figures are computed from this."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from pydantic import TypeAdapter

from rebased.config import added_defaults
from rebased.mixers import can_extend
from rebased.models import LMConfig, shape_of
from rebased.runs.configs import parse_run, run_kind
from rebased.runs.provenance import processor_name
from rebased.runs.run_config import RunConfig
from rebased.runs.run_names import kind_of
from rebased.runs.synthetic_config import Reported, SyntheticRunConfig, reported
from rebased.tasks import AnyTask


@dataclass(frozen=True)
class Run:
    """The record of a run and what can be read from it."""

    folder: str  # its name without its path, which would say something about the machine
    lines: list[dict[str, Any]]
    file: str = field(default="", compare=False)  # the name of the record or bundle that it was read from

    @cached_property
    def config(self) -> SyntheticRunConfig:
        """The config of a run on a synthetic task. Raises ValueError if this code does not know its settings."""
        return SyntheticRunConfig.model_validate(self.lines[0]["config"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config as the record has it, with the defaults of fields that were added to a section later. It may have
        been written by other code or name a user's own mixers."""
        config: dict[str, Any] = self.lines[0]["config"]
        added = {name: added_defaults(field.annotation) for name, field in self.kind.model_fields.items()}
        return {key: added.get(key, {}) | part if isinstance(part, dict) else part for key, part in config.items()}

    @property
    def kind(self) -> type[RunConfig]:
        """Its kind: a run on a synthetic task, or on text."""
        return run_kind(self.lines[0]["config"])

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        """The lines of its epochs."""
        return [line for line in self.lines if line["type"] == "epoch"]

    @property
    def digest(self) -> str:
        """The digest of its config."""
        return self.lines[0]["digest"]

    @property
    def task(self) -> str:
        """The name of its task."""
        return self.settings["task"]["name"]

    @cached_property
    def model(self) -> str:
        """The kind of its model, such as "ReBased"."""
        return kind_of(self.settings["model"])

    @property
    def d_model(self) -> int:
        """The width of its model."""
        return self.settings["model"]["d_model"]

    @property
    def lr(self) -> float:
        """Its learning rate."""
        return self.settings["train"]["lr"]

    @property
    def seed(self) -> int:
        """The seed of its training."""
        return self.settings["train"]["seed"]

    @property
    def parameters(self) -> int:
        """The number of its model's parameters."""
        return self.lines[0]["parameters"]

    @property
    def status(self) -> str:
        """done or diverged, as its last line says; unfinished if that line is not the end; damaged if it is done and no
        epoch could be read."""
        if self.lines[-1]["type"] != "end":
            return "unfinished"
        said: str = self.lines[-1]["status"]
        return "damaged" if said == "done" and self.kind.has_epochs and not self.epochs else said

    @property
    def gave_up(self) -> bool:
        """True if the rule `train.give_up` of its config ended it early."""
        return self.lines[-1].get("gave_up", False) is True

    @property
    def digest_of_settings(self) -> str | None:
        """The digest of the settings in the record, which should be its own; None if this code does not know them."""
        try:
            return parse_run(self.lines[0]["config"]).digest()
        except ValueError:
            return None

    @property
    def lacks_epochs(self) -> bool:
        """True if epochs are missing in the record: they are 1, 2, ... to its last step. Damaged lines are left out
        when a record is read, and the best epoch may be among them."""
        if not self.kind.has_epochs:
            return False
        if [line["epoch"] for line in self.epochs] != list(range(1, len(self.epochs) + 1)):
            return True
        if self.status != "done":
            return False
        return not self.epochs or self.lines[-1].get("step", last := self.epochs[-1].get("step")) != last

    @property
    def accuracies(self) -> list[float]:
        """The accuracy on the test split, one per epoch."""
        return [line["test"]["accuracy"] for line in self.epochs]

    @property
    def reported(self) -> Reported:
        """Its result by the protocol of its config."""
        return reported(self.epochs, self.settings["train"]["protocol"])

    @cached_property
    def best(self) -> Reported:
        """The best epoch on the test split, as in the paper; accuracy 0 if the run diverged in its first epoch."""
        return reported(self.epochs, "paper") if self.epochs else Reported(0.0, 0)

    @property
    def best_epoch(self) -> dict[str, Any] | None:
        """The line of the epoch `best`; None if the record has no epoch."""
        return next((line for line in self.epochs if line["epoch"] == self.best.epoch), None)

    @cached_property
    def held_out(self) -> float | None:
        """The accuracy of the epoch `best` on the held-out split; None if the task has no such split."""
        if not self.settings["task"].get("held_out"):
            return None
        return reported(self.epochs, "held_out").accuracy if self.epochs else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training and testing, over all epochs."""
        return sum(line["seconds"] + line["test_seconds"] for line in self.epochs)

    @property
    def seq_len(self) -> int:
        """The length of the longest sequence it was tested on."""
        return max(segment["seq_len"] for segment in self.settings["task"]["test"])

    @cached_property
    def chance(self) -> float | None:
        """The accuracy of guessing on the test split; None if it differs between segments or is not known here."""
        try:
            task = TypeAdapter(AnyTask).validate_python(self.settings["task"])
            levels = {task.task(segment).chance() for segment in task.test}
        except ValueError:  # a user's own task, or a setting that this code does not know
            return None
        return levels.pop() if len(levels) == 1 else None

    @property
    def code(self) -> str:
        """The version and commit of the code that last worked on it."""
        return code_name([line for line in self.lines if line["type"] in ("run", "resume")][-1]["code"])

    @property
    def device(self) -> str:
        """The name of the GPU or CPU that it began on."""
        return processor_name(self.lines[0]["machine"])

    def state_bytes(self, seq_len: int) -> int | None:
        """Bytes of the model's state for one sequence after seq_len tokens, in fp32.

        If this code does not know a mixer, the recorded size is returned; None if none is recorded, or a mixer has no
        state.
        """
        computed = _state_bytes(json.dumps(self.settings["model"], sort_keys=True), seq_len)
        recorded: dict[str, int] = self.lines[0].get("state_bytes", {})
        return recorded.get(str(seq_len)) if computed is None else computed


@cache
def _state_bytes(model: str, seq_len: int) -> int | None:
    try:
        shape = shape_of(LMConfig.model_validate(json.loads(model)))
    except Exception:  # a user's own mixer, a setting that this code does not know, or one that no model can have
        return None
    return 4 * shape.state_size(seq_len) if all(can_extend(block.mixer) for block in shape.blocks) else None


def one_of(known: Run | None, run: Run) -> Run:
    """The one that counts of two runs that differ in execution settings alone, such as the device: that with the first
    digest, in whichever order they come and whatever their results are."""
    return run if known is None or run.digest < known.digest else known


def code_name(code: dict[str, Any]) -> str:
    """A version of the code in words: "0.1.0 0123456789 + changes"."""
    commit = f" {code['commit'][:10]}" if code["commit"] else ""
    return f"{code['version']}{commit}{' + changes' if code['dirty'] else ''}"


def no_result(runs: Sequence[Run]) -> str:
    """The message for runs of which none has a result."""
    states = Counter("done, but not measured" if run.status == "done" else run.status for run in runs)
    said = ", ".join(f"{count} {status}" for status, count in states.items())
    how = "; finish them with --resume, then report again" if "unfinished" in states else ""
    return f"no run has a result ({said}){how}"
