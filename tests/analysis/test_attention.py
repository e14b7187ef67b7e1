"""Measures of attention matrices against numbers worked out by hand."""

import math

import pytest
import torch

from rebased.analysis.attention import entropy, noisy_tokens, soft_iou, target_mass

A = torch.tensor([[[[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]])  # [1,2,2,3]
G = torch.tensor([[[1, 0, 0], [0, 0, 1]]])  # [1,2,3]


def test_soft_iou_by_hand() -> None:
    # Head 0: min = 0.5 in row 0 and 0 in row 1; max = 1 + 0.25 + 0.25 and 1 + 1. Head 1 is the truth itself.
    torch.testing.assert_close(soft_iou(A, G), torch.tensor([[0.5 / 3.5, 1.0]]))


def test_soft_iou_is_the_iou_of_sets_for_zeros_and_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.rand(3, 1, 4, 5, generator=generator) < 0.5 for _ in range(2))
    expected = (one & other).sum((2, 3)) / (one | other).sum((2, 3))
    torch.testing.assert_close(soft_iou(one.double(), other[:, 0]), expected.double())


def test_soft_iou_of_rows_that_sum_to_one() -> None:
    """With one answer per query, IoU is m / (2 - m) for a mean mass m: each row has min m_i and max 2 - m_i."""
    weights = torch.rand(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights /= weights.sum(-1, keepdim=True)
    truth = torch.zeros(2, 5, 7).scatter_(2, torch.arange(5).expand(2, 5).unsqueeze(2), 1)
    mass = target_mass(weights, truth)
    torch.testing.assert_close(soft_iou(weights, truth), mass / (2 - mass))


def test_mass_entropy_and_noise_by_hand() -> None:
    torch.testing.assert_close(target_mass(A, G), torch.tensor([[0.25, 1.0]]))
    first = 0.5 * math.log(2) + 0.5 * math.log(4)
    torch.testing.assert_close(entropy(A), torch.tensor([[[first, 0.0], [0.0, 0.0]]]))
    torch.testing.assert_close(entropy(0.3 * A)[0, 0, 0], torch.tensor(first))  # rows need not sum to 1
    # Query 0 sees 3 keys: only the right one is above a third. Query 1: the wrong key 1 has all of head 0.
    assert noisy_tokens(A, G, torch.tensor([3, 3])).tolist() == [[[0, 1], [0, 0]]]
    assert noisy_tokens(A, G, torch.tensor([[5, 3]])).tolist() == [[[2, 1], [0, 0]]]


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"attention must be .B, H, Q, N. and truth .B, Q, N.*; they are .2, 2, 3. and "
    ):
        soft_iou(A[0], G)
    with pytest.raises(ValueError, match=r"cropped to the same queries and keys; they are .1, 2, 2, 3. and .1, 2, 2."):
        soft_iou(A, G[:, :, :2])
