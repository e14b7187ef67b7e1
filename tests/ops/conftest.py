"""What the tests of operators share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills whatever torch.empty hands out with NaN: a number no kernel wrote is seen."""
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
