"""What the tests of operators share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once_a_launch() -> Iterator[None]:
    """Triton's interpreter puts its own functions into triton.language at every call of every function of a kernel,
    where the first in a launch has done all: a quarter of the time of these tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_language, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[Any]()

    def once(function: Any) -> Any:
        if function not in patched:
            patched.add(function)
            return patch_language(function)
        return None

    def fresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter.GridExecutor, "__call__", fresh)
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills whatever torch.empty hands out with NaN: a number no kernel wrote is seen."""
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def poisoned_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the buffers of polynomial attention's kernels, in the interpreter."""
    import torch
    from torch import Tensor

    from rebased.ops.backend import triton_interpreted
    from rebased.ops.polynomial.gpu import launch

    assert triton_interpreted()

    def nan(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, float("nan"), device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(launch, "_empty", nan)
    monkeypatch.setattr(launch, "_like", lambda x: nan(*x.shape, like=x))


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets chunk length (None: quadratic) and tiles. The interpreter is fast with few, large tiles."""
    from rebased.ops.polynomial.gpu import call, launch
    from rebased.ops.polynomial.gpu.plan import Plan, Tile, Tiles

    def fix(chunk: int | None, rows: int = 64, step: int = 64) -> None:
        tile = Tile(rows, step, warps=4, stages=1)

        def plan(*_: int, has_state: bool, **__: bool) -> Plan:
            return Plan(chunk or (rows if has_state else None), Tiles(*[tile] * 5))

        monkeypatch.setattr(call, "make_plan", plan)
        monkeypatch.setitem(launch.TOTALS, "SPAN", 1024)
        call.make_call.cache_clear()

    yield fix
    call.make_call.cache_clear()
