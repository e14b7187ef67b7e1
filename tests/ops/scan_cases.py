"""Inputs for the selective scan, and the comparison of a path with the loop in fp64: values and all gradients."""

import torch
from torch import Tensor

from rebased.ops import Backend, selective_scan_extend
from tolerances import assert_near, in_chunks

NAMES = ("x", "dt", "A", "B", "C", "skip", "state")


def scan_inputs(
    batch: int, T: int, D: int, N: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    tokens = {name: torch.randn(batch, T, width) for name, width in (("x", D), ("dt", D), ("B", N), ("C", N))}
    tokens["dt"] = 0.5 * torch.nn.functional.softplus(tokens["dt"])
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # parameters and states are never half
    fixed = {"A": -4 * torch.rand(D, N) - 0.01, "skip": torch.randn(D), "state": torch.randn(batch, D, N)}
    inputs = {name: value.to(dtype) for name, value in tokens.items()}
    inputs |= {name: value.to(exact) for name, value in fixed.items()}
    return {name: inputs[name].to(device) for name in NAMES}


def run(inputs: dict[str, Tensor], weights: tuple[Tensor, Tensor], backend: Backend) -> dict[str, Tensor]:
    """y, the state after, and the gradient of every input under these weights of both."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    y, state = selective_scan_extend(*leaves.values(), backend=backend)
    loss = (y * weights[0].to(y.dtype)).sum() + (state * weights[1].to(state.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {"y": y.detach(), "state after": state.detach()}
    return results | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def assert_gradients_match(inputs: dict[str, Tensor], backend: Backend, law: Backend = "reference") -> None:
    """`law`: the path that is held to be right, in fp64. The loop, unless the sequence is too long for one."""
    x, state = inputs["x"], inputs["state"]
    weights = torch.randn(x.shape, device=x.device).to(x.dtype), torch.randn(state.shape, device=x.device)
    actual = run(inputs, weights, backend)
    expected = run({name: value.double() for name, value in inputs.items()}, weights, law)
    batch, T, _ = x.shape
    lengths = inputs["A"].shape[1], *in_chunks(batch * T)  # states of a channel, tokens
    for name, value in expected.items():  # decays are exp(dt A), and exponents of about -2 are rounded first
        assert_near(actual[name], value, *lengths, condition=2, roundings=2, size=1.0, name=name, dtype=x.dtype)
