"""What a call of polynomial attention launches on a GPU, without one: for tests, benchmarks and compiler checks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from math import inf
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch

from rebased.kernels.machine_code import record_launches
from rebased.ops.polynomial.api import poly_attention, poly_attention_at, poly_attention_extend
from rebased.ops.polynomial.gpu import plan
from rebased.ops.polynomial.gpu.call import make_call
from rebased.ops.polynomial.state import Coefficients, init_poly_state

Regime = Literal["quadratic", "chunked"]
REGIMES: tuple[Regime, ...] = ("quadratic", "chunked")
HEADS = 12


@contextmanager
def forced(regime: Regime) -> Iterator[None]:
    """Within the block all calls take one regime, backward passes included, whatever the cost model would choose.

    The tiles are those that the plan has for this regime. A call with a state is always chunked.
    """
    cost = plan.chunked_cost
    plan.chunked_cost = lambda *_: inf if regime == "quadratic" else 0.0
    make_call.cache_clear()  # no plan of before or of this block is taken for the other
    try:
        yield
    finally:
        plan.chunked_cost = cost
        make_call.cache_clear()


class Call(NamedTuple):
    """A call of polynomial attention."""

    dtype: torch.dtype
    K: int
    V: int
    T: int
    coefficients: Coefficients
    regime: Regime
    kind: str = "plain"  # packed: with cu_seqlens; extend: with a state in and out; at: every fourth query alone
    gradients: bool = True
    gated: bool = False


def gpu_modules() -> list[ModuleType]:
    """The modules of the GPU path."""
    package = import_module("rebased.ops.polynomial.gpu")
    return [import_module(f"{package.__name__}.{module.name}") for module in iter_modules(package.__path__)]


def kernels_of(module: ModuleType) -> dict[str, Any]:
    """The Triton kernels of a module, by name."""
    return {name: value for name, value in vars(module).items() if name.endswith("_kernel")}


def launches_of(call: Call) -> list[dict[str, Any]]:
    """The launches of a call and its backward pass. Nothing runs."""
    launches: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(forced(call.regime))
        for module in gpu_modules():
            for name, kernel in kernels_of(module).items():
                stack.enter_context(patch.object(module, name, record_launches(kernel, launches)))
            if hasattr(module, "triton_interpreted"):  # so that CPU tensors get this far
                stack.enter_context(patch.object(module, "triton_interpreted", lambda: True))
        c = call.coefficients
        q, k, v = (
            torch.zeros(1, call.T, HEADS, w, dtype=call.dtype, requires_grad=call.gradients)
            for w in (call.K, call.K, call.V)
        )
        g = torch.zeros(1, call.T, HEADS, requires_grad=call.gradients) if call.gated else None
        if call.kind == "extend":
            state = init_poly_state(1, HEADS, call.K, call.V, c)
            o, after = poly_attention_extend(q, k, v, state, coefficients=c, log_decay=g, backend="triton")
            loss = o.sum() + after.kv.sum() + after.z.sum()
        elif call.kind == "at":
            positions = torch.arange(0, call.T, 4)
            loss = poly_attention_at(q[:, positions], k, v, positions[None], coefficients=c, backend="triton").sum()
        else:
            cu_seqlens = torch.tensor([0, 5, call.T], dtype=torch.int32) if call.kind == "packed" else None
            options: dict[str, Any] = {"coefficients": c, "cu_seqlens": cu_seqlens, "backend": "triton"}
            loss = poly_attention(q, k, v, **options, log_decay=g).sum()
        if call.gradients:
            loss.backward()
    return launches
