"""Does the page of `rebased demo` say the same with every seed and on every CPU? The demo, many times.

    PYTHONPATH=src python benchmarks/demo_stability.py --workers 8
    PYTHONPATH=src python benchmarks/demo_stability.py --workers 8 --variations plain avx2 ulp1

It trains the models of the demo with `--sets` disjoint sets of as many seeds as are shipped, and prints per model the
recall of the most pairs, then how often each comparison of the page is decided, and which way. A variation is `plain`,
`default`, `avx2` or `avx512` (ATEN_CPU_CAPABILITY; a CPU without it ignores it) or `ulpN`: a random half of the initial
weights is moved by one unit in the last place, and N seeds the choice. That stands for another CPU, which rounds sums
differently. Each run has a process of its own with one thread. All records go into a JSON file. The conclusions need
matplotlib and scipy; where these are missing, `--show FILE` prints them elsewhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rebased.runs.finished import Run
from rebased.runs.record import read_record
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train.sweep.grid import load_sweep

SEEDS, FIRST_SEED = 20, 200  # seeds per set, as are shipped; none of the demo's own or of the shipped runs
CAPABILITIES = ("default", "avx2", "avx512")


def train_here(config: dict[str, Any], folder: str, ulp: int | None) -> None:
    """Train one run in this process, as the demo does, but with disturbed initial weights if `ulp` is a number."""
    import torch

    from rebased.models import LanguageModel
    from rebased.train import train

    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    initialise = LanguageModel.__init__

    def initialise_and_disturb(model: LanguageModel, *arguments: Any) -> None:
        initialise(model, *arguments)
        generator = torch.Generator().manual_seed(ulp or 0)
        with torch.no_grad():
            for weight in model.parameters():
                chosen = torch.rand(weight.shape, generator=generator) < 0.5
                weight.copy_(torch.where(chosen, weight.nextafter(torch.tensor(torch.inf)), weight))

    if ulp is not None:
        LanguageModel.__init__ = initialise_and_disturb  # type: ignore[method-assign]
    train(SyntheticRunConfig.model_validate(config), Path(folder))


def run_one(variation: str, config: SyntheticRunConfig, folder: Path) -> dict[str, Any]:
    """The record of one run, trained in a process of its own."""
    out = folder / f"{variation}-{config.digest()}"
    ulp = int(variation.removeprefix("ulp")) if variation.startswith("ulp") else None
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    if variation in CAPABILITIES:
        environment["ATEN_CPU_CAPABILITY"] = variation
    work = json.dumps([config.model_dump(mode="json"), str(out), ulp])
    answer = subprocess.run(
        [sys.executable, __file__, "--train", work], env=environment, capture_output=True, text=True
    )
    if answer.returncode:
        raise SystemExit(f"{out.name} failed:\n{answer.stderr[-2000:]}")
    lines = read_record(out)
    accuracies = " ".join(f"{line['test']['accuracy']:.2f}" for line in lines if line["type"] == "epoch")
    print(f"{variation} {config.model.mixers[-1].name} seed {config.train.seed}: {accuracies}", file=sys.stderr)
    return {"variation": variation, "lines": lines}


def show(variation: str, runs: Sequence[Run], sets: Sequence[Sequence[int]]) -> None:
    """Print what each model recalled, and what the page would conclude from each set of seeds."""
    from rebased.report.demo import verdicts
    from rebased.report.demo_figures import labelled, most_pairs, recalled

    pairs = most_pairs(runs)
    print(f"\n{variation}: recall of {pairs} pairs, least, median and greatest of {sum(map(len, sets))} seeds")
    for name, group in labelled(runs).items():
        values = sorted(recalled(run)[pairs] for run in group)
        seconds = sum(run.seconds for run in group) / len(group)
        print(f"  {name:30} {values[0]:.3f} {values[len(values) // 2]:.3f} {values[-1]:.3f}   {seconds:.0f} s per run")
    said: dict[str, Counter[str]] = {}
    for seeds in sets:
        for one in verdicts([run for run in runs if run.seed in seeds]):
            way = "ReBased recalls more" if one.effect.difference > 0 else "ReBased recalls less"
            said.setdefault(one.b, Counter())[way if one.is_decided else "undecided"] += 1
    print(f"conclusions of {len(sets)} sets of seeds:")
    for other, counts in said.items():
        stable = "STABLE" if len(counts) == 1 and "undecided" not in counts else "NOT STABLE"
        print(f"  against {other:30} {', '.join(f'{what}: {n}' for what, n in counts.items())}   {stable}")


def show_all(file: Path) -> None:
    """Print the conclusions from a file of records, one variation after the other."""
    saved = json.loads(file.read_text())
    for variation in dict.fromkeys(record["variation"] for record in saved["runs"]):
        runs = [Run("", record["lines"]) for record in saved["runs"] if record["variation"] == variation]
        show(variation, runs, saved["sets"])


def main() -> None:
    """Train, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--sets", type=int, default=1, help="sets of seeds: each is judged by itself")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds per set")
    parser.add_argument("--variations", nargs="+", default=["plain"], metavar="NAME")
    parser.add_argument("--config", default="demo", help="another sweep, such as one with fewer epochs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as train.epochs=4")
    parser.add_argument("--out", type=Path, default=Path("demo_stability.json"))
    parser.add_argument("--show", type=Path, metavar="FILE", help="train nothing; print the conclusions from this file")
    parser.add_argument("--train", help=argparse.SUPPRESS)  # one run, in the process that this script starts for it
    options = parser.parse_args()
    if options.train:
        return train_here(*json.loads(options.train))
    if options.show:
        return show_all(options.show)
    changes = dict(word.split("=", 1) for word in options.set)
    every = range(FIRST_SEED, FIRST_SEED + options.sets * options.seeds)
    sets = [every[n : n + options.seeds] for n in range(0, len(every), options.seeds)]
    points = load_sweep(find_config(options.config, "sweep"), changes | {"grid.train.seed": str(list(every))}).points
    jobs = [(variation, point.config) for variation in options.variations for point in points]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        futures = [pool.submit(run_one, variation, config, Path(folder)) for variation, config in jobs]
        try:
            records = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for record in records:
        for line in record["lines"]:
            line.pop("norms", None)
    options.out.write_text(json.dumps({"changes": changes, "sets": list(map(list, sets)), "runs": records}))
    print(f"{len(jobs)} runs, {time.perf_counter() - started:.0f} s; wrote {options.out}")
    try:
        show_all(options.out)
    except ImportError as error:
        print(f"{error}; then: python {__file__} --show {options.out}")


if __name__ == "__main__":
    main()
