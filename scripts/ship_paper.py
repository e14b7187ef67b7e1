"""Make the package's records from the committed ones: python -m scripts.ship_paper [ROOT]

Compact copies of the bundles, probes and plans in ROOT/results, and the test of TF32 in ROOT/benchmarks/results, go to
the folder `records` of rebased.paper. What the page does not read is left out.
"""

import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rebased.files import replacing
from rebased.paper.evidence import PLANNED, PRECISION, RECORDS
from rebased.paper.plan_file import plans_in, read_plan
from rebased.paper.planned import CAME_FIRST, GAP_STEPS, describes
from rebased.paper.precision import PrecisionTest
from rebased.report.lm.models import LAST_STEPS, curve
from rebased.report.probe.cells import group_probes
from rebased.report.probe.files import PROBES, OtherJson, Probe, read_probes
from rebased.runs.collect import BUNDLES, distinct, gather, write_bundle
from rebased.runs.finished import Run

EVERY = 8  # of the epochs, and of the lines of a language model's steps, so many are one that is kept
SEEDS = 5  # of a test of TF32 that counts, at least
NOT_SHOWN = ("extrapolation-d64", "heads-small")  # the paper has no such experiment
FIGURES = 6  # significant digits of densities and similarities, which are drawn only


def read_precision_test(folder: Path) -> PrecisionTest:
    """The test in the newest record of a folder such as benchmarks/results that has enough seeds."""
    for path in sorted(folder.glob("train-*-cuda.json"), reverse=True):
        rows = [row for row in json.loads(path.read_text())["rows"] if row["section"] == "pairs" and "tf32" in row]
        if len(rows) >= SEEDS:
            fp32, tf32 = ({row["seed"]: row[name] for row in rows} for name in ("fp32", "tf32"))
            return PrecisionTest(fp32, tf32, rows[0]["D"], rows[0]["epochs"], path.name)
    raise ValueError(f"no record in {folder} compares tf32 with fp32 over {SEEDS} seeds")


def ship(root: Path, folder: Path) -> list[Path]:
    """Write the compact records of the repository in `root` into `folder`; returns the files. A plan and the records
    beside it go to a folder of their own: they are judged by themselves. Results in deeper folders (tasks, mixers,
    suites) are not the paper's."""
    results, written = root / "results", []
    seen: set[str] = set()  # a run may be in two sweeps, and one that was trained twice has two records
    bundles, probes = (
        sorted({file for pattern in patterns for file in [*results.glob(pattern), *results.glob(f"*/{pattern}")]})
        for patterns in (BUNDLES, PROBES)
    )
    read = [file for file in (*bundles, *probes) if file.name.partition(".")[0] not in NOT_SHOWN]
    for file in [*read, *plans_in(results).values()]:
        plan = (file.parent / "plan.md").exists()
        place = folder / PLANNED.name / file.parent.name if plan else folder
        place.mkdir(parents=True, exist_ok=True)
        path = place / file.name
        if file in bundles:
            found = gather([file])
            texts = {json.dumps(run.lines): run for run in (*found.runs, *found.lm_runs)}
            write_bundle(distinct([compact_run(run) for text, run in texts.items() if plan or text not in seen]), path)
            seen |= set() if plan else texts.keys()
        elif file in probes:
            try:
                records = read_probes(file)
            except OtherJson:
                continue
            if not (compact := compact_probes(records)):
                continue
            path = place / f"{file.name.partition('.json')[0]}.json.xz"
            write(path, lzma.compress(as_json({"type": "probes", "records": compact})))
        else:
            write(path, file.read_bytes())
        written.append(path)
    precision = folder / PRECISION.name
    write(precision, as_json(read_precision_test(root / "benchmarks" / "results")._asdict()))
    return [*written, precision]


class NoHistory(Exception):
    """The commits that runs name cannot be read here."""


