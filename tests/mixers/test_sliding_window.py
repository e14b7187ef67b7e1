"""Sliding-window attention against a full mask, at any window, in chunks and in pieces."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from rebased.mixers import SlidingWindow, SoftmaxAttention
from rebased.mixers.rotary import rotary_angles, rotate
from rebased.mixers.sliding_window import local_attention
from tolerances import assert_near

B, D = 2, 12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("window", [1, 2, 5, 31, 64, 200])
@pytest.mark.parametrize("length", [1, 7, 64, 131])
def test_blocks_are_the_full_mask(window: int, length: int) -> None:
    q, k, v = (torch.randn(B, length, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    age = torch.arange(length).unsqueeze(1) - torch.arange(length)
    heads = (each.transpose(1, 2) for each in (q, k, v))
    expected = functional.scaled_dot_product_attention(*heads, attn_mask=(age >= 0) & (age < window)).transpose(1, 2)
    actual, weights = local_attention(q, k, v, window), torch.randn(B, length, 3, 4, dtype=torch.float64)
    assert_near(actual, expected, 4, length)
    for a, e in zip(*(torch.autograd.grad((o * weights).sum(), (q, k, v)) for o in (actual, expected)), strict=True):
        assert_near(a, e, 4, length, size=1.0)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("window", [1, 6, 40])
@pytest.mark.parametrize("pieces", [[70], [1] * 70, [3, 40, 1, 1, 25], [50, 20]])
def test_any_split_gives_the_same(pieces: list[int], window: int, rotary: bool) -> None:
    mixer = SlidingWindow(D, window=window, n_heads=2, rotary=rotary).double().eval()
    x = torch.randn(B, 70, D, dtype=torch.float64)
    state, outputs = mixer.init_state(B), []
    for piece in x.split(pieces, dim=1):
        y, state = mixer.extend(piece, state)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), mixer(x), D, D, window, D)
    assert state.k.shape[1] == min(70, window - 1)


def test_a_window_that_sees_all_is_attention() -> None:
    window, full = SlidingWindow(D, window=99).double().eval(), SoftmaxAttention(D).double().eval()
    full.load_state_dict(window.state_dict())
    x = torch.randn(B, 50, D, dtype=torch.float64)
    assert_near(window(x), full(x), D, D, 50, D)


def test_rotary_turns_scores_into_functions_of_distance() -> None:
    angles = rotary_angles(65_536, 8, torch.device("cpu"))
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    near = (rotate(q, angles[7:8]) * rotate(k, angles[4:5])).sum()
    far = (rotate(q, angles[65_507:65_508]) * rotate(k, angles[65_504:65_505])).sum()
    assert_near(near, far, 8, condition=65_536, size=1.0)  # an angle of 65,536 is rounded by as many u
    assert not torch.isclose(near, (q * k).sum())
    assert_near(rotate(q, angles[9:10]).norm(), q.norm(), 8)


def test_a_long_sequence_needs_no_square() -> None:
    """65,536 tokens: a mask of T x T would be 4 GB."""
    mixer = SlidingWindow(8, window=16, rotary=True).eval()
    y = mixer(torch.randn(1, 65_536, 8))
    assert y.isfinite().all()
    assert mixer.state_size(10) == 2 * 10 * 8
    assert mixer.state_size(65_536) == 2 * 15 * 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window 0 sees nothing; choose at least 1"),
        ({"n_heads": 5}, "d_model 12 is not divisible by n_heads 5"),
        ({"n_heads": 4, "rotary": True}, "a head of 3 is odd"),
        ({"dropout": 1.0}, "dropout 1.0 is not a probability below 1"),
    ],
)
def test_bad_arguments_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlidingWindow(D, **values)


def test_foreign_states_are_refused() -> None:
    mixer, x = SlidingWindow(D, window=4).eval(), torch.randn(B, 9, D)
    with pytest.raises(ValueError, match=r"must be a WindowCache .* got KVCache"):
        mixer.extend(x, SoftmaxAttention(D).init_state(B))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"another shape: \[3, 0, 1, 12\]"):
        mixer.extend(x, mixer.init_state(3))
    _, wide = SlidingWindow(D, window=9).eval().extend(x, mixer.init_state(B))
    with pytest.raises(ValueError, match=r"\[2, 8, 1, 12\]; x needs \[2, 'at most 3', 1, 12\]"):
        mixer.extend(x, wide)
