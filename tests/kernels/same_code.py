"""Proves that kernels which were recorded are still the same code, and carries the records over to the new sources.

    PYTHONPATH=src:tests python -m kernels.same_code --old COMMIT                every class, half an hour of two cores
    PYTHONPATH=src:tests python -m kernels.same_code --old COMMIT --flags        classes without their widths, a third
    PYTHONPATH=src:tests python -m kernels.same_code --old COMMIT --flags --drop what differs leaves the records

The records of what was computed and compiled (computed.json, compiled.json) are void as soon as a source of kernels
changes, though most changes add a case and leave the others as they are. For every call that the records are of, this
compares what the old commit and this tree launch: the kernels, their order, grids, options, numbers and tensors. For
every class it compares what Triton makes of a kernel that has it: the intermediate representation after inlining and
simplification (TTIR, without source locations). All that follows (PTX, machine code) is a function of that and of the
options. Only if all are identical the records get the new hashes, with a note of the proof in `carried`; with --drop,
all classes of calls that differ are taken out of the records. Classes that are new stay to be computed.
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
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

HERE = Path(__file__)
ROOT = HERE.parents[2]
WIDTHS = r"\b([KV][=<]|VP=|K)\d+"
"""Padded widths in the name of a class. They are sizes of tensors; what they select is in other words of the name."""


class Plan(NamedTuple):
    """What is compared."""

    folders: list[str]  # of operators whose sources have changed
    calls: list[tuple[str, list[Any]]]  # of the old tree, as what another one can make them from
    kernels: list[list[int]]  # per call, the numbers of the launches whose kernels are compared: all classes
    compiled: list[str]  # classes that are compiled for other GPUs


def make_plan(new: Path, flags: bool) -> Plan:
    """The plan, in the tree of the old commit. flags: of classes that differ in padded widths alone, one is enough."""
    from kernels import classes, compile_classes, operator_calls

    now, then = classes.source_hashes(new / "src" / "rebased" / "ops"), classes.source_hashes()
    folders = [folder for folder in then if now.get(folder) != then[folder]]
    calls = [(type(call).__name__, list(call)) for call in (*classes.calls(), *operator_calls.calls())]
    names = {
        (number, index): [without_widths(name) if flags else name for name in classes_without_options(each)]
        for number, call in enumerate(calls)
        for index, each in enumerate(launched(_call(*call)))
        if classes.folder_of(classes.classes_of(each)[0]) in folders
    }
    kernels: list[list[int]] = [[] for _ in calls]
    for number, index in classes.cover(names):
        kernels[number].append(index)
    return Plan(folders, calls, kernels, sorted(set(compile_classes.jobs(compile_classes.RECORDED).values())))


def without_widths(name: str) -> str:
    """A class without its padded widths."""
    return re.sub(WIDTHS, r"\1", name)


def classes_without_options(each: Any) -> tuple[str, ...]:
    """The classes of a launch as far as the representation depends on them: warps, stages and registers are options."""
    from kernels import classes, compile_classes

    launch, args = each
    constants = {key: value for key, value in launch.constants.items() if key not in compile_classes._OPTIONS}
    return classes.classes_of((SimpleNamespace(kernel=launch.kernel, constants=constants), args))  # type: ignore[arg-type]


def _call(kind: str, fields: list[Any]) -> Any:
    from kernels import classes, operator_calls

    if kind == "Call":
        return classes.Call(*fields)
    op, arithmetic, sizes, options = fields
    return operator_calls.OperatorCall(op, arithmetic, tuple(sizes), tuple(options))


def launched(call: Any) -> list[Any]:
    """The launches of a call: with the tiles of its own GPU, and those of one with little shared memory."""
    from kernels import classes, operator_calls

    if not isinstance(call, classes.Call):
        return operator_calls.launches(call)
    other = [] if call.tiles == "safe" else classes.launches(call._replace(tiles="small"))
    return [*classes.launches(call), *other]


def describe(launch: Any, args: tuple[Any, ...]) -> str:
    """All of a launch but its kernel's code. What is None, or a flag that is off, is not there."""
    tensors = [
        [str(x.dtype), *map(list, (x.shape, x.stride()))] if hasattr(x, "stride") else x for x in args if x is not None
    ]
    constants = {key: value for key, value in launch.constants.items() if value is not False and key != "GATE"}
    return json.dumps([launch.kernel.fn.__name__, launch._grid, launch.numbers, constants, tensors], default=str)


def representation(job: Any) -> str:
    """The SHA-256 of what Triton makes of a kernel: TTIR without source locations and names of variables."""
    from unittest.mock import patch

    import triton
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    from kernels import compile_classes
    from rebased.kernels import machine_code

    with patch.object(triton, "compile", lambda source, target, options: (source, target, options)):
        source, target, options = machine_code.compile_launch(compile_classes.launch_of(job), job.capability)
    backend = make_backend(target)
    parsed, context = backend.parse_options(dict(options)), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    text = backend.make_ttir(module, {}, parsed, job.capability).str_nodebug()
    return hashlib.sha256(text.encode()).hexdigest()


def digest(given: tuple[int, int, Plan]) -> dict[str, list[tuple[str, str]]]:
    """Of a share of the calls, by call: each launch in words, and its kernel's representation if that is compared."""
    from kernels import classes, compile_classes

    share, shares, plan = given
    known: dict[Any, str] = {}
    found = {}
    for number in range(share, len(plan.calls), shares):
        entries = []
        for index, each in enumerate(launched(_call(*plan.calls[number]))):
            if classes.folder_of(classes.classes_of(each)[0]) not in plan.folders:
                continue
            job, text = compile_classes.job_of(each, 90)._replace(options=()), ""  # no option is in the representation
            if index in plan.kernels[number]:
                text = known[job] = known.get(job) or representation(job)
            entries.append((describe(*each), text))
        found[json.dumps(plan.calls[number])] = entries
    return found


