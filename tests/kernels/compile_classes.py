"""Compiles kernels of all tiles and widths for GPUs that need not be here, and asks what shared memory they need.

    PYTHONPATH=src:tests python -m kernels.compile_classes                       all, for all architectures
    PYTHONPATH=src:tests python -m kernels.compile_classes --for 500             as many as there is time for
    PYTHONPATH=src:tests python -m kernels.compile_classes --arch 90 --only fp32 --record /tmp/some.json

Triton 3.6 cannot compile some kernels for sm_100 (there the operators take safe tiles): --arch 100 wants a newer one.

A kernel is compiled for each tile with each pair of padded widths: whether a width is full changes which numbers are
read, and not where they are kept. For sm_86 and sm_89 Triton makes the same PTX as for sm_80
(tests/kernels/test_classes.py), so ptxas alone is asked for these. Kernels for sm_90 are compiled by compute_classes,
which also computes with them and reads their machine code; `--arch 90` compiles them here.

A record is continued: kernels of operators that are as they were are not compiled again.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels import classes, operator_calls
from kernels.classes import Launched, folder_of, source_hashes
from kernels.records import COMPILED
from rebased.kernels.machine_code import compile_launch, read_cubin

RECORD = COMPILED
KB = 1024
SHARED_MEMORY = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB, 120: 99 * KB}
"""Bytes of shared memory that a program may have, by compute capability."""
SMALL = (86, 89, 120)
"""Those with little shared memory, for which the plan takes other tiles."""
RECORDED = (80, 86, 89, 100, 120)
"""What the record holds: compute_classes does the rest."""
SAME_PTX = {80: (86, 89)}
"""Architectures that Triton compiles alike, by the one it is asked for."""


class Job(NamedTuple):
    """A kernel to compile: its place, its arguments without data, and the GPU."""

    module: str
    kernel: str
    values: tuple[tuple[str, Any], ...]  # of tensors "dtype"
    options: tuple[tuple[str, Any], ...]
    capability: int
    alike: tuple[int, ...] = ()  # further architectures to assemble it for

    @property
    def name(self) -> str:
        """Short and the same in every run."""
        return f"{self.kernel}-{hashlib.sha256(repr(self._replace(alike=())).encode()).hexdigest()[:12]}"


class Built(NamedTuple):
    """What the compiler made of a kernel, per architecture."""

    shared: int
    wrong: int
    problem: str = ""


_OPTIONS = ("num_warps", "num_stages", "maxnreg", "debug")


def job_of(launched: Launched, capability: int) -> Job:
    """The job of a launch. Numbers are reduced to what Triton compiles for: 1, a multiple of 16, or neither."""
    launch, args = launched
    function = launch.kernel
    values: dict[str, Any] = dict(zip(function.arg_names, (*args, *launch.numbers), strict=False))
    values |= {key: value for key, value in launch.constants.items() if key not in _OPTIONS}
    constants = {parameter.name for parameter in function.params if parameter.is_constexpr}
    reduced = tuple((name, value if name in constants else _reduced(value)) for name, value in values.items())
    options = tuple((key, value) for key, value in launch.constants.items() if key in _OPTIONS)
    return Job(function.fn.__module__, function.fn.__name__, reduced, options, capability)


def _reduced(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, bool) or not isinstance(value, int) or value == 1:
        return value if value is None or isinstance(value, bool | int) else 0.5
    return (16 if value % 16 == 0 else 3) + (2**32 if abs(value) >= 2**31 else 0)


def launch_of(job: Job) -> dict[str, Any]:
    """The launch as machine_code.compile_launch takes it."""
    kernel = getattr(import_module(job.module), job.kernel)
    values: dict[str, Any] = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
    for name, value in job.values:
        is_tensor = isinstance(value, str) and value.startswith("torch.")
        values[name] = torch.empty(0, dtype=getattr(torch, value.removeprefix("torch."))) if is_tensor else value
    return {"kernel": kernel, "values": values, "options": dict(job.options)}


def compile_job(job: Job) -> dict[int, Built]:
    """Compiles a kernel and reads its machine code, for its architecture and for those that Triton compiles alike."""
    made = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder  # what is compiled once is not needed again
            compiled = compile_launch(launch_of(job), job.capability)
        wrong = len(read_cubin(compiled.asm["cubin"]).wrong) if job.capability == 90 else 0
        shared = int(compiled.metadata.shared)
        made[job.capability] = Built(shared, wrong)
        for other in job.alike:
            made[other] = Built(shared, 0, assemble(compiled.asm["ptx"], other))
    except Exception as error:
        made[job.capability] = Built(0, 0, " ".join(str(error).split())[-200:] or type(error).__name__)
    return made


def assemble(ptx: str, capability: int) -> str:
    """What ptxas says against a kernel for another GPU; nothing if it takes it."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(re.sub(r"\.target sm_\d+\w*", f".target sm_{capability}", ptx))
        command = [knobs.nvidia.ptxas.path, f"--gpu-name=sm_{capability}", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()[-200:]


def jobs(architectures: Sequence[int], only: str = "") -> dict[Job, str]:
    """A kernel for each tile and padded widths, with its class. Each architecture gets the tiles that its shared memory
    allows."""
    found: dict[tuple[int, str], Job] = {}
    for call in [*classes.calls(), *operator_calls.calls()]:
        if only not in " ".join(f"{key}={value}" for key, value in call._asdict().items()):
            continue
        for capability in architectures:
            first = next((each for each, same in SAME_PTX.items() if capability in same), capability)
            for launched in _launches(call, capability):
                name = re.sub(r"\b([KV])[=<](\d*)", r"\1\2", classes.classes_of(launched)[0])
                job = found.get((first, name)) or job_of(launched, first)
                more = () if first == capability else (capability,)
                found[first, name] = job._replace(alike=tuple(sorted({*job.alike, *more})))
    return {job: name for (_, name), job in found.items()}


def _launches(call: Any, capability: int) -> list[Launched]:
    """What a call launches on such a GPU; nothing if no such call has these tiles there."""
    if not isinstance(call, classes.Call):
        if call.op != "delta":
            return operator_calls.launches(call)
        if "small" in call.options:
            return operator_calls.launches(call) if capability in SMALL else []
        return operator_calls.launches(call._replace(options=(*call.options, *["small"] * (capability in SMALL))))
    if call.tiles == "safe":
        return classes.launches(call)
    if call.tiles == "small" and capability not in SMALL:
        return []
    return classes.launches(call._replace(tiles="small" if capability in SMALL else "large"))


def compile_all(todo: Sequence[Job], workers: int, seconds: float) -> Iterator[tuple[Job, dict[int, Built]]]:
    """Compiles in processes; begins nothing after so many seconds."""
    end, waiting = time.monotonic() + seconds, list(reversed(todo))
    running: dict[Future[dict[int, Built]], Job] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while True:
            while waiting and len(running) < 2 * workers and time.monotonic() < end:
                job = waiting.pop()
                running[pool.submit(compile_job, job)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                yield running.pop(each), each.result()


def read_record(path: Path) -> dict[str, Any]:
    """The record at a path, without the kernels of operators that have changed since."""
    record = json.loads(path.read_text()) if path.exists() else {}
    now, then = source_hashes(), record.get("hashes", {})
    if then == now:
        return dict(record)
    same = {operator for operator, digest in now.items() if then.get(operator) == digest}
    kept = {job.name for job in jobs(RECORDED) if operator_of(job) in same} if same else set()
    if same and not record["complete"]:
        kept &= set(record["done"])
    whole = sorted(same & set(record["hashes"] if record.get("complete") else record.get("whole", ())))
    fresh = {"hashes": now, "complete": False, "done": sorted(kept), "whole": whole}
    return {"architectures": {}} | record | fresh if same else {"architectures": {}} | fresh


def operator_of(job: Job) -> str:
    """The folder of operators that a kernel is of."""
    return folder_of(job.module.removeprefix("rebased.ops."))


def write_record(path: Path, record: dict[str, Any], known: set[str], complete: bool) -> None:
    """Writes what is known so far; which kernels only if it is not all, for who goes on."""
    record["complete"] = complete
    record["done"] = [] if complete else sorted(known)
    path.with_suffix(".part").write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".part").replace(path)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, default=list(RECORDED), choices=list(SHARED_MEMORY))
    parser.add_argument("--only", default="", help="calls whose description contains these words")
    parser.add_argument("--for", dest="seconds", type=float, default=3600.0, help="stop after so many seconds")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args(words)
    record = read_record(args.record)
    if record["complete"]:
        print(f"{args.record} is complete")
        return 0
    known, all_jobs = set(record["done"]), jobs(args.arch, args.only)
    todo = [job for job in all_jobs if job.name not in known]
    start, bad = time.monotonic(), 0
    for count, (job, made) in enumerate(compile_all(todo, args.workers, args.seconds), 1):
        known.add(job.name)
        for capability, built in made.items():
            about = record["architectures"].setdefault(
                str(capability),
                {"kernels": 0, "largest": 0, "of": "", "too_large": {}, "wrong_descriptors": [], "problems": []},
            )
            about["triton"] = triton.__version__
            about["kernels"] += 1
            name = all_jobs[job]
            if built.shared > about["largest"]:
                about["largest"], about["of"] = built.shared, name
            if built.shared > SHARED_MEMORY[capability]:
                about["too_large"][name] = max(built.shared, about["too_large"].get(name, 0))
            if built.wrong and name not in about["wrong_descriptors"]:
                about["wrong_descriptors"].append(name)
            if built.problem:
                about["problems"].append(f"{name}: {built.problem}")
            if built.shared > SHARED_MEMORY[capability] or built.wrong or built.problem:
                bad += 1
                print(f"sm_{capability} {name}: {built.shared} bytes, {built.wrong} wrong, {built.problem}", flush=True)
        if count % 50 == 0 or count == len(todo):
            print(f"{count} of {len(todo)} kernels, {time.monotonic() - start:.0f} s, {bad} problems", flush=True)
            write_record(args.record, record, known, complete=False)
    missing = {operator_of(job) for job in jobs(RECORDED) if job.name not in known}
    complete = not missing
    record["whole"] = sorted({*record.get("whole", ()), *(set(record["hashes"]) - missing)})
    write_record(args.record, record, known, complete)
    print(f"wrote {args.record}; {'complete' if complete else 'not complete: run it again to go on'}")
    return 1 if bad else 0


if __name__ == "__main__":  # what goes to other processes is of the module, not of the script
    from kernels import compile_classes

    sys.exit(compile_classes.main())
