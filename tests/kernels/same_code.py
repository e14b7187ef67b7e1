"""Proves that kernels which were recorded are still the same code, and carries the records over to the new sources.

    PYTHONPATH=src:tests python -m kernels.same_code --old COMMIT

The records of what was computed and compiled (computed.json, compiled.json) are void as soon as a source of kernels
changes, though most changes add a case and leave the others as they are. For every call that the records are of, this
compares what the old commit and this tree launch: the kernels, their order, grids, options, numbers and tensors; and of
every kernel what Triton makes of it, its intermediate representation after inlining and simplification (TTIR, without
source locations). All that follows (PTX, machine code) is a function of that and of the options. Only if all are
identical the records get the new hashes, with a note of the proof in `carried`. Classes that are new stay to be
computed.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__)
ROOT = HERE.parents[2]


def recorded_calls() -> list[tuple[str, list[Any]]]:
    """The calls of this tree, as what another one can make them from."""
    from kernels import classes, operator_calls

    return [(type(call).__name__, list(call)) for call in (*classes.calls(), *operator_calls.calls())]


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


def digest(given: tuple[int, int, list[str], list[tuple[str, list[Any]]]]) -> dict[str, list[tuple[str, str]]]:
    """Of a share of the calls, by call: each launch of these folders in words, and its kernel's representation."""
    from kernels import classes, compile_classes

    share, shares, folders, calls = given
    known: dict[Any, str] = {}
    found = {}
    for number in range(share, len(calls), shares):
        entries = []
        for each in launched(_call(*calls[number])):
            if classes.folder_of(classes.classes_of(each)[0]) not in folders:
                continue
            job = compile_classes.job_of(each, 90)._replace(options=())  # no option is in the representation
            if job not in known:
                known[job] = representation(job)
            entries.append((describe(*each), known[job]))
        found[json.dumps(calls[number])] = entries
    return found


def write_digests(given: Path, out: Path, workers: int) -> None:
    """Writes what this tree launches for the calls of a file."""
    folders, calls, _ = json.loads(given.read_text())
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        shares = pool.map(digest, [(share, 4 * workers, folders, calls) for share in range(4 * workers)], chunksize=1)
    out.write_text(json.dumps({name: entries for share in shares for name, entries in share.items() if entries}))


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The calls whose launches differ."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def carried_over(record: dict[str, Any], hashes: dict[str, str], proof: dict[str, Any]) -> dict[str, Any]:
    """A record of the old commit as one of these sources."""
    changed = {folder: [record["hashes"][folder], hashes[folder]] for folder in hashes if folder in record["hashes"]}
    changed = {folder: pair for folder, pair in changed.items() if pair[0] != pair[1]}
    note = proof | {"folders": changed}
    return record | {"hashes": hashes, "carried": [*record.get("carried", []), note]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="the commit that the records are of")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument(
        "--list", type=Path, nargs=2, help=argparse.SUPPRESS
    )  # this and the next: steps in one of the trees
    parser.add_argument("--digest", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.list:
        from kernels import classes, compile_classes

        now, then = classes.source_hashes(args.list[1] / "src" / "rebased" / "ops"), classes.source_hashes()
        changed = [folder for folder in then if now.get(folder) != then[folder]]
        compiled = sorted(set(compile_classes.jobs(compile_classes.RECORDED).values()))
        args.list[0].write_text(json.dumps([changed, recorded_calls(), compiled]))
        return 0
    if args.digest:
        write_digests(*args.digest, args.workers)
        return 0

    import triton

    from kernels import classes, compile_classes, compute_classes, operator_calls

    with tempfile.TemporaryDirectory() as folder:
        tree, files = Path(folder) / "old", {name: Path(folder) / f"{name}.json" for name in ("calls", "old", "new")}
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), args.old], cwd=ROOT, check=True)
        try:
            # the old tree's modules, and this one, which it does not have
            (tree / "tests" / "kernels" / HERE.name).write_text(HERE.read_text())
            command = [sys.executable, "-m", "kernels.same_code", "--workers", str(args.workers)]
            for root, words_ in (
                (tree, ["--list", str(files["calls"]), str(ROOT)]),
                (tree, ["--digest", str(files["calls"]), str(files["old"])]),
                (ROOT, ["--digest", str(files["calls"]), str(files["new"])]),
            ):
                path = os.pathsep.join(str(root / each) for each in ("src", "tests"))
                subprocess.run([*command, *words_], cwd=root, env=os.environ | {"PYTHONPATH": path}, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        old, new = (json.loads(files[name].read_text()) for name in ("old", "new"))
        compiled = set(json.loads(files["calls"].read_text())[2])
    different = compare(old, new)
    kernels = {text for entries in old.values() for _, text in entries}
    launches = sum(map(len, old.values()))
    print(f"{len(old):,} calls, {launches:,} launches, {len(kernels):,} kernels; {len(different)} calls differ")
    if different:
        print("\n".join(different[:20]))
        return 1
    said = subprocess.run(["git", "rev-parse", args.old], cwd=ROOT, check=True, capture_output=True, text=True)
    proof = {
        "from": said.stdout.strip(), "because": "the code is identical: TTIR and launches of every recorded call",
        "calls": len(old), "launches": launches, "kernels": len(kernels), "triton": triton.__version__,
    }  # fmt: skip
    hashes = classes.source_hashes()
    record = carried_over(json.loads(compute_classes.RECORD.read_text()), hashes, proof)
    record["complete"] = classes.reachable() | operator_calls.reachable() <= set(record["classes"])
    compute_classes.write_record(record, compute_classes.RECORD)
    record = carried_over(json.loads(compile_classes.RECORD.read_text()), hashes, proof)
    jobs = compile_classes.jobs(compile_classes.RECORDED)
    if record["complete"]:
        done = {job.name for job, name in jobs.items() if name in compiled}
        compile_classes.write_record(compile_classes.RECORD, record, done, complete=len(done) == len(jobs))
    return 0


if __name__ == "__main__":
    from kernels import same_code

    sys.exit(same_code.main())
