"""Three processes that share a sequence compute the same loss and gradients as one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.train.lm.context_parallel import ContextParallel
from tiny_lm_run import start, wait
from tolerances import assert_close
from train.lm.shared_sequence import MODELS, batch, build, join

SUMS = (24, 24, 24, 24, 48) * 8
"""Roundings of four layers, forward and backward: a norm, projections, tokens, a projection, an MLP."""
SIZE = 3  # with two, no process would gather more than one shard


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each process."""
    folder = tmp_path_factory.mktemp("group")
    assert wait([start(join, rank, SIZE, str(folder)) for rank in range(SIZE)]) == [0] * SIZE
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]


@pytest.mark.parametrize("labelled", [slice(None), slice(2, 4)], ids=["all labels", "labels in the first part"])
@pytest.mark.parametrize("name", MODELS)
def test_many_processes_are_one(results: list[dict[str, Any]], name: str, labelled: slice) -> None:
    model = build(MODELS[name])
    loss = model.loss(*batch(labelled))
    loss.backward()
    wanted: dict[str, Tensor] = {"loss": loss.detach()}
    wanted |= {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert all((gradient != 0).any() for gradient in wanted.values())
    for result in results:
        found = result["found"][f"{name} {labelled.start}"]
        assert found.keys() == wanted.keys()
        assert_close(found.values(), wanted.values(), wanted, lengths=SUMS, size=0.0)


def test_what_cannot_be_shared_is_named(results: list[dict[str, Any]]) -> None:
    for result in results:
        errors = result["errors"]
        assert f"25 tokens cannot be divided equally among {SIZE} processes" in errors["length"]
        assert "mixer 'mamba' has no forward_shard" in errors["mixer"]
        assert "were given different tokens" in errors["data"]


def test_needs_processes() -> None:
    with pytest.raises(ValueError, match="start with torchrun"):
        ContextParallel()
