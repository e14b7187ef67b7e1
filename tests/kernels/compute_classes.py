"""Computes every class of kernel on this machine's GPU and compares it with fp64; writes the record that CI asks for.

    PYTHONPATH=src:tests python -m kernels.compute_classes                      all calls, in 15 processes
    PYTHONPATH=src:tests python -m kernels.compute_classes --only "poly" --calls 50 --record /tmp/some.json

Each call is computed with its gradients, from inputs cut out of buffers of NaN, into memory that was filled with NaN.
Errors are those of whole tensors and of single rows. A call that ends its process is recorded as failed. The machine
code of every kernel with Hopper's products (wgmma) is searched for wrong descriptors.

A record is continued: classes of operators whose kernels are as they were stay, and the others are computed again.
"""

import argparse
import ast
import json
import math
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import classes, operator_calls
from kernels.classes import DTYPES, Call, Launched, classes_of, cut, folder_of, recorded_launches, source_hashes
from kernels.records import COMPUTED
from rebased.kernels.machine_code import read_cubin
from rebased.ops import (
    PolyState,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_attention_extend_,
    poly_state,
)
from rebased.ops.polynomial.gpu import launch as gpu
from tolerances import KERNEL_ERRORS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # with Triton's interpreter, in tests
RECORD = COMPUTED
TF32_ERROR = 2e-3  # as test_fp32_is_exact_until_torch_allows_tf32 has it
ROW = 8.0
"""How much larger than that of a tensor the relative error of one of its rows may be: the largest of thousands of
draws, where that of a tensor is a mean. A row that was not computed is off by 1, which is more in every dtype."""
PAST = 9  # tokens before a state
SECONDS = 240  # after which a call is given up


class Computed(NamedTuple):
    """What came of a call."""

    classes: tuple[str, ...]
    error: float  # the largest over its limit
    problem: str = ""
    read: int = 0  # kernels whose machine code was read
    last: bool = False  # the process ends: it takes no other call


