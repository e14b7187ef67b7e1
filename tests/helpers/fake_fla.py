"""A stand-in for flash-linear-attention: its modules, its rounding, and the points where a backend is registered."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

Registration = Literal["global", "local", "none"]
"""fla.ops.backends with dispatch(operation), as from 0.4.2 to 0.5.1; fla.backends with registry.dispatch, as in 0.6.0;
none, as up to 0.4.1."""


def rounded_rebased(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-5) -> Tensor:
    """[B,T,H,V], rounded where its kernels round: numerator and sum of similarities leave in the dtype of q."""
    numerator, z = _Sums.apply(*(x.transpose(1, 2) for x in (q, k, v)), q.shape[-1] ** -0.5)
    return (numerator / (z.unsqueeze(-1) + eps)).transpose(1, 2)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        weights = ((q * scale).float() @ k.float().mT).square().tril()
        return (weights.to(q.dtype).float() @ v.float()).to(q.dtype), weights.sum(-1).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dz: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        s = (q * ctx.scale).float() @ k.float().mT
        ds = do.float() @ v.float().mT + dz.float().unsqueeze(-1)
        pairs = (2 * ctx.scale * ds * s).tril().to(q.dtype).float()
        dv = s.square().tril().to(q.dtype).float().mT @ do.float()
        return (pairs @ k.float()).to(q.dtype), (pairs.mT @ q.float()).to(q.dtype), dv.to(q.dtype), None


class BaseBackend:
    backend_type: ClassVar[str] = "base"
    package_name: ClassVar[str | None] = None
    env_var: ClassVar[str | None] = None
    priority: ClassVar[int] = 5

    def verify(self, name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        verifier = getattr(self, f"{name}_verifier", None)
        return (True, None) if verifier is None else verifier(*args, **kwargs)


class BackendRegistry:
    _registries: ClassVar[dict[str, Any]] = {}

    def __init__(self, operation_name: str) -> None:
        self._backends: dict[str, BaseBackend] = {}
        BackendRegistry._registries[operation_name] = self

    def register(self, backend: BaseBackend) -> None:
        self._backends[backend.backend_type] = backend


def _choose(registry: Callable[[], BackendRegistry | None], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        for backend in getattr(registry(), "_backends", {}).values():
            enabled = backend.env_var is None or os.environ.get(backend.env_var, "1") != "0"
            if enabled and backend.verify(function.__name__, *args, **kwargs)[0]:
                return getattr(backend, function.__name__)(*args, **kwargs)
        return function(*args, **kwargs)

    return chosen


class LocalRegistry(BackendRegistry):
    def dispatch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _choose(lambda: self, function)


def dispatch(operation: str) -> Callable[..., Any]:
    return lambda function: _choose(lambda: BackendRegistry._registries.get(operation), function)


def install(monkeypatch: pytest.MonkeyPatch, registration: Registration = "local") -> ModuleType:
    """Put the modules where `import fla` finds them; returns fla.ops.rebased."""

    def parallel_rebased(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-5, **_: Any) -> Tensor:
        return rounded_rebased(q, k, v, eps)

    contents: dict[str, dict[str, Any]] = {
        "fla": {"__version__": "0.6.0"},
        "fla.ops": {},
        "fla.layers": {},
        "fla.ops.rebased": {"parallel_rebased": parallel_rebased},
        "fla.layers.rebased": {"parallel_rebased": parallel_rebased},
    }
    if registration == "global":
        points = {"BaseBackend": BaseBackend, "BackendRegistry": BackendRegistry, "dispatch": dispatch}
        contents["fla.ops.backends"] = points
    elif registration == "local":
        contents["fla.backends"] = {"BaseBackend": BaseBackend, "BackendRegistry": LocalRegistry}
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["fla.ops.rebased"]
