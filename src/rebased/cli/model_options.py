"""The options of commands that open a model: which one, where and how it is computed, and the user's own code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from rebased.cli.imports import Imports, import_all
from rebased.data.tokenizer import Tokenizer
from rebased.models import LanguageModel
from rebased.ops.backend import choose_device
from rebased.runs.load import TextModel, open_text_model, open_tokenizer
from rebased.runs.shipped import find_model

MODEL = "A run's folder, a model.safetensors, or a name of `rebased list models`. Default: lm/stdlib-bytes."
TOKENIZER = (
    "bytes, a tokenizer.json, or a name on the Hugging Face Hub. Default: the one that the run was trained with."
)
OWN_MIXERS = "Python file or module with your own mixers (@register_mixer). Can be given several times."

ModelPath = Annotated[Path | None, Parameter(help=MODEL)]
TokenizerName = Annotated[str | None, Parameter(help=TOKENIZER)]
TokenizerFolder = Annotated[Path | None, Parameter(help="Folder that `rebased data prepare` wrote, for its tokenizer.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where to compute.")]
OwnMixers = Annotated[Imports, Parameter(help=OWN_MIXERS)]


@Parameter(name="*")
@dataclass(frozen=True)
class Computing:
    """How a language model is measured.

    Parameters
    ----------
    batch_size
        Windows, or contexts, per forward pass.
    precision
        Precision of the layers. The head and the losses are always fp32, sums fp64.
    """

    batch_size: int = 8
    device: Device = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    imports: OwnMixers = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the layers; None: that of the weights."""
        return torch.bfloat16 if self.precision == "bf16" else None

    def import_code(self) -> torch.device:
        """Import the user's code. Returns the device: what is wrong with either shows before a model is loaded."""
        import_all(self.imports)
        return choose_device(self.device)


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """How a language model is opened for writing.

    Parameters
    ----------
    precision
        Precision of the weights.
    cuda_graph
        Replay steps as CUDA graphs, on a GPU: faster, above all with few sequences. The text is the same.
    """

    tokenizer: TokenizerName = None
    data: TokenizerFolder = None
    device: Device = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    cuda_graph: bool = True
    imports: OwnMixers = ()

    def import_code(self) -> torch.device:
        """Import the user's code. Returns the device: what is wrong with either shows before a model is loaded."""
        import_all(self.imports)
        return choose_device(self.device)

    def open(self, model: Path | None, where: torch.device) -> TextModel:
        """The model, in its precision, and the tokenizer."""
        opened = open_text_model(find_model(model), self.tokenizer, self.data, where)
        opened.model.to(torch.bfloat16 if self.precision == "bf16" else torch.float32)
        return opened

    def open_tokenizer(self, model: Path | None) -> Tokenizer:
        """Return the tokenizer that the options name, else the one beside the model."""
        return open_tokenizer(find_model(model), self.tokenizer, self.data)


def check_length(length: int, model: LanguageModel, option: str) -> int:
    """`length`, if the model takes such sequences; otherwise ValueError that names `option`."""
    limit = model.config.length_limit
    if length < 1:
        raise ValueError(f"{option} {length}: give 1 or more")
    if limit is not None and length > limit:
        raise ValueError(f"{option} {length}: the model has {limit} positions; give 1 to {limit}")
    return length


DEFAULT_COMPUTING, DEFAULT_MODEL = Computing(), ModelOptions()
