"""The config of a language model's run: the corpus, the model, and how it is trained."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator, model_validator

from rebased.config import Config
from rebased.models import LMConfig
from rebased.runs.run_config import DECAY, Betas, Compile, Decay, Device, Precision, RunConfig, finish_model


class LMDataConfig(Config):
    """The text to train on, and how it is cut into windows."""

    folder: Path = Field(description="what `rebased data prepare -o FOLDER` wrote")
    seq_len: int = Field(4096, ge=1, description="tokens per window")
    isolate_documents: bool = Field(
        False, description="tokens see only their own document, not the others in the window"
    )


class LMTrainConfig(Config):
    """How a language model is trained. Defaults are the paper's Table 6, except micro_batch."""

    seed: int = Field(42, ge=0, description="of the initial weights, dropout and the order of windows")
    steps: int = Field(20_000, ge=1, description="updates of the weights")
    batch_size: int = Field(1024, ge=1, description="sequences per step, over all processes")
    micro_batch: int | None = Field(
        None, ge=1, description="sequences that a process computes at once; none: its whole share of the batch"
    )
    lr: float = Field(
        1e-3, gt=0, le=1e30, allow_inf_nan=False, description="the highest rate, reached at the end of the warm-up"
    )
    warmup_steps: int = Field(200, ge=0, description="steps over which the rate rises linearly")
    final_lr: float = Field(0.1, ge=0, le=1, description="the rate at the end of the cosine, as a fraction of lr")
    weight_decay: float = Field(0.1, ge=0, le=1e6, allow_inf_nan=False, description="of AdamW; `decay` says of what")
    decay: Decay = Field("matrices", description=DECAY)
    betas: Betas = Field((0.9, 0.95), description="of AdamW")
    eps: float = Field(1e-8, gt=0, le=1e6, allow_inf_nan=False, description="of AdamW")
    clip_norm: float | None = Field(
        1.0, gt=0, le=1e30, allow_inf_nan=False, description="gradients are clipped to this norm; none: not clipped"
    )
    device: Device = Field("auto", description="auto: a GPU if there is one")
    precision: Precision = Field(
        "auto", description="of matrix products; weights are always fp32. auto: bf16 on a GPU, fp32 on a CPU"
    )
    compile: Compile = Field(
        "none", description="what torch.compile compiles: each block (blocks), or the whole model as one graph (model)"
    )
    capture: bool = Field(False, description="on one GPU, replay the step as a CUDA graph")
    recompute: bool = Field(False, description="gradient checkpointing: a block's activations are computed twice")
    parallel: Literal["none", "ddp", "fsdp"] = Field(
        "none",
        description="how torchrun's processes divide the sequences of a step: each with all weights (ddp) or "
        "with a shard of every weight (fsdp)",
    )
    log_every: int = Field(10, ge=1, le=10**6, description="steps between two lines of the record")
    eval_every: int | None = Field(500, ge=1, description="steps between two evaluations; none: only at the end")
    eval_windows: int | None = Field(None, ge=1, description="first windows of the valid split to evaluate; none: all")
    final_windows: int | None = Field(
        None, ge=1, description="windows of each split to measure at the end, at even distances; none: all"
    )
    checkpoint_every: int = Field(500, ge=1, description="steps between two checkpoints")

    @model_validator(mode="after")
    def _agrees(self) -> "LMTrainConfig":
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is more than the run's steps, {self.steps}; choose fewer"
            )
        if self.compile == "model" and self.parallel == "fsdp":
            raise ValueError(
                "parallel: fsdp gathers weights block by block, so compile: model is not possible; use compile: blocks"
            )
        return self


class LMRunConfig(RunConfig):
    """A run on text. Its digest leaves out execution settings, so that a run can be resumed on other hardware."""

    section, metric, has_epochs, verb = "data", "perplexity", False, "lm train"
    execution: ClassVar[tuple[str, ...]] = (
        "train.device",
        "train.micro_batch",
        "train.compile",
        "train.capture",
        "train.recompute",
        "train.parallel",
    )
    not_in_digest: ClassVar[tuple[str, ...]] = execution

    data: LMDataConfig
    model: LMConfig
    train: LMTrainConfig = LMTrainConfig()

    @field_validator("model", mode="wrap")
    @classmethod
    def _finish_model(cls, value: Any, build: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if "data" not in info.data:  # the data section is invalid: only that error is shown
            return LMConfig()
        return finish_model(value, build, {"max_len": info.data["data"].seq_len})

    @model_validator(mode="after")
    def _fits(self) -> "LMRunConfig":
        limit = self.model.length_limit
        if limit is not None and limit < self.data.seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} is more than the model's {limit} learned positions; "
                f"set model.max_len to {self.data.seq_len} (or leave it out), or choose a shorter data.seq_len"
            )
        return self

    def result(self, end: dict[str, Any]) -> float | None:
        return end["valid"]["all"]["perplexity"] if "valid" in end else None

    def score(self, lines: Sequence[dict[str, Any]]) -> float:
        """The perplexity on the valid split, with a minus sign."""
        perplexity = self.result(lines[-1])
        return -inf if perplexity is None else -perplexity

    def share_done(self, line: dict[str, Any]) -> float:
        return line["step"] / self.train.steps

    def step_size(self) -> str:
        return f" of {self.train.batch_size:,} x {self.data.seq_len:,} tokens"