def plans_that_came_first(root: Path) -> dict[str, bool]:
    """By the name of a plan with runs: whether each commit that a run names holds the plan, word by word. Runs that the
    plan calls known do not count. NoHistory if git, or such a commit, is missing."""
    found = {}
    for name, path in plans_in(root / "results").items():
        known, runs = read_plan(path).known, gather([file for pattern in BUNDLES for file in path.parent.glob(pattern)])
        own = [run for run in (*runs.runs, *runs.lm_runs) if known is None or not describes(known, run)]
        commits = {line["code"]["commit"] for run in own for line in run.lines if line["type"] in ("run", "resume")}
        if commits:
            text = path.read_bytes()
            found[name] = all(plan_in(root, commit, path.relative_to(root)) == text for commit in commits)
    return found


def plan_in(root: Path, commit: str, path: Path) -> bytes | None:
    """The content of a file in a commit; None if it has no such file."""

    def git(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["git", *words], cwd=root, check=False, capture_output=True)

    try:
        if git("cat-file", "-e", commit).returncode:
            raise NoHistory(f"no commit {commit} here, which runs of {path.parent} name: git fetch --unshallow")
    except FileNotFoundError as error:
        raise NoHistory("git is missing") from error
    said = git("show", f"{commit}:{path.as_posix()}")
    return None if said.returncode else said.stdout


def compact_run(run: Run) -> Run:
    """The run without the epochs or steps that the page does not read. Its result stays the same."""
    kept = [line for line in run.lines if line["type"] != "step"]
    steps = [line for line in run.lines if line["type"] == "step"]
    if run.epochs:
        wanted = {run.best.epoch, run.epochs[-1]["epoch"]}
        kept = [
            line for line in kept if line["type"] != "epoch" or line["epoch"] in wanted or line["epoch"] % EVERY == 0
        ]
        last = kept.index(run.epochs[-1])
        kept = [line if i == last else without_histograms(line) for i, line in enumerate(kept)]
    spans = [(at - GAP_STEPS, at) for at in curve(run, "eval", "loss")[0]]  # the training loss is computed from these
    spans += [(steps[-1]["step"] - LAST_STEPS, steps[-1]["step"])] if steps else []
    kept[1:1] = [
        line
        for n, line in enumerate(steps, 1)
        if n % EVERY == 0 or any(low < line["step"] <= high for low, high in spans)
    ]
    return Run(run.folder, kept, run.file)


def without_histograms(line: dict[str, Any]) -> dict[str, Any]:
    """The line of an epoch with mean and standard deviation of gamma and beta, but without their histograms."""
    if "norms" not in line:
        return line
    layers = {
        layer: {key: {name: entry[name] for name in ("mean", "sd")} for key, entry in parts.items()}
        for layer, parts in line["norms"].items()
    }
    return line | {"norms": layers}


def compact_probes(records: Sequence[Probe]) -> list[Probe]:
    """The records of tasks, with one example to draw for the first seed of each model and width."""
    tasks = [record for record in records if record["kind"] == "task"]
    firsts = {id(cell.first) for cell in group_probes(tasks)} if tasks else set()
    return [compact_probe(record, drawn=id(record) in firsts) for record in tasks]


def compact_probe(record: Probe, *, drawn: bool) -> Probe:
    """The last layer of a probe, with the first matrix if it is `drawn`, and numbers as exact as they are shown."""
    layer = record["layers"][-1]
    layer = layer | {"drawn": layer["drawn"][:1] if drawn else [], "similarity": rounded(layer["similarity"])}
    return record | {"layers": [layer]}


def rounded(tree: Any) -> Any:
    """JSON data with numbers of FIGURES significant digits."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return float(f"{tree:.{FIGURES}g}") if isinstance(tree, float) else tree


def as_json(tree: Any) -> bytes:
    """JSON in one line."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as file:
        file.write(content)


def main(root: Path) -> None:
    """Replace the package's records: all new ones are whole before an old one goes."""
    with tempfile.TemporaryDirectory() as temporary:
        made = {path.relative_to(temporary): path.read_bytes() for path in ship(root, Path(temporary))}
    made[Path(PLANNED.name, CAME_FIRST)] = as_json(plans_that_came_first(root))
    for name, content in made.items():
        (RECORDS / name).parent.mkdir(parents=True, exist_ok=True)
        write(RECORDS / name, content)
    for path in RECORDS.rglob("*"):
        if path.is_file() and path.relative_to(RECORDS) not in made:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path.cwd())