def compute(call: Any) -> Computed:
    """Computes a call, its gradients, and both in fp64."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
    arithmetic = call.arithmetic
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    limit = TF32_ERROR if arithmetic == "tf32" else KERNEL_ERRORS[DTYPES[arithmetic]]
    if not isinstance(call, Call):
        with recorded_launches(run=True) as found:
            got = operator_calls.run(call, DEVICE)
        want = operator_calls.run(call, DEVICE, law=True)
        limits = [limit, *(KERNEL_ERRORS.get(x.dtype, 0) for x in got.values())]
        if arithmetic == "tf32":  # some kernels take fp16, which has as many bits
            limits.append(KERNEL_ERRORS[torch.float16])
        worst = {name: error_over_limit(x, want[name], max(limits)) for name, x in got.items()}
    else:
        worst = {}
        inputs, buffers, floors = make_inputs(call, DEVICE)
        kept = [buffer.clone() for buffer in buffers]
        with recorded_launches(run=True) as found, guarded_outputs() as outputs, classes.taking(call):
            got = run(call, inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(buffers, kept, strict=True)):
            worst["what is around the inputs was overwritten"] = math.inf
        outputs = [(buffer, n) for buffer, n in outputs if not buffer.is_meta]  # else only planned
        if not all(buffer[:n].isnan().all() and buffer[-n:].isnan().all() for buffer, n in outputs):
            worst["what is around the outputs was overwritten"] = math.inf
        del kept, buffers
        want = run(call, exact(inputs), law=True)
        for name, x in got.items():
            worst[name] = error_over_limit(x, want[name], limit, floors.get(name))
    names = tuple(dict.fromkeys(name for launched in found for name in classes_of(launched)))
    read = read_machine_code(found, worst)
    error = max(worst.values())
    problem = "" if error <= 1 else ", ".join(f"{name} {value:.3g}" for name, value in worst.items() if not value <= 1)
    return Computed(names, error if math.isfinite(error) else 1e30, problem, read)


_read: set[str] = set()  # names of compiled kernels whose machine code this process has read


def read_machine_code(launched: Sequence[Launched], worst: dict[str, float]) -> int:
    """How many new kernels with wgmma were launched; those with a wrong descriptor are added to `worst`."""
    count = 0
    for launch, _ in launched:
        for compiled in filter(None, launch._compiled.values()):
            if compiled.hash in _read or "wgmma" not in compiled.asm["ptx"]:
                continue
            _read.add(compiled.hash)
            count += 1
            if read_cubin(compiled.asm["cubin"]).wrong:
                worst[f"a wrong descriptor or address in {compiled.name}"] = math.inf
    return count


def make_inputs(call: Call, device: str) -> tuple[dict[str, Any], list[Tensor], dict[str, Tensor]]:
    """The inputs of a call, the buffers they are cut from, and for o and its gradients the least size of each row.

    Queries and keys are positive, so that no similarity is near zero and no error is divided by one. A row of o, dq, dk
    or dv is then a mean over the t tokens that it sees or is seen by, and about 1 / sqrt(t) of a single term.
    """
    dtype, buffers = DTYPES[call.arithmetic], []

    def allocate(count: int) -> Tensor:
        buffers.append(torch.full((count,), math.nan, device=device, dtype=dtype))
        return buffers[-1]

    q, k, v, do = cut(call, allocate)
    for x in (q, k):
        _fill(x, 0.25 + 1.5 * torch.rand(x.shape, device=device))
    for x in (v, do):
        _fill(x, torch.randn(x.shape, device=device))
    scale, age = call.K**-0.5, torch.arange(call.T, device=device, dtype=torch.float64)
    bounds = call.bounds if "packed" in call.kind else [0, call.T]
    for begin in bounds[:-1]:
        age[begin:] = torch.arange(call.T - begin, device=device, dtype=torch.float64)
    states = "extend" in call.kind or call.kind == "decode"
    root = (1 + age + (PAST if states else 0)).sqrt()[None, :, None]
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v}
    if call.gated:  # so mild that a row stays about as large as it is without
        inputs["g"] = -torch.rand(call.B, call.T, call.H, device=device) / call.T
    inputs["do"], rows = do, do.shape[1]
    if call.kind == "at":
        generator = torch.Generator().manual_seed(1)
        at = torch.stack([torch.randperm(call.T + 1, generator=generator)[:rows] % call.T for _ in range(call.B)])
        inputs["at"] = at.to(device)
        inputs["q"] = q[torch.arange(call.B, device=device)[:, None], inputs["at"]].contiguous()
    if states:
        sequences = len(bounds) - 1 if "packed" in call.kind else call.B
        past = 0.25 + 1.5 * torch.rand(sequences, PAST, call.H, call.K, device=device, dtype=torch.float64)
        values = torch.randn(sequences, PAST, call.H, call.V, device=device, dtype=torch.float64)
        state = poly_state(past, values, coefficients=call.coefficients)
        inputs["state"] = PolyState(*(x.float() for x in state))
        inputs["d_state"] = PolyState(*(torch.randn(x.shape, device=device) / call.T**0.5 for x in state))
    s = scale * float((q[:, :64].double() * k[:, :64].double()).sum(-1).mean())
    slope = 2 * scale * call.K**0.5 / s  # of a similarity over itself, times a key
    size = call.V**0.5  # of a value, and of a gradient
    floors = {"o": size / root, "dq": slope * size / root, "dk": slope * size / root, "dv": size / root}
    if "d_state" in inputs:  # features, of norm |k|^2, times a gradient of the state
        length = float((k[:, :64].double() ** 2).sum(-1).mean()) / call.T**0.5
        floors["dv"], floors["dk"] = floors["dv"] + length * size, floors["dk"] + 2 * length * size / call.K**0.5
    if call.kind == "at":
        floors |= {name: floors[name][0, inputs["at"]].reshape(call.B, rows, 1) for name in ("o", "dq")}
        floors["dk"], floors["dv"] = (x / 2 for x in (floors["dk"], floors["dv"]))
    if call.gated:  # expected: its mean square. Its terms may cancel, and for a document of one token it is exactly 0
        expected = torch.tensor(call.V * call.H / 6, device=device, dtype=torch.float64)
        if "d_state" in inputs and call.kind != "extend o":  # the state before a token, times numbers of 1 / sqrt(T)
            kv, z = (x.double().square().sum() / len(x) for x in inputs["state"])
            tokens = root.square() / PAST  # in a state, over those in the first; z is a sum of positive features
            expected += (kv * tokens + z * tokens.square()).mean() / call.T
        floors["dg"] = expected.sqrt()
    if states and call.K == 1:  # a single number, whose terms may cancel: sqrt(V) / n^1.5 for the n-th token
        floors["dz0"] = torch.tensor((call.V / 2) ** 0.5 / PAST, device=device)
    if call.K == 1:  # o does not depend on q: nothing but the rounding errors of its terms, 2 / q each, is left of dq
        floors["dq"] = 2 * size / inputs["q"][..., 0].double()
    return inputs, buffers, floors


def _fill(view: Tensor, values: Tensor) -> None:
    """Writes values into a view; where it repeats numbers (stride 0), the first of them."""
    for axis, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[axis] > 1:
            view, values = view.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    view.copy_(values)


def exact(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in fp64."""

    def double(x: Any) -> Any:
        if isinstance(x, PolyState):
            return PolyState(*map(double, x))
        return x.double() if x.is_floating_point() else x

    return {name: double(x) for name, x in inputs.items()}


