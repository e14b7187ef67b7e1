"""A language model's run as data: the corpus, the model and how the one is trained on the other."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator, model_validator

from rebased.config import Config
from rebased.models import LMConfig
from rebased.runs.base_config import BaseRunConfig, Betas, Compile, Device, Precision
from rebased.runs.model_section import finish_model


class TextData(Config):
    """What is read, and how it is cut into windows."""

    folder: Path = Field(description="what `rebased data prepare -o FOLDER` wrote")
    seq_len: int = Field(4096, ge=1, description="tokens of a window")
    isolate_documents: bool = Field(False, description="no token sees another document of its window")


class TextTrain(Config):
    """The paper's Table 6 by default, but for the number of sequences that are computed at once."""

    seed: int = Field(42, ge=0, description="of the initial weights, dropout and the order of windows")
    steps: int = Field(20_000, ge=1)
    batch_size: int = Field(1024, ge=1, description="sequences a step, over all processes")
    micro_batch: int | None = Field(
        None, ge=1, description="sequences a process computes at once; none: all of its own"
    )
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="the highest, at the end of the warm-up")
    warmup_steps: int = Field(200, ge=0, description="the rate rises in equal strides over so many steps")
    final_lr: float = Field(0.1, ge=0, le=1, description="a fraction of lr: where the cosine ends")
    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False)
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="what decays: weights with two axes or more, or norms and biases too"
    )
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    clip_norm: float | None = Field(1.0, gt=0, allow_inf_nan=False, description="longest gradient; none: any")
    device: Device = "auto"
    precision: Precision = Field(
        "auto", description="of products; weights are fp32 always. auto: bf16 on a GPU, fp32 on a CPU"
    )
    compile: Compile = Field(
        "none", description="torch.compile of each kind of block once, or of the whole model in one piece"
    )
    capture: bool = Field(True, description="on one GPU, replay the step as a CUDA graph")
    recompute: bool = Field(False, description="gradient checkpointing: a block's activations are computed twice")
    parallel: Literal["none", "ddp", "fsdp", "context"] = Field(
        "none",
        description="how torchrun's processes share a step: its sequences, with whole copies of the model (ddp) or "
        "each with a part of every weight (fsdp); or each sequence, every process a stretch of it (context)",
    )
    log_every: int = Field(10, ge=1, description="steps between two lines of the record")
    eval_every: int | None = Field(500, ge=1, description="steps between two evaluations; none: at the end alone")
    eval_windows: int | None = Field(None, ge=1, description="windows of the valid split to evaluate; none: all")
    final_windows: int | None = Field(None, ge=1, description="windows of each split to measure at the end; none: all")
    checkpoint_every: int = Field(500, ge=1, description="steps between two checkpoints")

    @model_validator(mode="after")
    def _agrees(self) -> "TextTrain":
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} are more than the run's steps, {self.steps}")
        if self.compile == "model" and self.parallel == "fsdp":
            raise ValueError("fsdp gathers a block's weights around it, so compile: model cannot be; use blocks")
        return self


class TextRunConfig(BaseRunConfig):
    """A run on text. Its digest leaves execution settings out: fewer GPUs need smaller micro batches."""

    execution: ClassVar[tuple[str, ...]] = (
        "train.device",
        "train.micro_batch",
        "train.compile",
        "train.capture",
        "train.recompute",
        "train.parallel",
    )
    not_in_digest: ClassVar[tuple[str, ...]] = execution
    metric: ClassVar[Literal["accuracy", "perplexity"]] = "perplexity"
    verb: ClassVar[str] = "lm train"

    data: TextData
    model: LMConfig
    train: TextTrain = TextTrain()

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and "task" in values and "data" not in values:
            raise ValueError("it has a section task instead of data: it is for `rebased train`")
        return values

    @field_validator("model", mode="wrap")
    @classmethod
    def _finish_model(cls, value: Any, build: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if "data" not in info.data:  # it has an error of its own, which is the one to show
            return LMConfig()
        return finish_model(value, build, {"max_len": info.data["data"].seq_len})

    @model_validator(mode="after")
    def _fits(self) -> "TextRunConfig":
        if self.model.max_len < self.data.seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} is beyond the model's {self.model.max_len} learned positions; "
                f"set model.max_len to {self.data.seq_len} (or leave it out), or make windows shorter"
            )
        if self.train.parallel == "context" and self.data.isolate_documents:
            raise ValueError("processes that share a sequence cannot keep its documents apart; use ddp or fsdp")
        return self
