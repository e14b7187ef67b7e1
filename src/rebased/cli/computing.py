"""The options of commands that measure a model: how it is computed, and the user's own code."""

from dataclasses import dataclass
from typing import Literal

import torch
from cyclopts import Parameter

from rebased.cli.imports import Imports, import_all
from rebased.ops.backend import choose_device

PRECISION = {"fp32": None, "bf16": torch.bfloat16}


@Parameter(name="*")
@dataclass(frozen=True)
class Computing:
    """How a language model is computed.

    Parameters
    ----------
    batch_size
        Windows, or contexts, per forward pass.
    device
        Where to compute.
    precision
        Precision of the layers. The head and the losses are always fp32, sums fp64.
    imports
        Python file or module with your own mixers (@register_mixer). Can be given several times.
    """

    batch_size: int = 8
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    imports: Imports = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the layers; None: that of the weights."""
        return PRECISION[self.precision]

    def import_code(self) -> torch.device:
        """Import the user's code. Returns the device: what is wrong with either shows before a model is loaded."""
        import_all(self.imports)
        return choose_device(self.device)


DEFAULT_COMPUTING = Computing()
