"""Inputs for WKV, its formula as one double sum, and the comparison of a path with it in fp64."""

from collections.abc import Callable

import torch
from torch import Tensor

from rebased.ops import Backend, WKVState, wkv_extend
from tolerances import assert_near

Path = Callable[..., tuple[Tensor, Tensor, Tensor]]


def wkv_inputs(
    batch: int, T: int, D: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", spread: float = 3.0
) -> dict[str, Tensor]:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "k": (spread * torch.randn(batch, T, D)).to(dtype),
        "v": torch.randn(batch, T, D).to(dtype),
        "w": torch.linspace(-6, 4, D).to(exact),
        "u": torch.randn(D).to(exact),
        "num": torch.randn(batch, D).to(exact),
        "den": torch.rand(batch, D).to(exact) + 0.5,
    }
    return {name: value.to(device) for name, value in inputs.items()}


def by_path(backend: Backend) -> Path:
    """y and the sums after, in units of their own: num / den, and log den. The state before has its max at 0.3."""

    def path(k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor, den: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, after = wkv_extend(k, v, w, u, WKVState(num, den, torch.full_like(num, 0.3)), backend=backend)
        return y, after.num / after.den, after.max + torch.log(after.den)

    return path


def by_double_sum(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor, den: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula: for each t the weights of all i <= t, written out. The state is one more token before the first."""
    T, rate = k.shape[1], torch.exp(w)
    keys = torch.cat([(0.3 + torch.log(den)).unsqueeze(1), k], dim=1)
    values = torch.cat([(num / den).unsqueeze(1), v], dim=1)
    age = torch.arange(T + 1, device=k.device)
    outputs = []
    for t in range(1, T + 1):
        past = keys[:, :t] - (t - 1 - age[:t]).unsqueeze(-1) * rate
        weights = torch.softmax(torch.cat([past, (u + keys[:, t]).unsqueeze(1)], dim=1), dim=1)
        outputs.append((weights * values[:, : t + 1]).sum(1))
    last = keys - (T - age).unsqueeze(-1) * rate
    mean = (torch.softmax(last, dim=1) * values).sum(1)
    return torch.stack(outputs, dim=1), mean, torch.logsumexp(last, dim=1)


def assert_matches(inputs: dict[str, Tensor], path: Path, law: Path = by_double_sum) -> None:
    """Values and all gradients of `path` against `law` in fp64."""
    k = inputs["k"]
    weights = [torch.randn(k.shape, device=k.device).to(k.dtype), *(torch.randn_like(inputs["num"]) for _ in range(2))]

    def run(each: Path, values: dict[str, Tensor]) -> list[Tensor]:
        leaves = [value.detach().clone().requires_grad_() for value in values.values()]
        outputs = each(*leaves)
        loss = sum((o * weight.to(o.dtype)).sum() for o, weight in zip(outputs, weights, strict=True))
        return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves)]

    actual = run(path, inputs)
    expected = run(law, {name: value.double() for name, value in inputs.items()})
    remembered = min(k.shape[1], 400)  # tokens: the slowest rate is e^-6 per token
    exponent = max(1.0, float(k.abs().max()))  # exp(x) is off by x u where x is rounded
    for name, a, e in zip(["y", "mean", "log den", *inputs], actual, expected, strict=True):
        assert_near(a, e, remembered, condition=exponent, roundings=2, size=1.0, name=name, dtype=k.dtype)