def run(call: Call, inputs: dict[str, Any], law: bool = False) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    backend: Any = ("reference" if call.T <= 2048 or call.kind == "at" else "chunked") if law else "triton"
    options: dict[str, Any] = {"coefficients": call.coefficients, "backend": backend}
    q, k, v = (inputs[name].detach().requires_grad_(call.kind != "decode") for name in "qkv")
    gate = {}
    if call.gated:
        options["log_decay"] = gate["g"] = inputs["g"].detach().requires_grad_(call.kind != "decode")
    if "packed" in call.kind:
        options["cu_seqlens"] = torch.tensor(call.bounds, device=q.device, dtype=torch.int32)
    if call.kind == "at":
        o = poly_attention_at(q, k, v, inputs["at"], **options)
        return _with_gradients({"o": o}, {"q": q, "k": k, "v": v}, {"o": inputs["do"]})
    if call.kind in ("plain", "packed"):
        o = poly_attention(q, k, v, **options)
        return _with_gradients({"o": o}, {"q": q, "k": k, "v": v, **gate}, {"o": inputs["do"]})
    state = PolyState(*(x.detach().requires_grad_(call.kind != "decode") for x in inputs["state"]))
    o, after = poly_attention_extend(q, k, v, state, **options)
    outputs = {"o": o, "kv": after.kv, "z": after.z}
    if call.kind == "decode":
        overwritten = PolyState(*(x.detach().clone() for x in state))
        again = poly_attention_extend_(q, k, v, overwritten, **options)
        return outputs | {"o_": again, "kv_": overwritten.kv, "z_": overwritten.z}
    weights = {"o": inputs["do"]}
    if call.kind != "extend o":
        weights |= {"kv": inputs["d_state"].kv, "z": inputs["d_state"].z}
    leaves = {"q": q, "k": k, "v": v, **gate, "kv0": state.kv, "z0": state.z}
    return _with_gradients(outputs, leaves, weights)


