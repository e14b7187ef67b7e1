"""What a call launches on a GPU, without one: for benchmarks and tests of the compiler."""

from contextlib import ExitStack
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from rebased.kernels.verify_cases import Regime, forced
from rebased.ops import Coefficients, poly_attention, poly_attention_at, poly_attention_extend
from rebased.ops.polynomial.state import init_poly_state

HEADS = 12


def record_launches(kernel: Any, launches: list[dict[str, Any]]) -> Any:
    """A stand-in for a Triton kernel. It appends to `launches` what it is launched with (of tensors only the dtype)."""

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                options = {
                    key: kwargs.pop(key) for key in ("num_warps", "num_stages", "maxnreg", "debug") if key in kwargs
                }
                args = tuple(x.new_empty(0) if isinstance(x, torch.Tensor) else x for x in args)
                values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
                launches.append({"kernel": kernel, "values": values, "options": options})

            return launch

    return Recorder()


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
