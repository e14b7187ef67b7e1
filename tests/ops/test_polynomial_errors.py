"""Whatever is wrong with a call of polynomial attention, one clear ValueError says what and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polynomial_inputs import Shape, inputs
from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    PolyState,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
    use_backend,
)

SHAPE = Shape(B=1, T=6, H=2, K=4, V=3)


def tensors(**changed: Tensor) -> dict[str, Any]:
    """q, k, v and coefficients of a good call, some of them changed."""
    q, k, v, _ = inputs(SHAPE, dtype=torch.float32)
    return {"q": q, "k": k, "v": v, "coefficients": REBASED, **changed}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(1, 6, 2, 5)}, "same width K; q has 4 and k has 5"),
        ({"q": torch.zeros(6, 2, 4)}, r"q must be \[B, T, H, width\]"),
        ({"v": torch.zeros(1, 7, 2, 3)}, "must agree in B, T and H"),
        ({"k": torch.zeros(1, 6, 1, 4)}, "must agree in B, T and H"),
        ({"k": torch.zeros(1, 6, 2, 4, device="meta")}, "on one device; they are on cpu, meta and cpu"),
        ({"v": torch.zeros(1, 6, 2, 3, dtype=torch.float16)}, "share one dtype"),
        ({"q": torch.zeros(1, 6, 2, 4, dtype=torch.int64)}, "q has dtype torch.int64; use float16"),
        ({"v": torch.zeros(1, 6, 2, 0)}, "no axis may be empty"),
        ({"coefficients": (0.0, 1.0)}, r"\(c0, c1, c2\); got 2 numbers"),
        ({"coefficients": (0.0, 0.0, 0.0)}, "every similarity zero; ReBased is"),
        ({"coefficients": (0.0, float("nan"), 1.0)}, "coefficients must be finite numbers"),
        ({"scale": float("nan")}, r"scale must be a finite number; it is nan \(None means"),
        ({"scale": float("inf")}, "scale must be a finite number; it is inf"),
        ({"eps": float("nan")}, r"eps must be a number of at least 0; it is nan \(the default is 1e-12\)"),
        ({"eps": -1e-9}, "eps must be a number of at least 0; it is -1e-09"),
        ({"backend": "cuda"}, "backend 'cuda' is unknown; choose one of auto, reference"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_inputs(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        poly_attention(**tensors(**changed))
    state = init_poly_state(1, 2, 4, 3, REBASED)
    with pytest.raises(ValueError, match=message):
        poly_attention_extend(**tensors(**changed), state=state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (init_poly_state(2, 2, 4, 3, REBASED), "another shape"),
        (init_poly_state(1, 2, 4, 5, REBASED), "another shape"),
        (init_poly_state(1, 2, 4, 3, BASED), r"F = 10 for K = 4"),
        (init_poly_state(1, 2, 4, 3, REBASED, dtype=torch.float64), "is torch.float32; this one is torch.float64"),
        (init_poly_state(1, 2, 4, 3, REBASED, device="meta"), "state is on meta and the inputs are on cpu"),
        (tuple(init_poly_state(1, 2, 4, 3, REBASED)), "must be a PolyState .* got tuple"),
    ],
)
def test_a_state_of_another_kind(state: PolyState, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        poly_attention_extend(**tensors(), state=state)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 4]), "must rise from 0 to T = 6"),
        (torch.tensor([1, 6]), "must rise from 0 to T = 6"),
        (torch.tensor([0, 4, 3, 6]), "must rise from 0 to T = 6"),
        (torch.tensor([0.0, 6.0]), "must be whole numbers"),
        (torch.tensor([[0, 6]]), "must be whole numbers"),
        (torch.tensor([0]), "must be whole numbers"),
    ],
    ids=str,
)
def test_bad_cu_seqlens(cu_seqlens: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        poly_attention(**tensors(), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "reference", "recurrent"])
def test_an_empty_document_of_a_state(backend: Backend, gated: bool) -> None:
    given = tensors()
    gate = {"log_decay": given["q"].new_zeros(given["q"].shape[:3])} if gated else {}
    with pytest.raises(ValueError, match="document 1 of cu_seqlens is empty"):
        poly_attention_extend(**given, state=None, cu_seqlens=torch.tensor([0, 4, 4, 6]), backend=backend, **gate)


def test_cu_seqlens_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"tensor of whole numbers; got a list: pass torch.tensor\(cu_seqlens\)"):
        poly_attention(**tensors(), cu_seqlens=[0, 6])


def test_cu_seqlens_of_a_batch() -> None:
    q, k, v, _ = inputs(SHAPE._replace(B=2))
    with pytest.raises(ValueError, match="B must be 1; it is 2"):
        poly_attention(q, k, v, coefficients=REBASED, cu_seqlens=torch.tensor([0, 6]))


def test_unknown_backend_of_a_block_or_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fast' is unknown"), use_backend("fast"):  # type: ignore[arg-type]
        pass
    monkeypatch.setenv("REBASED_BACKEND", "fast")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        poly_attention(**tensors())


@pytest.mark.parametrize("loss", [Tensor.sum, lambda o: o.square().sum()], ids=["linear", "square"])
def test_second_derivatives_say_so(loss: Callable[[Tensor], Tensor]) -> None:
    q, k, v, _ = inputs(SHAPE)
    o = poly_attention(q, k, v, coefficients=REBASED, backend="chunked")
    (dq,) = torch.autograd.grad(loss(o), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r'first derivatives only; .* pass backend="reference"'):
        torch.autograd.grad(dq.square().sum(), q)
    assert dq.isfinite().all()