def _with_gradients(
    outputs: dict[str, Tensor], leaves: dict[str, Tensor], weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    grads = [weights[name].to(outputs[name].dtype) for name in weights]
    gradients = torch.autograd.grad([outputs[name] for name in weights], list(leaves.values()), grads)
    found = {name: x.detach() for name, x in outputs.items()}
    return found | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def error_over_limit(got: Tensor, want: Tensor, limit: float, floor: Tensor | None = None) -> float:
    """The relative error of a tensor over its limit, or that of its worst row over ROW limits, whichever is larger.

    floor: the least size of each row; by default the root mean square of all rows, and a single number is the least
    that this may be.
    """
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return math.inf
    if got.numel() == 0:
        return 0.0
    if not bool(want.isfinite().all()):
        raise AssertionError("the law is not finite")
    difference, want = got.double() - want.double(), want.double()
    rows, sizes = (x.norm(dim=-1) if x.ndim > 1 else x.abs() for x in (difference, want))
    least = sizes.square().mean().sqrt()
    if floor is not None:
        least = torch.maximum(least, floor) if floor.ndim == 0 else floor.expand_as(rows)
    sizes = torch.maximum(sizes, least).clamp_min(1e-30)
    whole = float(rows.norm() / sizes.norm()) / limit
    return max(whole, float((rows / sizes).max()) / (ROW * limit))


@contextmanager
def guarded_outputs() -> Iterator[list[tuple[Tensor, int]]]:
    """Within the block, what polynomial attention's kernels write has NaN around it: buffers, and how much of each."""
    buffers: list[tuple[Tensor, int]] = []

    def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        count = math.prod(shape)
        buffer = torch.full((count + 2 * classes.GUARD,), math.nan, device=like.device, dtype=dtype or like.dtype)
        buffers.append((buffer, classes.GUARD))
        return buffer[classes.GUARD : classes.GUARD + count].view(shape)

    with patch.object(gpu, "_empty", empty), patch.object(gpu, "_like", lambda x: empty(*x.shape, like=x)):
        yield buffers


def all_calls(known: Set[str] = frozenset()) -> list[Any]:
    """Calls that have all classes but those known. What compiles slowly first, so that none is left at the end;
    otherwise mixed, so that no process gets all."""
    found = [*classes.calls(known), *operator_calls.calls(known)]
    order = sorted(range(len(found)), key=lambda i: (i * 7919) % len(found))
    return sorted((found[i] for i in order), key=_rank)


def _rank(call: Any) -> int:
    if not isinstance(call, Call):
        return 3
    if call.T > 2048 or (call.arithmetic != "bf16" and call.K + call.V > 128):
        return 0
    return 1 if call.tiles == "large" else 2


def _work(pipe: Connection) -> None:
    """A process of the pool: computes what comes through the pipe until it is told to stop."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of what is not deterministic
    while (call := pipe.recv()) is not None:
        try:
            pipe.send(compute(call))
            if DEVICE == "cuda" and torch.cuda.memory_reserved() > 2 * 2**30:
                torch.cuda.empty_cache()  # other processes need it
        except Exception as error:
            said = "".join(traceback.format_exception_only(error)).strip()[:300]
            broken = "CUDA" in said or "Triton Error" in said  # the device is of no use to this process any more
            pipe.send(Computed((), 1e30, said, last=broken))
            if broken:
                return


def compute_all(
    calls: Sequence[Any], workers: int, work: Any = _work, seconds: float = math.inf
) -> Iterator[tuple[Any, Computed]]:
    """Computes calls in processes; each call with what came of it. A process that ends is replaced. Nothing is begun
    after so many seconds."""
    context = multiprocessing.get_context("spawn")
    todo, busy, end = list(reversed(calls)), {}, time.monotonic() + seconds

    def start() -> tuple[Connection, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def give(pipe: Connection, process: Any) -> None:
        if todo and time.monotonic() < end:
            call = todo.pop()
            try:
                pipe.send(call)
                busy[pipe] = process, call, time.monotonic()
                return
            except OSError:  # it was ended after its answer
                todo.append(call)
                give(*start())
        else:
            with suppress(OSError):
                pipe.send(None)
            process.join(10)

    for _ in range(min(workers, len(todo))):
        give(*start())
    while busy:
        for pipe in wait(list(busy), timeout=1.0):
            process, call, _ = busy.pop(pipe)  # type: ignore[index]
            try:
                done = pipe.recv()  # type: ignore[union-attr]
                yield call, done
                give(*start() if done.last else (pipe, process))  # type: ignore[arg-type]
            except (EOFError, ConnectionResetError):
                process.join()
                yield call, Computed((), 1e30, f"its process ended with {process.exitcode}")
                give(*start())
        for pipe, (process, call, since) in list(busy.items()):
            if time.monotonic() - since > SECONDS:
                del busy[pipe]
                process.kill()
                yield call, Computed((), 1e30, f"took more than {SECONDS} s")
                give(*start())


def make_record(
    results: Sequence[tuple[Any, Computed]], seconds: float, command: str, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The record: the worst error over its limit per class, and the calls that failed. before: a record that this one
    goes on from; a call that was computed again counts as it is now."""
    before = before or {}
    again = {describe(call) for call, _ in results}
    worst: dict[str, float] = dict(before.get("classes", {}))
    failed = [each for each in before.get("failed", []) if each.partition(": ")[0] not in again]
    for call, done in results:
        if done.problem:  # its classes were not computed
            failed.append(f"{describe(call)}: {done.problem}")
            continue
        for name in done.classes:
            worst[name] = max(worst.get(name, 0.0), float(f"{done.error:.2g}"))
    hashes = source_hashes()
    carried = {name: before[name] for name in ("carried", "whole") if name in before}
    if "whole" in carried:
        carried["whole"] = [each for each in carried["whole"] if before["hashes"].get(each) == hashes.get(each)]
    return {
        "hashes": hashes, **carried, "machine": machine(), "command": command,
        "seconds": round(seconds) + before.get("seconds", 0), "calls": len(results) + before.get("calls", 0),
        "machine_code_read": sum(done.read for _, done in results) + before.get("machine_code_read", 0),
        "complete": False, "failed": sorted(failed), "classes": dict(sorted(worst.items())),
    }  # fmt: skip


def still_valid(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the classes of operators whose kernels have changed since."""
    now, then = source_hashes(), record.get("hashes", {})
    kept = {name: error for name, error in record.get("classes", {}).items() if _same(folder_of(name), now, then)}
    return record | {"classes": kept} if kept else {}


def _same(folder: str, now: dict[str, str], then: dict[str, str]) -> bool:
    return folder in now and now[folder] == then.get(folder)


def describe(call: Any) -> str:
    """A call in words."""
    return " ".join(f"{key}={value}" for key, value in call._asdict().items())


def described(words: str) -> Any:
    """The call that `describe` gives in these words."""
    kind = operator_calls.OperatorCall if words.startswith("op=") else Call
    found = re.fullmatch(" ".join(f"{name}=(.*)" for name in kind._fields), words)
    if found is None:
        raise ValueError(f"no call: {words}")
    values: list[Any] = []
    for each in found.groups():
        try:
            values.append(ast.literal_eval(each))
        except (ValueError, SyntaxError):  # a word
            values.append(each)
    return kind(*values)


def machine() -> dict[str, str]:
    """The machine of a record."""
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return found


def write_record(record: dict[str, Any], path: Path) -> None:
    """One class per line, so that two records can be compared."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items() if key != "classes"]
    body = ",\n".join(f"  {json.dumps(name)}: {value}" for name, value in record["classes"].items())
    path.write_text("{\n" + ",\n".join(lines) + ',\n "classes": {\n' + body + "\n }\n}\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--only", default="", help="calls whose description contains these words")
    parser.add_argument("--calls", type=int, help="stop after so many")
    parser.add_argument(
        "--for", dest="seconds", type=float, default=math.inf, help="begin nothing after so many seconds"
    )
    parser.add_argument("--record", type=Path, default=RECORD, help="a record of these kernels is continued")
    args = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["REBASED_SELF_CHECK"] = "strict"  # nothing replaces a wrong kernel, and no right one may be called wrong
    os.environ["REBASED_CACHE"] = tempfile.mkdtemp()
    before = still_valid(json.loads(args.record.read_text())) if args.record.exists() else {}
    failed = {each.partition(": ")[0] for each in before.get("failed", [])}
    start, results = time.monotonic(), []
    known = set(before.get("classes", {}))
    calls = [call for call in all_calls(known) if args.only in describe(call)]
    chosen = {describe(call) for call in calls}
    calls += [described(each) for each in sorted(failed - chosen) if args.only in each]
    calls = calls[: args.calls]
    everything = classes.reachable() | operator_calls.reachable()
    command = "PYTHONPATH=src:tests python -m kernels.compute_classes"

    def write() -> dict[str, Any]:
        record = make_record(results, time.monotonic() - start, command, before)
        missing = {folder_of(name) for name in everything - set(record["classes"])}
        record["complete"] = not record["failed"] and not missing
        record["whole"] = sorted({*record.get("whole", ()), *(set(record["hashes"]) - missing)})
        write_record(record, args.record)
        return record

    for call, done in compute_all(calls, args.workers, seconds=args.seconds):
        results.append((call, done))
        if done.problem:
            print(f"FAILED {describe(call)}: {done.problem}", flush=True)
        if len(results) % 50 == 0 or len(results) == len(calls):
            bad = sum(bool(done.problem) for _, done in results)
            print(f"{len(results)} of {len(calls)} calls, {time.monotonic() - start:.0f} s, {bad} failed", flush=True)
            write()
    record = write()
    print(f"{len(record['classes'])} classes, {len(record['failed'])} calls failed; wrote {args.record}")
    return 1 if record["failed"] else 0


if __name__ == "__main__":  # what goes to other processes is of the module, not of the script
    from kernels import compute_classes

    sys.exit(compute_classes.main())
