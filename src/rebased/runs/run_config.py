"""What the configs of all kinds of runs have in common."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator

from rebased.config import Config
from rebased.models import LMConfig

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


class RunConfig(Config):
    """A run as data. It is complete before step 0 and never rewritten; its digest names the run.

    A subclass has a section that says what the model is trained on (`task` or `data`), `model` and `train`.
    """

    execution: ClassVar[tuple[str, ...]] = ()
    """Execution settings, such as train.device: they say how a run is computed, not what it computes. A run may be
    resumed with other ones."""
    metric: ClassVar[Literal["accuracy", "perplexity"]]
    """What a run of this kind is judged by."""
    verb: ClassVar[str]
    """The command that trains such a run: `rebased VERB --config FILE`."""

    if TYPE_CHECKING:  # fields of every subclass, after the section that they depend on
        model: LMConfig
        train: Any

    def execution_settings(self) -> dict[str, Any]:
        """The values of the execution settings, by their names in the section train."""
        return self.train.model_dump(mode="json", include={path.removeprefix("train.") for path in self.execution})
