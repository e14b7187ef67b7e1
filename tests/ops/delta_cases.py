"""Inputs for the delta rule, and the comparison of its kernels with fp64."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops import delta_attention_extend, init_delta_state
from tolerances import assert_small_change, changed

Inputs = dict[str, Tensor]


def delta_inputs(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    degree: Any,
    *,
    decay: float | None = 1.0,
    unit: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """decay: the largest; None for no gate. unit: keys have length 1 already."""
    q, k, v = (torch.randn(B, T, H, width) for width in (K, K, V))
    if unit:
        q, k = (functional.normalize(x, dim=-1) for x in (q, k))
    given = {"q": q, "k": k, "v": v, "beta": 2 * torch.rand(B, T, H)}
    given = {name: x.to(device, dtype) for name, x in given.items()}
    if decay is not None:
        given["log_decay"] = (-decay * torch.rand(B, T, H)).to(device)
    state = init_delta_state(B, H, K, V, degree=degree)
    return given | {"state": torch.randn_like(state).to(device)}


def step_inputs(
    B: int,
    H: int,
    K: int,
    V: int,
    *,
    degree: Any,
    centred: bool = False,
    beta: bool = True,
    gate: str = "none",
    normalise: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of one token after others, and the rule. gate: none, head or channel."""
    q, k, v = (torch.randn(B, 1, H, width).to(device, dtype) for width in (K, K, V))
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": 2 * torch.rand(B, 1, H).to(device) if beta else None}
    if gate != "none":
        given["log_decay"] = -torch.rand(B, 1, H, *((K,) if gate == "channel" else ())).to(device)
    state = init_delta_state(B, H, K, V, degree=degree, centred=centred)
    given["state"] = torch.randn_like(state).to(device)
    return given, {"degree": degree, "centred": centred, "normalise": normalise}


def recall_inputs(B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """What a recall task gives to the rule of degree 2, with the gradient `do` of its outputs.

    Keys have a common part. In the second half every other token asks, and the tokens between are equal. Only answers
    have a gradient, so the last one alone reads its own key: a gradient of one score, and that score is small.
    """
    given = delta_inputs(B, T, H, K, V, 2, decay=None)
    given["k"] += torch.randn(H, K)
    given["beta"] = torch.sigmoid(torch.randn(B, T, H))
    for name in "qkv":
        given[name][:, T // 2 + 1 :: 2] = given[name][:1, T // 2 + 1 : T // 2 + 2]
    q, k = given["q"][:, T - 2], given["k"][:, T - 2]
    given["k"][:, T - 2] = k - q * ((q * k).sum(-1, keepdim=True) / q.square().sum(-1, keepdim=True) - 0.01)
    given["do"] = torch.randn(B, T, H, V)
    given["do"][:, : T // 2], given["do"][:, T // 2 + 1 :: 2] = 0, 0
    given["state"] = torch.zeros_like(given["state"])
    return {name: x.to(device, torch.float32 if name == "state" else dtype) for name, x in given.items()}


def results(given: Inputs, backend: Any, **rule: Any) -> Inputs:
    """o, the state after, and the gradients of both by all that is given."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    o, after = delta_attention_extend(**leaves, backend=backend, **rule)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in (o, after)]
    grads = torch.autograd.grad((o, after), list(leaves.values()), weights)
    return {"o": o.detach(), "after": after.detach()} | {f"d {n}": x for n, x in zip(leaves, grads, strict=True)}


def assert_matches(given: Inputs, **rule: Any) -> None:
    """The kernels against the chunked path in fp64, values and all gradients. beta up to 2 carries errors on."""
    got = results(given, "triton", **rule)
    exact = {name: x.double() for name, x in given.items()}
    want = results(exact, "chunked", **rule)
    moved = {name: changed(x, given["q"].dtype) for name, x in exact.items()}
    moved = results(moved | {"beta": moved["beta"].clamp(max=2)}, "chunked", **rule)
    assert_small_change(got.values(), want.values(), moved.values(), got, given["q"].dtype)
