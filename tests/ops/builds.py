"""The GPUs and dtypes that the tests build kernels for: one of them in every run of the tests, all before a release.

A build takes seconds, and what differs between these is mostly in Triton. Kernels with products on tensor cores differ
more, and their tests say themselves what they are built for.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

BUILDS = [  # (compute capability, dtype)
    (90, torch.bfloat16),
    *(
        pytest.param(capability, dtype, marks=pytest.mark.release)
        for capability, dtype in ((80, torch.bfloat16), (90, torch.float32), (90, torch.float16))
    ),
]

KernelLaunches = Callable[..., list[dict[str, Any]]]
"""The type of the fixture `kernel_launches`."""
