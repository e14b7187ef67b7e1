"""The precision of matrix products, and what torch keeps of it for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rebased.runs.run_config import Precision


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """The precision that `auto` stands for on this device."""
    if name == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return name


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype of the layers' products (autocast of ops/backend.py); None: that of the weights."""
    return torch.bfloat16 if precision == "bf16" else None


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Within the block fp32 products are TF32 if the precision is tf32 and fp32 if not, whatever was set before."""
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


@contextmanager
def onednn_restored() -> Iterator[None]:
    """Restore torch's oneDNN switch after the block.

    At the first bf16 product that the CPU has no instructions for, torch turns oneDNN off for the whole process.
    Products in fp32 then round differently: what a later run computes would depend on this one.
    """
    former = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = former