def write_digests(given: Path, out: Path, workers: int) -> None:
    """Writes what this tree launches for the calls of a file."""
    plan = Plan(*json.loads(given.read_text()))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        shares = pool.map(digest, [(share, 4 * workers, plan) for share in range(4 * workers)], chunksize=1)
    out.write_text(json.dumps({name: entries for share in shares for name, entries in share.items() if entries}))


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The calls whose launches differ."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def bare(name: str) -> str:
    """A class of either record without its widths and whether they are padded."""
    return re.sub(r"\b([KV]|VP)[=<]?\d+", r"\1", name)


def different_classes(calls: Sequence[str]) -> set[str]:
    """All classes of these calls, bare."""
    from kernels import classes

    return {
        bare(name) for call in calls for each in launched(_call(*json.loads(call)))
        for name in classes.classes_of(each)
    }  # fmt: skip


def carried_over(record: dict[str, Any], hashes: dict[str, str], proof: dict[str, Any]) -> dict[str, Any]:
    """A record of the old commit as one of these sources."""
    changed = {folder: [record["hashes"][folder], hashes[folder]] for folder in hashes if folder in record["hashes"]}
    changed = {folder: pair for folder, pair in changed.items() if pair[0] != pair[1]}
    note = proof | {"folders": changed}
    whole = sorted(record["hashes"]) if record["complete"] else record.get("whole", [])
    return record | {"hashes": hashes, "whole": whole, "carried": [*record.get("carried", []), note]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="the commit that the records are of")
    parser.add_argument(
        "--flags", action="store_true", help="compare one kernel of classes that differ in widths alone"
    )
    parser.add_argument("--drop", action="store_true", help="take classes of calls that differ out of the records")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--plan", type=Path, nargs=2, help=argparse.SUPPRESS)  # these two: steps in one of the trees
    parser.add_argument("--digest", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.plan:
        args.plan[0].write_text(json.dumps(make_plan(args.plan[1], args.flags)))
        return 0
    if args.digest:
        write_digests(*args.digest, args.workers)
        return 0

    import triton

    from kernels import classes, compile_classes, compute_classes, operator_calls

    # such as a folder with another Triton
    elsewhere = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(each).is_absolute()]
    with tempfile.TemporaryDirectory() as folder:
        tree, files = Path(folder) / "old", {name: Path(folder) / f"{name}.json" for name in ("plan", "old", "new")}
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), args.old], cwd=ROOT, check=True)
        try:
            # the old tree's modules, and this one, which it does not have
            (tree / "tests" / "kernels" / HERE.name).write_text(HERE.read_text())
            command = [sys.executable, "-m", "kernels.same_code", "--workers", str(args.workers)]
            command += ["--flags"] if args.flags else []
            for root, words_ in (
                (tree, ["--plan", str(files["plan"]), str(ROOT)]),
                (tree, ["--digest", str(files["plan"]), str(files["old"])]),
                (ROOT, ["--digest", str(files["plan"]), str(files["new"])]),
            ):
                path = os.pathsep.join([*(str(root / each) for each in ("src", "tests")), *elsewhere])
                subprocess.run([*command, *words_], cwd=root, env=os.environ | {"PYTHONPATH": path}, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        old, new = (json.loads(files[name].read_text()) for name in ("old", "new"))
        plan = Plan(*json.loads(files["plan"].read_text()))
    different = compare(old, new)
    kernels = sum(map(len, plan.kernels))
    launches = sum(map(len, old.values()))
    print(f"{len(old):,} calls, {launches:,} launches, {kernels:,} kernels compared; {len(different)} calls differ")
    for call in different[:20]:
        print(call)
    if different and not args.drop:
        return 1
    dropped = different_classes(different)
    said = subprocess.run(["git", "rev-parse", args.old], cwd=ROOT, check=True, capture_output=True, text=True)
    proof = {
        "from": said.stdout.strip(),
        "because": "the code is identical: launches of every recorded call, TTIR of every recorded class"
        + (" but for its padded widths" if args.flags else "") + (", what differs was dropped" if dropped else ""),
        "calls": len(old) - len(different), "launches": launches, "kernels": kernels, "triton": triton.__version__,
    }  # fmt: skip
    hashes = classes.source_hashes()
    record = carried_over(json.loads(compute_classes.RECORD.read_text()), hashes, proof)
    record["classes"] = {name: x for name, x in record["classes"].items() if bare(name) not in dropped}
    record["complete"] = not record["failed"] and classes.reachable() | operator_calls.reachable() <= set(
        record["classes"]
    )
    compute_classes.write_record(record, compute_classes.RECORD)
    record = carried_over(json.loads(compile_classes.RECORD.read_text()), hashes, proof)
    jobs = compile_classes.jobs(compile_classes.RECORDED)
    known = {job.name for job, name in jobs.items() if name in plan.compiled and bare(name) not in dropped}
    done = known if record["complete"] else known & set(record["done"])
    compile_classes.write_record(compile_classes.RECORD, record, done, complete=len(done) == len(jobs))
    return 0


if __name__ == "__main__":
    from kernels import same_code

    sys.exit(same_code.main())
