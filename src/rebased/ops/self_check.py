"""The first result of every newly compiled kernel is compared with plain torch before it is handed out.

A compiler may turn a right kernel into wrong numbers, without an error: it depends on tiles, widths, versions and the
GPU, so no test on another machine can exclude it. `checked` makes an operator judge its own kernels: when a call has
launched a kernel for the first time, some of its numbers are computed again, on the same data, in plain torch and fp64.
If they differ by more than rounding allows, the call is computed again by tiles that are declared safe, then by torch,
and so are later calls of this kind.

A verdict belongs to an operator and the set of compiled kernels of a call. It is kept in a folder, by a hash of the
machine code and of all that runs it: the GPU, its driver, torch, Triton. So it is found once per machine, not once per
process.

    REBASED_SELF_CHECK=on|off|strict    strict: a wrong kernel is an error
    REBASED_CACHE=FOLDER                where verdicts are kept; default: rebased in the user's cache folder
"""

import hashlib
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from rebased.files import read_json, replacing, seal, unseal
from rebased.ops.backend import has_gpu

FP32, RECURRENT = 2.0**-19, 2.0**-16
"""How exact sums in fp32 are taken to be: 32 roundings of 2^-24, in whatever order; 256 where each token rounds the
state of the one before."""
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}
"""How exact a factor of the tensor cores is, by the dtype of the data; TF32 drops bits instead of rounding them."""
MARGIN = 8.0
"""An error is at most so many times what a change of the inputs by one roundoff makes of the result."""
TRIES = 8
"""How often kernels are tried to be judged where that is not possible."""
_VERSION = 1  # of what is compared and how: another number makes old verdicts void
_LARGEST_FILE = 2**16

Mode = Literal["on", "off", "strict"]
Errors = dict[str, float]
"""The largest error of each result, over its tolerance: above 1 is wrong."""
_log = logging.getLogger("rebased")
_draw = random.Random(0)  # of our own: what a user draws stays as it is


class KernelError(RuntimeError):
    """A compiled kernel computes wrong numbers, or ended with an error of the device."""


class Fresh(NamedTuple):
    """A kernel that has just been launched for the first time."""

    kernel: str
    code: str  # a hash of the machine code
    forget: Callable[[], object]  # after it, the next launch is the first again
    before: dict[int, Tensor]  # copies of the tensors that it overwrites, by address


class _Thread(threading.local):
    def __init__(self) -> None:
        self.fresh: list[Fresh] = []


_thread = _Thread()
_verdicts: dict[str, bool] = {}


class Judged(NamedTuple):
    """What a check found."""

    operator: str
    kernels: tuple[str, ...]
    errors: Errors
    right: bool
    seconds: float


class FellBack(NamedTuple):
    """A call that its usual kernels did not compute."""

    operator: str
    to: Literal["safe tiles", "torch"]
    problem: str


_listeners: list[Callable[[Judged | FellBack], object]] = []
OPERATORS: dict[str, "Operator"] = {}
"""By name: all that were imported."""


@contextmanager
def listening() -> Iterator[list[Judged | FellBack]]:
    """A context manager: a list to which every check, and every call that falls back, is added inside of it."""
    heard: list[Judged | FellBack] = []
    _listeners.append(heard.append)
    try:
        yield heard
    finally:
        _listeners.remove(heard.append)


def _tell(event: Judged | FellBack) -> None:
    for listen in _listeners:
        listen(event)


def mode() -> Mode:
    """What REBASED_SELF_CHECK says; "on" by default. Raises ValueError if it is none of the three."""
    chosen = os.environ.get("REBASED_SELF_CHECK", "on")
    if chosen not in ("on", "off", "strict"):
        raise ValueError(f"REBASED_SELF_CHECK={chosen}: choose on, off or strict")
    return chosen  # type: ignore[return-value]


