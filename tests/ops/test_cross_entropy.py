"""The head's loss in blocks: torch's cross-entropy of the logits, which are never all there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.cross_entropy_cases import assert_is_the_law, case
from rebased.ops import linear_argmax, linear_cross_entropy
from rebased.ops.cross_entropy import api
from tolerances import assert_near


@pytest.mark.parametrize("logits", [1, 100, 1 << 20], ids=["a row a block", "odd blocks", "one block"])
@pytest.mark.parametrize("shape", [(37, 6, 11), (1, 1, 2), (64, 5, 301)], ids=str)
def test_is_cross_entropy(shape: tuple[int, int, int], logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "CPU_CHUNK_LOGITS", logits)
    assert_is_the_law(*case(*shape))


def test_in_fp32() -> None:
    assert_is_the_law(*case(200, 24, 96, torch.float32))


def test_logits_of_great_size() -> None:
    hidden, weight, targets = case(20, 4, 9)
    assert_is_the_law((hidden * 1e4).detach().requires_grad_(), weight, targets)


def test_nothing_labelled_costs_nothing() -> None:
    hidden, weight, targets = case(9, 4, 7)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, [hidden, weight]))
    assert linear_cross_entropy(hidden[:0], weight, targets[:0]) == 0


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_wanted(frozen: int) -> None:
    hidden, weight, targets = case(9, 4, 7)
    pair = [hidden, weight]
    wanted = torch.autograd.grad(linear_cross_entropy(*pair, targets), pair)[1 - frozen]
    pair[frozen] = pair[frozen].detach()
    assert_near(torch.autograd.grad(linear_cross_entropy(*pair, targets), pair[1 - frozen])[0], wanted, 9)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """The dtype and the number of every block of logits that was made."""
    seen, original = [], api.losses_and_gradient_

    def look(logits: Tensor, *rest: Any) -> None:
        seen.append((logits.dtype, logits.numel()))
        original(logits, *rest)

    monkeypatch.setattr(api, "losses_and_gradient_", look)
    return seen


def test_all_logits_are_never_there(blocks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "CPU_CHUNK_LOGITS", 300)
    linear_cross_entropy(*case(40, 8, 30))
    assert blocks == [(torch.float64, 300)] * 4


def test_products_follow_autocast_and_sums_do_not(blocks: list[Any]) -> None:
    hidden, weight, targets = case(40, 8, 30, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert blocks == [(torch.bfloat16, 40 * 30)]
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == gradients[0].dtype == gradients[1].dtype == torch.float32
    assert not torch.equal(gradients[1], gradients[1].bfloat16().float())  # summed in fp32, not rounded
    expected = linear_cross_entropy(hidden, weight, targets)
    assert_near(loss, expected, 8, dtype=torch.bfloat16)


def test_there_is_no_second_derivative() -> None:
    hidden, weight, targets = case(9, 4, 7)
    gradient = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no double backward"):
        gradient.sum().backward()


def test_compiles_as_one_graph() -> None:
    """aot_eager: tracing and its fake tensors, without the minute that generating code takes."""
    hidden, weight, targets = case(9, 4, 7)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for run in (compiled, torch.no_grad()(compiled)):
        assert_near(run(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets), 9)
    gradients = [
        torch.autograd.grad(run(hidden, weight, targets), [hidden, weight]) for run in (linear_cross_entropy, compiled)
    ]
    for got, want in zip(*gradients, strict=True):
        assert_near(got, want, 9)


def test_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _ = case(37, 6, 11)
    monkeypatch.setattr(api, "CPU_CHUNK_LOGITS", 50)
    assert torch.equal(linear_argmax(hidden, weight), (hidden @ weight.T).argmax(-1))


def test_bad_shapes_are_named() -> None:
    hidden, weight, targets = case(9, 4, 7)
    bad: list[tuple[Tensor, Tensor, Tensor]] = [(hidden, weight[:, 1:], targets), (hidden, weight, targets[1:])]
    for arguments in bad:
        with pytest.raises(ValueError, match=r"hidden must be \[N,D\], weight \[vocab,D\] and targets \[N\]; they are"):
            linear_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="targets must be whole numbers"):
        linear_cross_entropy(hidden, weight, targets.float())
