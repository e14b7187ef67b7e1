"""The options that open a language model for writing: its tokenizer, where it computes, and how."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from cyclopts import Parameter

from rebased.cli.imports import Imports, import_all
from rebased.data.tokenizer import Tokenizer
from rebased.ops.backend import choose_device
from rebased.runs.load import TextModel, open_text_model, open_tokenizer
from rebased.runs.shipped import find_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened.

    Parameters
    ----------
    tokenizer
        bytes, a tokenizer.json, or a name on the Hugging Face Hub. Default: the one that the run was trained with.
    data
        Folder that `rebased data prepare` wrote, for its tokenizer.
    device
        Where to compute.
    precision
        Precision of the weights.
    cuda_graph
        Replay steps as CUDA graphs, on a GPU: faster, above all with few sequences. The text is the same.
    imports
        Python file or module with your own mixers (@register_mixer). Can be given several times.
    """

    tokenizer: str | None = None
    data: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    cuda_graph: bool = True
    imports: Imports = ()

    def import_code(self) -> torch.device:
        """Import the user's code. Returns the device: what is wrong with either shows before a model is loaded."""
        import_all(self.imports)
        return choose_device(self.device)

    def open(self, model: Path | None, where: torch.device) -> TextModel:
        """Return the model, in its precision, and the tokenizer."""
        opened = open_text_model(find_model(model), self.tokenizer, self.data, where)
        opened.model.to(DTYPES[self.precision])
        return opened

    def open_tokenizer(self, model: Path | None) -> Tokenizer:
        """Return the tokenizer alone."""
        return open_tokenizer(find_model(model), self.tokenizer, self.data)


DEFAULT_MODEL = ModelOptions()