def when_to_check(kernel: str) -> Literal["now", "later", "never"]:
    """When a kernel that is about to be launched for the first time is to be checked.

    "later": a CUDA graph is being captured, and nothing can be computed. The next launch must count as the first again.
    """
    chosen = mode()
    if chosen == "off":
        return "never"
    if not torch.cuda.is_current_stream_capturing():
        return "now"
    if chosen == "strict":
        raise KernelError(f"{kernel} is first launched while a CUDA graph is captured: call the operator once before")
    return "later"


def note_first_launch(kernel: str, compiled: Any, forget: Callable[[], object], before: dict[int, Tensor]) -> None:
    """To be called after the first launch of a kernel: the operator that launched it will judge it."""
    _thread.fresh.append(Fresh(kernel, _code_of(compiled), forget, before))


def checked(
    in_torch: Callable[..., Any],
    *,
    sample: Callable[..., tuple[Any, Any]] | None = None,
    slices: Callable[..., Iterator[tuple[Any, Any]]] | None = None,
    compare: Callable[..., Errors | None] | None = None,
    roundoff: Callable[..., float] | None = None,
    safer: Callable[..., bool] | None = None,
    inputs: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for functions that launch kernels: their first results are checked as this module says.

    in_torch: the same function in plain torch, for any float dtype. It decides what is right, and replaces
        wrong kernels.
    sample: (arguments, results) -> a smaller call, and the parts of the results that it gives. Default: everything.
        Arguments are as before the call. Results are tensors in a list, with overwritten arguments at its end.
    slices: (arguments, results) -> such smaller calls, which together are the whole call; each with its parts of the
        first results. The results after these are sums over all slices.
    compare: (arguments, result) -> Errors, where no comparison of that kind can be used; None if there is none now. If
        arguments were overwritten, it gets a third list: what they are after the call.
    roundoff: (arguments) -> how exact the factors of products are; FP32 by default.
    safer: (arguments) -> True if further calls like this one will be computed with other, safe tiles.
    inputs: (arguments) -> those that must be finite for a comparison; default: all. Buffers of kernels need not be.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        operator = Operator(run, in_torch, sample, slices, compare, roundoff, safer, inputs)

        @wraps(run)
        def call(*args: Any) -> Any:
            if operator.demoted and _kind(args) in operator.demoted:
                _tell(FellBack(operator.name, "torch", "its kernels were found wrong before"))
                return operator.plainly(args)
            try:
                result = run(*args)
            except (TritonError, RuntimeError) as error:
                _thread.fresh = []
                if not (isinstance(error, TritonError) or "PassManager" in str(error)):  # not from the compiler
                    raise
                return operator.without(args, error)
            except BaseException:
                _thread.fresh = []
                raise
            return operator.judge(args, result) if _thread.fresh else result

        operator.call = call
        return call

    return decorate


class Operator:
    """A function that launches kernels, and what is known of it."""

    def __init__(
        self, run: Any, in_torch: Any, sample: Any, slices: Any, compare: Any, roundoff: Any, safer: Any, inputs: Any
    ) -> None:
        self.run, self.in_torch, self.sample, self.slices, self.safer = run, in_torch, sample, slices, safer
        self.compare, self.inputs = compare, inputs
        self.roundoff = roundoff or (lambda *_: FP32)
        self.name = f"{run.__module__.removeprefix('rebased.ops.')}.{run.__name__.strip('_')}"
        self.demoted: set[Any] = set()  # kinds of calls that torch computes
        self.unjudged: dict[str, int] = {}  # how often each set of kernels could not be judged
        OPERATORS[self.name] = self
        self.call: Callable[..., Any] = run

    def judge(self, args: tuple[Any, ...], result: Any) -> Any:
        """The result, if the kernels that made it are right; else that of safer ones."""
        fresh, _thread.fresh = _thread.fresh, []
        kernels = ", ".join(each.kernel for each in fresh)
        key = _key(self.name, args, fresh)
        right = _find_verdict(key)
        errors: Errors | None = None
        if right is None:
            before = {address: copy for each in fresh for address, copy in each.before.items()}
            begin = time.perf_counter()
            try:
                errors = self.errors(args, result, before)
            except torch.OutOfMemoryError:
                errors = None
            except RuntimeError as error:
                if "CUDA error" not in str(error):
                    raise
                raise KernelError(f"{_first_line(error)} — in {kernels}, or before. {_WAY_AROUND}") from error
            if errors is None:  # a NaN in the data, or no memory left: the next call is checked, but not for ever
                self.unjudged[key] = self.unjudged.get(key, 0) + 1
                if self.unjudged[key] < TRIES:
                    for each in fresh:
                        each.forget()
                return result
            right = max(errors.values(), default=0.0) <= 1
            _keep_verdict(key, right, self.name, fresh, errors)
            took = time.perf_counter() - begin
            _tell(Judged(self.name, tuple(each.kernel for each in fresh), errors, right, took))
        if right:
            return result
        wrong = {name: error for name, error in (errors or {}).items() if error > 1}
        off = ", ".join(f"{name} by {error:.2g} times its tolerance" for name, error in wrong.items())
        problem = f"{kernels} ({self.name}) computes wrong numbers here{': ' + off if off else ''}"
        for each in fresh:
            each.forget()
            for x in _tensors(args):
                if x.data_ptr() in each.before:
                    x.copy_(each.before[x.data_ptr()])
        return self._again(args, problem)

    def without(self, args: tuple[Any, ...], error: Exception) -> Any:
        """The result of a call whose kernel does not fit this GPU, or does not compile."""
        return self._again(args, f"a kernel of {self.name} cannot be used here: {_first_line(error)}", error)

    def _again(self, args: tuple[Any, ...], problem: str, error: Exception | None = None) -> Any:
        versions = ", ".join(f"{name} {value}" for name, value in machine().items())
        if mode() == "strict":
            raise KernelError(f"{problem}. {_WAY_AROUND} ({versions})") from error
        if self.safer is not None and self.safer(*args):
            _log.warning("%s; other tiles are taken (%s)", problem, versions)
            _tell(FellBack(self.name, "safe tiles", problem))
            return self.call(*args)
        _log.warning("%s; plain torch computes it instead (%s)", problem, versions)
        _tell(FellBack(self.name, "torch", problem))
        self.demoted.add(_kind(args))
        return self.plainly(args)

    def plainly(self, args: tuple[Any, ...]) -> Any:
        """The result in plain torch, laid out as kernels write it: each tensor has memory of its own."""
        with _plain_torch():
            return _replace(self.in_torch(*args), lambda x: x.clone(memory_format=torch.contiguous_format))

    def errors(self, args: tuple[Any, ...], result: Any, before: dict[int, Tensor]) -> Errors | None:
        """How wrong a result is; None if the arguments are not finite. before: of overwritten ones, by address."""
        if has_gpu():
            torch.cuda.synchronize()
        given = _replace(args, lambda x: before.get(x.data_ptr(), x))
        overwritten = [number for number, x in enumerate(_tensors(args)) if x.data_ptr() in before]
        floats = [x for x in _tensors(self.inputs(*given) if self.inputs else given) if x.is_floating_point()]
        with _plain_torch():
            if not all(bool(x.isfinite().all()) for x in floats):
                return None
            after = [_tensors(args)[number] for number in overwritten]
            if self.compare is not None:
                return self.compare(given, result, after) if after else self.compare(given, result)
            results = _tensors(result) + after
            return self._compare_with_torch(given, results, overwritten)

    def _compare_with_torch(self, args: tuple[Any, ...], results: list[Tensor], overwritten: list[int]) -> Errors:
        def in_torch(*given: Any) -> list[Tensor]:
            return _tensors(self.in_torch(*given)) + [_tensors(given)[number] for number in overwritten]

        slices = self.slices or (lambda *both: iter([self.sample(*both) if self.sample else both]))
        return compare_calls(in_torch, slices(args, results), results, self.roundoff(*args))


def compare_calls(
    in_torch: Callable[..., Any],
    calls: Iterable[tuple[Any, Any]],
    results: list[Tensor],
    roundoff: float = FP32,
    terms: Sequence[Tensor | float] = (),
) -> Errors:
    """Errors of kernels' results, each over its tolerance.

    in_torch: what they compute, in plain torch. calls: (arguments, the results' parts that they give). If there are
    fewer parts than results, the others are sums over all calls. The tolerance is MARGIN times what becomes of the
    results in fp64 if all arguments are changed by one roundoff. terms: how large the terms are whose difference the
    first results are, where that difference does not move though its terms do.
    """
    errors: Errors = {}
    sums: list[Tensor] = []

    def compare(number: int, got: Tensor, want: Tensor, moved: Tensor) -> None:
        want, moved = want.double(), moved.double()
        size = FP32 * terms[number] if number < len(terms) else 0.0
        error = relative_to(got, want, MARGIN * (_spread(moved - want) + roundoff * want.abs() + size))
        errors[f"result {number}"] = max(error, errors.get(f"result {number}", 0.0))

    for args, part in calls:
        exact = _replace(args, _double, torch.float64)
        moved = _tensors(in_torch(*_replace(exact, lambda x: _changed(x, roundoff))))
        want, parts = _tensors(in_torch(*exact)), _tensors(part)
        for number, three in enumerate(zip(parts, want, moved, strict=False)):
            compare(number, *three)
        rest = [torch.stack(two) for two in zip(want[len(parts) :], moved[len(parts) :], strict=True)]
        sums = [a + b for a, b in zip(sums, rest, strict=True)] if sums else rest
    first = len(results) - len(sums)
    for number, (got, (total, other)) in enumerate(zip(results[first:], sums, strict=True), first):
        compare(number, got, total, other)
    return errors


def relative_to(got: Tensor, want: Tensor, tolerance: Tensor) -> float:
    """The largest error over its tolerance, to which the rounding to the dtype of `got` is added. Numbers that this
    dtype, or fp32 on the way, cannot hold are not compared."""
    if got.numel() == 0:
        return 0.0
    if not got.is_floating_point():
        return 0.0 if torch.equal(got.double(), want) else float("inf")
    about = torch.finfo(got.dtype)
    tolerance = tolerance + about.eps * want.abs() + max(about.tiny * about.eps, 1e-30)
    counts = (want.abs() < about.max / 2) & (tolerance < 1e30)
    error = torch.where(counts, (got.double() - want).abs() / tolerance, 0)
    return float(error.nan_to_num(nan=float("inf")).max())


def some(count: int, wanted: int, *, every: int = 0) -> list[int]:
    """`wanted` of the numbers below `count`, sorted: the first two, the last two, others at random.

    every: at least one number of each remainder modulo `every`, so that every row of a tile of this size is checked.
    """
    if count <= wanted:
        return list(range(count))
    chosen = {0, 1, count - 2, count - 1}
    for first in range(min(every, wanted - len(chosen))):
        chosen.add(_draw.randrange(first, count, every))
    while len(chosen) < wanted:
        chosen.add(_draw.randrange(count))
    return sorted(chosen)


def pick(x: Any, axis: int, numbers: list[int]) -> Any:
    """x at some places of an axis; None stays None."""
    return None if x is None else x.index_select(axis, torch.tensor(numbers, device=x.device))


def some_channels(args: Any, results: Any, wanted: int = 48, keep: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """The same call for some channels, the last axis of all its tensors but those numbered in `keep`."""
    numbers = some(args[0].shape[-1], wanted)

    def of(x: Any) -> Any:
        if isinstance(x, list):
            return list(map(of, x))
        return pick(x, x.ndim - 1, numbers) if isinstance(x, Tensor) else x

    return tuple(x if index in keep else of(x) for index, x in enumerate(args)), of(list(results))


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """Slices of `rows` rows of so many numbers, a million numbers at a time."""
    step = max(1, 2**20 // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def differentiate(function: Callable[..., Any], inputs: tuple[Tensor | None, ...], *grads: Tensor) -> list[Any]:
    """The gradients of a function's results at its inputs; None for None. All in plain torch."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        made = _tensors(function(*leaves))[: len(grads)]
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(made, wanted, grads, materialize_grads=True))
    return [None if x is None else next(found) for x in leaves]


@cache
def machine() -> dict[str, str]:
    """What a compiled kernel runs on: the GPU, its driver, torch and Triton."""
    found = {"torch": torch.__version__, "triton": triton.__version__}
    if has_gpu():
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = f"{about.name} (sm_{about.major}{about.minor})"
        try:
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        except (OSError, IndexError):  # not Linux
            found["cuda"] = str(torch.version.cuda)
    return found


def cache_folder() -> Path:
    """Where verdicts are kept: REBASED_CACHE, or a folder of the user's cache."""
    if chosen := os.environ.get("REBASED_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rebased"


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Inside, torch records nothing for gradients unless asked, also within an operator of torch.library, and products
    are in the dtype of their factors."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cuda", enabled=False):
        yield


_WAY_AROUND = "REBASED_BACKEND=chunked computes without kernels"


def _kind(args: Any) -> tuple[Any, ...]:
    """All of a call but its numbers."""
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in _leaves(args))


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list):
        for each in x:
            yield from _leaves(each)
    else:
        yield x


def _tensors(x: Any) -> list[Tensor]:
    return [each for each in _leaves(x) if isinstance(each, Tensor)]


def _replace(x: Any, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
    """The same arguments with other tensors and, if given, another dtype where one is an argument."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple | list):
        parts = [_replace(each, change, dtype) for each in x]
        return x._make(parts) if isinstance(x, tuple) and hasattr(x, "_make") else type(x)(parts)
    return dtype if dtype is not None and isinstance(x, torch.dtype) else x


def _double(x: Tensor) -> Tensor:
    """A copy in fp64: what is computed with it may overwrite it."""
    return x.detach().to(torch.float64, copy=True) if x.is_floating_point() else x.clone()


def _changed(x: Tensor, size: float) -> Tensor:
    """x with each number changed by a factor 1 + size or 1 - size."""
    if not x.is_floating_point():
        return x.clone()
    generator = torch.Generator(x.device).manual_seed(0)
    signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device)
    return x * (1 + size * (2 * signs - 1))


def _spread(x: Tensor) -> Tensor:
    """The largest of each row, for all of it: one number by itself may not move."""
    return x.abs().amax(-1, keepdim=True) if x.ndim else x.abs()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _code_of(compiled: Any) -> str:
    made = getattr(compiled, "asm", {})
    code = made["cubin"] if "cubin" in made else repr(getattr(compiled, "hash", compiled)).encode()
    return hashlib.sha256(code).hexdigest()


def _key(operator: str, args: tuple[Any, ...], fresh: list[Fresh]) -> str:
    """The name of a verdict. It holds the size as a power of two: longer data take other paths through the code."""
    extent = [size.bit_length() for x in _tensors(args)[:1] for size in x.shape]
    said = [_VERSION, operator, extent, sorted(each.code for each in fresh), machine()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _find_verdict(key: str) -> bool | None:
    if key not in _verdicts:
        try:
            found = unseal(read_json(cache_folder() / "kernels" / f"{key}.json", _LARGEST_FILE))
            _verdicts[key] = bool(found["right"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or none that can be used
            return None
    return _verdicts[key]


def _keep_verdict(key: str, right: bool, operator: str, fresh: list[Fresh], errors: Errors) -> None:
    _verdicts[key] = right
    kernels = sorted(each.kernel for each in fresh)
    worst = {name: error if error < 1e30 else "inf" for name, error in errors.items()}
    verdict = seal({"right": right, "operator": operator, "kernels": kernels, "errors": worst, **machine()})
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{key}.json") as file:
            file.write(json.dumps(verdict).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _log.debug("a verdict on kernels is not kept: %s", error)
