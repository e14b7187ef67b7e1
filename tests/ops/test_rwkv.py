"""WKV: every path against the formula written out as a double sum, long sequences, extreme keys and decays."""

import math

import pytest
import torch

from ops.wkv_cases import assert_matches, by_path, wkv_inputs
from rebased.ops import Backend, WKVState, init_wkv_state, wkv, wkv_extend
from tolerances import assert_near, unit_roundoff


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("T", [1, 2, 3, 16, 37])
def test_is_its_formula(T: int, dtype: torch.dtype, backend: Backend) -> None:
    assert_matches(wkv_inputs(2, T, 4, dtype=dtype), by_path(backend))


def test_without_a_past_the_first_output_is_the_first_value() -> None:
    k, v, w, u, *_ = wkv_inputs(2, 6, 4, dtype=torch.float64).values()
    assert_near(wkv(k, v, w, u)[:, 0], v[:, 0], 1)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_exponents_beyond_any_float(backend: Backend) -> None:
    """Keys of +-200 span e^400; rates from e^-6 to e^4 a token. fp32 ends at e^88,
    and rounds an exponent of 200 by 1e-5 a token."""
    assert_matches(wkv_inputs(1, 40, 5, spread=60.0), by_path(backend))


@pytest.mark.parametrize("w", [-30.0, 9.0, 30.0])
def test_extreme_rates(w: float) -> None:
    """A channel that never forgets averages all; one that forgets at once sees the last two tokens alone."""
    k, v, _, u, *_ = wkv_inputs(1, 50, 3, dtype=torch.float64).values()
    y = wkv(k, v, torch.full((3,), w, dtype=torch.float64), u)
    t = 30
    seen = slice(0, t) if w < 0 else slice(t - 1, t)
    weights = torch.softmax(torch.cat([k[:, seen], (u + k[:, t]).unsqueeze(1)], dim=1), dim=1)
    values = torch.cat([v[:, seen], v[:, t : t + 1]], dim=1)
    forgotten = t * math.exp(w) if w < 0 else 0.0  # what the slowest rate, e^-30, forgets in 30 tokens: 3e-12
    assert_near(y[:, t], (weights * values).sum(1), t, condition=10 + forgotten / unit_roundoff(y.dtype))


def test_65536_tokens_in_fp32() -> None:
    assert_matches(wkv_inputs(1, 65_536, 4), by_path("chunked"), law=by_path("chunked"))


def test_any_split_gives_the_same() -> None:
    k, v, w, u, *_ = wkv_inputs(2, 23, 4, dtype=torch.float64).values()
    state, outputs = init_wkv_state(2, 4, dtype=torch.float64), []
    for part_k, part_v in zip(k.split([1, 10, 7, 5], dim=1), v.split([1, 10, 7, 5], dim=1), strict=True):
        y, state = wkv_extend(part_k, part_v, w, u, state)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), wkv(k, v, w, u), 23)


def test_wrong_inputs_are_named() -> None:
    k, v, w, u, *_ = wkv_inputs(2, 5, 3).values()
    state = init_wkv_state(2, 3)
    with pytest.raises(ValueError, match=r"k and v must be \[B,T,D\]"):
        wkv(k, v[:, 1:], w, u)
    with pytest.raises(ValueError, match=r"w and u must be \[3\]"):
        wkv(k, v, w[1:], u)
    with pytest.raises(ValueError, match=r"must be a WKVState .* got tuple"):
        wkv_extend(k, v, w, u, tuple(state))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"another shape or dtype: .* needs three of \[2, 3\]"):
        wkv_extend(k, v, w, u, init_wkv_state(4, 3))
    with pytest.raises(ValueError, match=r"torch.float64; .* in torch.float32"):
        wkv_extend(k, v, w, u, WKVState(*(part.double() for part in state)))
