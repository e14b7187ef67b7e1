"""Inputs for the selective scan, and the comparison of a path with the loop in fp64: values and all gradients."""

import torch
from torch import Tensor

from rebased.ops import Backend, selective_scan_extend
from tolerances import assert_near, in_chunks, limit

NAMES = ("x", "dt", "A", "B", "C", "skip", "state")
OPTIONS = ("dt_bias", "gate")


def scan_inputs(
    batch: int,
    T: int,
    D: int,
    N: int,
    *,
    options: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """`options`: those of OPTIONS that are given."""
    tokens = {name: torch.randn(batch, T, width) for name, width in (("x", D), ("dt", D), ("B", N), ("C", N))}
    if "dt_bias" not in options:
        tokens["dt"] = 0.5 * torch.nn.functional.softplus(tokens["dt"])
    if "gate" in options:
        tokens["gate"] = torch.randn(batch, T, D)
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # parameters and states are never half
    fixed = {"A": -4 * torch.rand(D, N) - 0.01, "skip": torch.randn(D), "state": torch.randn(batch, D, N)}
    inputs = {name: value.to(dtype) for name, value in tokens.items()}
    inputs |= {name: value.to(exact) for name, value in fixed.items()}
    if "dt_bias" in options:
        inputs["dt_bias"] = (torch.randn(D) - 1).to(exact)
    return {name: inputs[name].to(device) for name in (*NAMES, *options)}


def scan(inputs: dict[str, Tensor], backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """selective_scan_extend of these inputs. The gate is half of a larger tensor, as in Mamba."""
    options = {name: inputs[name] for name in OPTIONS if name in inputs}
    if "gate" in options:
        options["gate"] = torch.cat([inputs["x"].detach(), options["gate"]], -1).chunk(2, -1)[1]
    return selective_scan_extend(*(inputs[name] for name in NAMES), **options, backend=backend)


def run(inputs: dict[str, Tensor], weights: tuple[Tensor, Tensor], backend: Backend) -> dict[str, Tensor]:
    """y, the state after, and the gradient of every input under these weights of both."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    y, state = scan(leaves, backend)
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
    options = [name for name in OPTIONS if name in inputs]
    lengths = inputs["A"].shape[1], *in_chunks(batch * T), *[1 for _ in options]  # states of a channel, tokens
    roundings = 2 + ("gate" in options)
    for name, value in expected.items():  # decays are exp(dt A), and exponents of about -2 are rounded first
        assert_near(actual[name], value, *lengths, condition=2, roundings=roundings, size=1.0, name=name, dtype=x.dtype)


def assert_step_sizes(device: str) -> None:
    """Every step size softplus(dt + bias) and every slope is right to a few roundings of itself, not of the largest.

    exp(x) of a rounded x is off by |x| u: the errors of the numbers and their condition, 1 + |x|.
    """
    from rebased.ops.scan.elementwise_gpu import step_size

    x = torch.linspace(-80, 80, 6 * 641, device=device).reshape(2, 641, 3)
    for dt in (x, x.clamp(-1, 1) * 1e-3, x.sign() * 1e-30):
        results = []
        for compute in (step_size, lambda a, b: torch.nn.functional.softplus(a.double() + b.double())):
            leaves = [dt.clone().requires_grad_(), torch.tensor([0.0, 0.25, -0.5], device=device, requires_grad=True)]
            step = compute(*leaves)
            results.append([step.detach(), torch.autograd.grad(step.sum(), leaves[0])[0]])
        allowed = limit(torch.float32, 1) * (1 + dt.double().abs())
        for actual, expected in zip(*results, strict=True):
            assert ((actual.double() - expected).abs() <= allowed * expected.abs() + 1e-38).all()
