"""What the tests of operators share."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _faster_interpreter() -> Iterator[None]:
    """Triton's interpreter in about a quarter of its time, with the same results. Six things are left out:

    - It puts its own functions into triton.language at every call of every function of a kernel; the first call of a
      launch has done all.
    - It builds and checks the type and the shape of every result anew; equal ones are built once per launch.
    - It compares the shapes of two blocks element by element before it broadcasts them; equal ones need no broadcast.
    - It finds the common type of two operands, and makes a block of a number, for every operation; two operands of one
      type need no common one, and a number's block is built once per launch.
    - It looks up numpy's dtype in a table that it builds for every operation.
    - It computes sums and products of int32 a second time, in int64, to find overflows. The largest number that a
      kernel can compute here is an offset into a tensor of a test, and those have fewer than 2**31 elements.

    And one is mended: the result of a comparison of two numbers stays a bool when it becomes a block. The interpreter
    makes it an int32, and that of Triton 3.9 refuses such masks.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy
    import triton.language
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_language, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[Any]()
    init_type, init_tensor, equal_type = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    broadcast, convert = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
    types, numbers = dict[Any, core.block_type](), dict[Any, Any]()

    @cache
    def modules_of(function: Any) -> frozenset[str]:
        return frozenset(x.__name__ for x in function.__globals__.values() if x in (triton.language, core))

    def once(function: Any) -> Any:
        if modules_of(function) not in patched:
            patched.add(modules_of(function))
            return patch_language(function)
        return None

    def fresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        types.clear()
        numbers.clear()
        return launch(self, *args, **kwargs)

    def find_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if known := types.get((id(element_ty), sizes)):  # which holds element_ty, so that no other gets its id
            self.__dict__.update(known.__dict__)
        else:
            init_type(self, element_ty, shape)
            self.of_tensors = {}
            types[id(element_ty), sizes] = self

    def find_shape(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.setdefault("of_tensors", {})  # equal types share it
        if not known:
            init_tensor(self, handle, type)
            known.update(self.__dict__)
        self.__dict__.update(known)
        self.handle = handle

    def kind_of(x: Any) -> Any:
        """What all types of this block's elements and shape share; None of a number."""
        return x.type.__dict__.get("of_tensors")

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = (x.type.shape.values if x.type.is_block() else None for x in (lhs, rhs))
        return (lhs, rhs) if left == right else broadcast(self, lhs, rhs)

    def convert_unequal(self: Any, lhs: Any, rhs: Any, *options: bool) -> Any:
        if not isinstance(lhs, core.tensor):
            return convert(self, lhs, rhs, *options)
        if isinstance(rhs, core.tensor):
            same = lhs.type is rhs.type or kind_of(lhs) is kind_of(rhs) is not None
            return (lhs, rhs) if same and options in ((), (True, True)) else convert(self, lhs, rhs, *options)
        key = (id(kind_of(lhs) or lhs.type), type(rhs), repr(rhs), options)  # -0.0 equals 0.0
        if key not in numbers:
            made = convert(self, lhs, rhs, *options)
            if made[0] is not lhs:
                return made
            numbers[key] = made[1]
        return lhs, numbers[key]

    def splat_bool(self: Any, kind: Any, value: Any) -> Any:
        block = splat(self, kind, value)
        if value.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    builder, find_dtype = interpreter.interpreter_builder, cache(interpreter._get_np_dtype)

    splat = type(builder).create_splat

    def dtype_of(kind: Any) -> numpy.dtype[Any]:
        return numpy.dtype(numpy.uint64) if kind.scalar.is_ptr() else find_dtype(kind.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter.GridExecutor, "__call__", fresh)
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        patch.setattr(core.block_type, "__init__", find_type)
        patch.setattr(core.tensor, "__init__", find_shape)
        patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal_type(self, other))
        patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unequal)
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", convert_unequal)
        patch.setattr(type(builder), "create_splat", splat_bool)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def _every_address_is_given(_faster_interpreter: None) -> Iterator[None]:
    """In the interpreter, a kernel that reads or writes outside of the tensors it is given is an error."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy
    import torch
    from triton.runtime import interpreter

    builder, launch = type(interpreter.interpreter_builder), interpreter.GridExecutor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store
    begins, ends = numpy.empty(0, numpy.uint64), numpy.empty(0, numpy.uint64)

    def given(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal begins, ends
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor) and x.numel()]
        extents = [1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in tensors]
        ranges = sorted((x.data_ptr(), x.data_ptr() + n * x.itemsize) for x, n in zip(tensors, extents, strict=True))
        begins, ends = numpy.array(ranges or [(0, 0)], numpy.uint64).T
        ends = numpy.maximum.accumulate(ends)  # views of one tensor overlap
        return launch(self, *args, **options)

    def check(pointers: Any, mask: Any) -> None:
        addresses, size = pointers.data[mask.data], pointers.get_element_ty().primitive_bitwidth // 8
        at = numpy.searchsorted(begins, addresses, "right")
        inside = (at > 0) & (addresses + numpy.uint64(size) <= ends[at - 1])
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses are in no tensor of the kernel"

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", given)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield


@pytest.fixture(autouse=True)
def _every_call_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, each operator compares each of its results with plain torch, and a wrong one is an error."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from rebased.ops import self_check
    from rebased.ops.kernel_launch import Launch

    launch = Launch.__call__

    def note(self: Any, *args: Any, overwrites: Any = ()) -> None:
        before = {x.data_ptr(): x.clone() for x in overwrites}
        launch(self, *args)
        if not args[0].is_meta:
            self_check.note_first_launch(getattr(self.kernel, "__name__", "?"), None, lambda: None, before)

    monkeypatch.setattr(Launch, "__call__", note)
    monkeypatch.setattr(self_check, "find_verdict", lambda key: None)
    monkeypatch.setattr(self_check, "keep_verdict", lambda *_: None)
    monkeypatch.setenv("REBASED_SELF_CHECK", "strict")


@pytest.fixture
def kernel_launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """To be called with modules: operators then take CPU tensors as a GPU's, and what the kernels of these modules
    would be launched with is appended to the list that it returns. Nothing runs."""
    from benchmarks.launches import kernels_of, record_launches

    from rebased.ops import backend

    def record(*modules: Any) -> list[dict[str, Any]]:
        launches: list[dict[str, Any]] = []
        for module in modules:
            for name, kernel in kernels_of(module).items():
                monkeypatch.setattr(module, name, record_launches(kernel, launches))
        monkeypatch.setattr(backend, "triton_interpreted", lambda: True)
        return launches

    return record


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
