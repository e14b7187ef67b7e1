"""The delta rule: chunks are the recurrence, values and gradients; what it overwrites, and what it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops import Backend, Degree, delta_attention, delta_attention_extend, init_delta_state
from rebased.ops.polynomial import chunked_recurrence
from rebased.ops.threads import run_on_threads
from tolerances import assert_close, assert_near

B, H, K, V = 2, 3, 5, 4
RULES: dict[str, dict[str, Any]] = {
    "degree 1": {"degree": 1},
    "degree 2": {"degree": 2},
    "centred": {"degree": 2, "centred": True},
}
GATES = ("none", "decay", "delta", "delta and decay")
SUMS = (200, 200, 16)
"""Tokens, tokens through the triangular system, features."""


def draw(T: int, gates: str, channels: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(T)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {name: random(B, T, H, width) for name, width in (("q", K), ("k", K), ("v", V))}
    beta = 2 * torch.sigmoid(random(B, T, H)) if "delta" in gates else None
    decay = -random(*((B, T, H, K) if channels else (B, T, H))).abs() if "decay" in gates else None
    every = {**given, "beta": beta, "log_decay": decay}
    return {name: None if x is None else x.to(dtype).requires_grad_() for name, x in every.items()}


def extend(given: dict[str, Any], lengths: list[int], backend: Backend, **rule: Any) -> dict[str, Tensor]:
    """o, the state after, and the gradients of both, in pieces that follow a state."""
    zeros = init_delta_state(B, H, K, V, dtype=given["q"].dtype, **rule)
    start = state = (
        torch.randn(zeros.shape, generator=torch.Generator().manual_seed(1)).to(zeros.dtype).requires_grad_()
    )
    outputs = []
    for number, length in enumerate(lengths):
        at = sum(lengths[:number])
        piece = {name: None if x is None else x[:, at : at + length] for name, x in given.items()}
        o, state = delta_attention_extend(**piece, state=state, backend=backend, **rule)
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    wanted = {name: x for name, x in given.items() if x is not None} | {"state": start}
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o.dtype)
    grads = torch.autograd.grad((o, state), list(wanted.values()), (do, torch.ones_like(state)))
    return {"o": o, "after": state, **{f"d {name}": grad for name, grad in zip(wanted, grads, strict=True)}}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("lengths", [[1], [63], [200], [1, 70, 129]], ids=str)
def test_chunks_are_the_recurrence(lengths: list[int], rule: dict[str, Any], gates: str) -> None:
    given = draw(sum(lengths), gates)
    got, want = extend(given, lengths, "chunked", **rule), extend(given, [sum(lengths)], "reference", **rule)
    assert_close(got.values(), want.values(), got, lengths=SUMS, condition=8.0)


@pytest.mark.parametrize("gates", ["decay", "delta and decay"])
def test_each_channel_may_have_its_decay(gates: str) -> None:
    given = draw(200, gates, channels=True)
    got, want = extend(given, [150, 50], "chunked", degree=1), extend(given, [200], "reference", degree=1)
    assert_close(got.values(), want.values(), got, lengths=SUMS, condition=8.0)


def test_groups_are_computed_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(200, "delta and decay")
    want = extend(given, [200], "chunked", degree=2)
    monkeypatch.setattr(chunked_recurrence, "FEATURES", 1)
    got = extend(given, [200], "chunked", degree=2)
    assert_close(got.values(), want.values(), got, lengths=SUMS)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three threads for torch, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_rows_go_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(100, "delta and decay")
    want = extend(given, [100], "chunked", degree=2)
    counts: list[int] = []

    def run(function: Any, items: Any, threads: int, device: torch.device) -> None:
        counts.append(len(items))
        run_on_threads(function, items, threads, device)

    monkeypatch.setattr(chunked_recurrence, "thread_count", lambda *_: 3)
    monkeypatch.setattr(chunked_recurrence, "run_on_threads", run)
    got = extend(given, [100], "chunked", degree=2)
    assert min(counts) > 1
    assert_close(got.values(), want.values(), got, lengths=SUMS)


def test_second_derivatives_are_refused() -> None:
    given = draw(10, "delta")
    (dq,) = torch.autograd.grad(delta_attention(**given, degree=2).sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dq.sum().backward()


@pytest.mark.parametrize("degree", [1, 2])
def test_a_value_is_overwritten(degree: Degree) -> None:
    """With beta 1 the last value of a key is read back exactly, whatever was there; a sum returns both values."""
    key, other = functional.normalize(torch.randn(2, K, dtype=torch.float64), dim=-1)
    k = torch.stack([key, other, key]).view(1, 3, 1, K)
    v = torch.randn(1, 3, 1, V, dtype=torch.float64)
    ones = torch.ones(1, 3, 1, dtype=torch.float64)
    o = delta_attention(k, k, v, ones, degree=degree, normalise=False)
    assert_near(o[0, 2, 0], v[0, 2, 0], K, condition=8.0)
    s = key.dot(other) ** degree
    added = delta_attention(k, k, v, None, degree=degree, normalise=False)
    assert_near(added[0, 2, 0], v[0, 0, 0] + s * v[0, 1, 0] + v[0, 2, 0], K, condition=8.0)


def test_a_decay_alone_of_degree_1_is_its_definition() -> None:
    """o_i = sum_j e^(g_(j+1) + ... + g_i) (q_i . k_j) v_j, the recurrence of Mamba-2 and simple GLA."""
    given = draw(30, "decay")
    q, k, v, g = (given[name] for name in ("q", "k", "v", "log_decay"))
    total = g.cumsum(1).transpose(1, 2)
    weights = torch.einsum("bihk,bjhk->bhij", q, k) * (total.unsqueeze(3) - total.unsqueeze(2)).exp().tril()
    want = torch.einsum("bhij,bjhv->bihv", weights, v)
    assert_near(delta_attention(q, k, v, None, g, normalise=False), want, 30, K, condition=8.0)


def test_centred_squares_are_zero_on_average() -> None:
    q = functional.normalize(torch.randn(1, 20_000, 1, K, dtype=torch.float64), dim=-1)
    one = q[:, :1]
    v = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    state = init_delta_state(1, 1, K, 1, degree=2, centred=True, dtype=q.dtype)
    nothing = torch.zeros(1, 1, 1, dtype=torch.float64)
    rule: dict[str, Any] = {"degree": 2, "centred": True, "normalise": False}
    o, state = delta_attention_extend(one, one, v, nothing + 1, state, **rule)
    assert_near(o, v, K, 16, condition=8.0)
    beta = torch.zeros(1, 20_000, 1, dtype=torch.float64)
    o, _ = delta_attention_extend(q, q, v.expand(1, 20_000, 1, 1), beta, state, **rule)
    assert abs(float(o.mean())) < 4 * float(o.std()) / 20_000**0.5


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_documents_do_not_see_each_other(backend: Backend) -> None:
    given = {name: x[:1] for name, x in draw(100, "delta and decay").items() if x is not None}
    packed = delta_attention(**given, degree=2, cu_seqlens=torch.tensor([0, 30, 30, 100]), backend=backend)
    for i, j in ((0, 30), (30, 100)):
        alone = delta_attention(**{name: x[:, i:j] for name, x in given.items()}, degree=2, backend=backend)
        assert_near(packed[:, i:j], alone, *SUMS, condition=8.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision(dtype: torch.dtype) -> None:
    """Half precision is computed in fp32: the result differs from fp64 by the rounding of the output alone."""
    given = draw(200, "delta and decay", dtype=dtype)
    wide = {name: None if x is None else x.detach().double() for name, x in given.items()}
    got, want = (delta_attention(**each, degree=2) for each in (given, wide))
    assert got.dtype == dtype
    assert_near(got, want, *SUMS, condition=8.0)


def test_nothing_to_compute() -> None:
    for shape in ((0, 5), (2, 0)):
        q, v, beta = torch.zeros(*shape, H, K), torch.zeros(*shape, H, V), torch.zeros(*shape, H)
        assert delta_attention(q, q, v, beta, degree=2).shape == v.shape


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"degree": 3}, "degree must be 1 or 2"),
        ({"degree": 2.0}, "degree must be 1 or 2"),
        ({"q": torch.tensor(1.0)}, "four axes"),
        ({"cu_seqlens": torch.tensor(4)}, "whole numbers"),
        ({"degree": 1, "centred": True}, "only squares"),
        ({"beta": torch.full((1, 4, 2), 2.5)}, "from 0 to 2"),
        ({"beta": torch.full((1, 4, 2), torch.nan)}, "from 0 to 2"),
        ({"beta": torch.ones(1, 4)}, r"beta must be a tensor \[1, 4, 2\]"),
        ({"log_decay": torch.ones(1, 4, 2)}, "at most 0"),
        ({"log_decay": torch.zeros(1, 4, 2, 3), "degree": 2}, r"log_decay must be a tensor \[1, 4, 2\]"),
        ({"normalise": False, "k": torch.ones(1, 4, 2, 3)}, "keys of length 1"),
        (
            {"normalise": False, "k": torch.tensor([torch.nan, 2, 2, 2]).view(1, 4, 1, 1).expand(1, 4, 2, 3)},
            "keys of length 1",
        ),
        ({"k": torch.ones(1, 4, 2, 5)}, "same width K"),
        ({"beta": torch.full((1, 4, 2), -0.5)}, "from 0 to 2"),
        ({"log_decay": torch.full((1, 4, 2), torch.nan)}, "at most 0"),
        ({"backend": "triton"}, "CUDA tensors"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    q, v = torch.ones(1, 4, 2, 3), torch.ones(1, 4, 2, 2)
    given: dict[str, Any] = {"q": q, "k": q, "v": v, "beta": torch.ones(1, 4, 2)}
    with pytest.raises(ValueError, match=words):
        delta_attention(**given | change)


def test_a_state_that_is_none() -> None:
    q, v, beta = torch.ones(1, 4, 2, 3), torch.ones(1, 4, 2, 2), torch.ones(1, 4, 2)
    with pytest.raises(ValueError, match="init_delta_state makes one"):
        delta_attention_extend(q, q, v, beta, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is \\[1, 2, 3, 2\\]"):
        delta_attention_extend(q, q, v, beta, torch.zeros(1, 2, 3, 2), degree=2)
    with pytest.raises(ValueError, match="degree must be 1 or 2"):
        init_delta_state(1, 2, 3, 2, degree=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [False, True])
def test_a_token_that_forgets_everything_begins_anew(channels: bool) -> None:
    """As a reset by -1e9. Sums over such a number lose the digits of all decays after it."""
    given: dict[str, Any] = draw(100, "delta and decay", channels, torch.float32)
    given["log_decay"] = given["log_decay"].detach().clone()
    given["log_decay"][:, 70] = -1e9
    degree: Degree = 1 if channels else 2
    o = delta_attention(**given, degree=degree, backend="chunked")[:, 70:]
    after = {name: x[:, 70:].double() for name, x in given.items()}
    want = delta_attention(**after, degree=degree, backend="reference")
    assert (o - want).abs().max() <= 8 * 104 * torch.finfo(torch.float32).eps * want.abs().max()
