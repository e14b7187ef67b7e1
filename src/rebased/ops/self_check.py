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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
from rebased.ops.comparison import FP32, Errors, compare_calls, leaves_of, plain_torch, replace_tensors, tensors_of

_VERSION = 2  # of what is compared and how: another number makes old verdicts void
_LARGEST_FILE = 2**16

_log = logging.getLogger("rebased")
_verdicts: dict[str, bool] = {}


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


def verdict_key(operator: str, args: tuple[Any, ...], codes: Iterable[str]) -> str:
    """The name of a verdict. It holds the size as a power of two: longer data take other paths through the code."""
    extent = [size.bit_length() for x in tensors_of(args)[:1] for size in x.shape]
    said = [_VERSION, operator, extent, sorted(codes), machine()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def find_verdict(key: str) -> bool | None:
    """True for right kernels, False for wrong ones; None if they were not judged."""
    if key not in _verdicts:
        try:
            found = unseal(read_json(cache_folder() / "kernels" / f"{key}.json", _LARGEST_FILE))
            _verdicts[key] = bool(found["right"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or none that can be used
            return None
    return _verdicts[key]


def keep_verdict(key: str, right: bool, operator: str, kernels: Iterable[str], errors: Errors) -> None:
    """Keeps it for this process and, if the folder can be written, for later ones."""
    _verdicts[key] = right
    worst = {name: error if error < 1e30 else "inf" for name, error in errors.items()}
    verdict = seal({"right": right, "operator": operator, "kernels": sorted(kernels), "errors": worst, **machine()})
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{key}.json") as file:
            file.write(json.dumps(verdict).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _log.debug("a verdict on kernels is not kept: %s", error)


TRIES = 8
"""How often kernels are tried to be judged where that is not possible."""
Mode = Literal["on", "off", "strict"]


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

    in_torch: the same function in plain torch, for any float dtype. It decides what is right, and replaces wrong
        kernels.
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
        key = verdict_key(self.name, args, (each.code for each in fresh))
        right = find_verdict(key)
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
            keep_verdict(key, right, self.name, (each.kernel for each in fresh), errors)
            took = time.perf_counter() - begin
            _tell(Judged(self.name, tuple(each.kernel for each in fresh), errors, right, took))
        if right:
            return result
        wrong = {name: error for name, error in (errors or {}).items() if error > 1}
        off = ", ".join(f"{name} by {error:.2g} times its tolerance" for name, error in wrong.items())
        problem = f"{kernels} ({self.name}) computes wrong numbers here{': ' + off if off else ''}"
        for each in fresh:
            each.forget()
            for x in tensors_of(args):
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
        with plain_torch():
            return replace_tensors(self.in_torch(*args), lambda x: x.clone(memory_format=torch.contiguous_format))

    def errors(self, args: tuple[Any, ...], result: Any, before: dict[int, Tensor]) -> Errors | None:
        """How wrong a result is; None if the arguments are not finite. before: of overwritten ones, by address."""
        if has_gpu():
            torch.cuda.synchronize()
        given = replace_tensors(args, lambda x: before.get(x.data_ptr(), x))
        overwritten = [number for number, x in enumerate(tensors_of(args)) if x.data_ptr() in before]
        floats = [x for x in tensors_of(self.inputs(*given) if self.inputs else given) if x.is_floating_point()]
        with plain_torch():
            if not all(bool(x.isfinite().all()) for x in floats):
                return None
            after = [tensors_of(args)[number] for number in overwritten]
            if self.compare is not None:
                return self.compare(given, result, after) if after else self.compare(given, result)
            results = tensors_of(result) + after
            return self._compare_with_torch(given, results, overwritten)

    def _compare_with_torch(self, args: tuple[Any, ...], results: list[Tensor], overwritten: list[int]) -> Errors:
        def in_torch(*given: Any) -> list[Tensor]:
            return tensors_of(self.in_torch(*given)) + [tensors_of(given)[number] for number in overwritten]

        slices = self.slices or (lambda *both: iter([self.sample(*both) if self.sample else both]))
        return compare_calls(in_torch, slices(args, results), results, self.roundoff(*args))


_WAY_AROUND = "REBASED_BACKEND=chunked computes without kernels"


def _kind(args: Any) -> tuple[Any, ...]:
    """All of a call but its numbers."""
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves_of(args))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _code_of(compiled: Any) -> str:
    made = getattr(compiled, "asm", {})
    code = made["cubin"] if "cubin" in made else repr(getattr(compiled, "hash", compiled)).encode()
    return hashlib.sha256(code).hexdigest()
