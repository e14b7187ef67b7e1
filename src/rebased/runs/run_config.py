"""What the configs of all kinds of runs have in common."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from rebased.config import Config, did_you_mean, merge
from rebased.models import LMConfig
from rebased.models.presets import check_heads, preset_to_change

Device = Literal["auto", "cpu", "cuda"]

Precision = Literal["auto", "fp32", "tf32", "bf16"]
"""Precision of matrix products; weights, norms, sums and the residual stream are always fp32. auto: bf16 on a GPU and
fp32 on a CPU."""


def _name_of_flag(value: Any) -> Any:
    """`compile: true` is short for `compile: model`."""
    return {True: "model", False: "none"}[value] if isinstance(value, bool) else value


Compile = Annotated[Literal["none", "blocks", "model"], BeforeValidator(_name_of_flag)]
"""What torch.compile compiles: nothing, each kind of block once, or the whole model."""


def _below_one(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"both must be at least 0 and below 1, such as [0.9, 0.999]; got {list(betas)}")
    return betas


Betas = Annotated[tuple[float, float], AfterValidator(_below_one)]
"""Decay rates of AdamW's two moments."""
Decay = Literal["matrices", "all"]
DECAY = "what decays: weights with two or more axes, or all, with norms, biases and the parameters of gates"


class RunConfig(Config):
    """A run as data. It is complete before step 0 and never rewritten; its digest names the run.

    A subclass is a kind of run. It has a section that says what the model is trained on (`task` or `data`), `model` and
    `train`. How such a run is trained says its Workload (train/workload.py).
    """

    section: ClassVar[str]
    """The section that says what the model is trained on. No other kind has it."""
    metric: ClassVar[Literal["accuracy", "perplexity"]]
    """What a run is judged by."""
    has_epochs: ClassVar[bool]
    """True if a record has a line per epoch, with its test accuracy."""
    verb: ClassVar[str]
    """The command that trains such a run: `rebased VERB --config FILE`."""
    execution: ClassVar[tuple[str, ...]] = ()
    """Execution settings, such as train.device: they say how a run is computed, not what it computes. A run may be
    resumed with other ones."""

    if TYPE_CHECKING:  # fields of every subclass, after the section that they depend on
        model: LMConfig
        train: Any

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and cls.section not in values:
            for other in RunConfig.__subclasses__():
                if other.section in values:
                    raise ValueError(
                        f"it has a section {other.section} instead of {cls.section}; train it with "
                        f"`rebased {other.verb}`"
                    )
        return values

    @abstractmethod
    def result(self, end: dict[str, Any]) -> float | None:
        """The accuracy or perplexity in the last line of a record; None if it has none."""

    @abstractmethod
    def score(self, lines: Sequence[dict[str, Any]]) -> float:
        """The score of a run that has ended, by which a value is chosen; higher is better."""

    @abstractmethod
    def share_done(self, line: dict[str, Any]) -> float:
        """How much of the run is done after this line of its record, from 0 to 1."""

    def step_size(self) -> str:
        """The size of a step, in words after "100 steps"."""
        return ""

    def classes(self) -> dict[str, type]:
        """The registered classes besides mixers that a run uses, by what they are: {"task 'mqar'": ...}."""
        return {}

    def execution_settings(self) -> dict[str, Any]:
        """The values of the execution settings, by their names in the section train."""
        return self.train.model_dump(mode="json", include={path.removeprefix("train.") for path in self.execution})


def finish_model(value: Any, build: Callable[[Any], LMConfig], sizes: dict[str, Any]) -> LMConfig:
    """The complete LMConfig of a model section such as {preset: rebased, d_model: 64, mixers: {1: {n_heads: 4}}}.

    `build` validates the merged fields. `sizes` are the vocab_size, max_len and so on that the rest of the run needs;
    the section may override them.
    """
    if not isinstance(value, dict):
        return build(value)
    known = ["preset", "pattern", *LMConfig.model_fields]
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), known)}")
    patch = sizes | value
    base = LMConfig()
    if "preset" in patch:
        given = {key: patch[key] for key in ("d_model", "vocab_size", "max_len") if key in patch}
        typed = LMConfig.model_validate(given)
        base = preset_to_change(str(patch.pop("preset")), **{key: getattr(typed, key) for key in given})
    fields = base.model_dump() | {"mixers": [mixer.model_dump(exclude_unset=True) for mixer in base.mixers]}
    _reset_value_width(fields["mixers"], patch.get("mixers"))
    model = build(merge(fields, patch))
    if "preset" in value:
        check_heads(model)
    return model


def _reset_value_width(mixers: Sequence[dict[str, Any]], changes: Any) -> None:
    """Remove value_width of each mixer whose n_heads changes: its default, d_model // n_heads, then applies.

    A change that names value_width is merged later and wins.
    """
    if isinstance(changes, dict):
        for i, mixer in enumerate(mixers):
            change = changes.get(i, changes.get(str(i)))
            if isinstance(change, dict) and "n_heads" in change:
                mixer.pop("value_width", None)
