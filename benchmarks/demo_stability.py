"""Does the page of `rebased demo` say the same on every CPU? Its models, with many seeds, under small disturbances.

    PYTHONPATH=src python benchmarks/demo_stability.py --jobs 16
    PYTHONPATH=src python benchmarks/demo_stability.py --variations plain avx2+threads2 ulp1 --set train.lr=1e-2

A variation is `plain` or a sum of: `default`, `avx2` or `avx512` (ATEN_CPU_CAPABILITY; a CPU without it ignores it),
`threadsN` (N threads per run; the demo has one), and `ulpN` (a random half of the initial weights is moved by one unit
in the last place; N seeds the choice). The last one stands for another CPU, which rounds sums differently.
Every run has a process of its own, so that its environment is set before torch is imported.

Printed last: per variation and model the epochs until the page's mark and the best accuracy, each as min, median and
max over seeds; then which model of each pair was sooner, and what the page would say of the first two models, for every
group of consecutive seeds that is as large as the demo's. The records of all runs go into a JSON file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.resources import files
from itertools import combinations
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rebased.runs.finished import Run

CAPABILITIES = ("default", "avx2", "avx512")
VARIATIONS = ("plain", "default", "avx2", "avx512", "threads2", "ulp1", "ulp2", "avx2+threads2+ulp3")


class Variation(NamedTuple):
    name: str
    capability: str | None = None
    threads: int = 1
    ulp: int | None = None  # the seed of the disturbance; None: weights stay as they were initialised


class Job(NamedTuple):
    variation: Variation
    model: str
    seed: int


def parse_variation(name: str) -> Variation:
    """The variation that a word such as avx2+threads2+ulp1 names."""
    found = Variation(name)
    for part in name.split("+"):
        kind, number = part.rstrip("0123456789"), part[len(part.rstrip("0123456789")) :]
        if part in CAPABILITIES:
            found = found._replace(capability=part)
        elif kind == "threads" and number:
            found = found._replace(threads=int(number))
        elif kind == "ulp" and number:
            found = found._replace(ulp=int(number))
        elif part != "plain":
            raise SystemExit(
                f"unknown variation {part!r}; known: plain, {', '.join(CAPABILITIES)}, threads2, ulp1, ..."
            )
    return found


def train_here(config: Path, overrides: Mapping[str, str], folder: Path, threads: int, ulp: int | None) -> None:
    """Train one run in this process, with the settings of the demo's own processes but for what varies."""
    import torch

    from rebased.config import load_config
    from rebased.runs.synthetic_config import SyntheticRunConfig
    from rebased.train import train

    torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(False)
    if ulp is not None:
        disturb_new_models(ulp)
    train(load_config(SyntheticRunConfig, config, overrides), folder)


def disturb_new_models(seed: int) -> None:
    """From here on a random half of the weights of every new model is one unit in the last place larger."""
    import torch

    from rebased.models import LanguageModel

    initialise = LanguageModel.__init__

    def initialise_and_disturb(model: LanguageModel, *arguments: Any) -> None:
        initialise(model, *arguments)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                chosen = torch.rand(weight.shape, generator=generator) < 0.5
                weight.copy_(torch.where(chosen, weight.nextafter(torch.tensor(torch.inf)), weight))

    LanguageModel.__init__ = initialise_and_disturb  # type: ignore[method-assign]


def run_job(job: Job, config: Path, changes: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """The record's lines of one run, trained in a process of its own."""
    out = folder / f"{job.variation.name}-{job.model}-{job.seed}"
    overrides = {**changes, "model.preset": job.model, "train.seed": str(job.seed)}
    work = [str(config), overrides, str(out), job.variation.threads, job.variation.ulp]
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    environment |= {"OMP_NUM_THREADS": str(job.variation.threads), "MKL_NUM_THREADS": str(job.variation.threads)}
    if job.variation.capability:
        environment["ATEN_CPU_CAPABILITY"] = job.variation.capability
    started = time.perf_counter()
    command = [sys.executable, __file__, "--train", json.dumps(work)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{out.name} failed:\n{answer.stderr[-2000:]}")
    lines = [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]
    return {
        "variation": job.variation.name,
        "model": job.model,
        "seed": job.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "lines": lines,
    }


def run_all(jobs: Sequence[Job], at_once: int, config: Path, changes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The records of all jobs. Those with several threads run fewer at once, after the others."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in sorted({job.variation.threads for job in jobs}):
            group = [job for job in jobs if job.variation.threads == threads]
            with ThreadPoolExecutor(max(1, at_once // threads)) as pool:
                futures = [pool.submit(run_job, job, config, changes, Path(folder)) for job in group]
                try:
                    for future in as_completed(futures):
                        records.append(future.result())
                        progress(records[-1], len(records), len(jobs))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    order = {(job.variation.name, job.model, job.seed): n for n, job in enumerate(jobs)}
    return sorted(records, key=lambda record: order[record["variation"], record["model"], record["seed"]])


def progress(record: Mapping[str, Any], done: int, of: int) -> None:
    accuracies = [line["test"]["accuracy"] for line in record["lines"] if line["type"] == "epoch"]
    name = f"{record['variation']} {record['model']} seed {record['seed']}"
    curve = " ".join(f"{accuracy:.2f}" for accuracy in accuracies)
    print(f"{done:4}/{of}  {record['seconds']:5.1f} s  {name}: {curve}", file=sys.stderr, flush=True)


def show(records: Sequence[Mapping[str, Any]], group_size: int) -> None:
    """Print two tables: numbers per model, then how often the page would say what."""
    from rebased.report.demo import MARK, compare
    from rebased.runs.finished import Run, by_model

    variations = list(dict.fromkeys(record["variation"] for record in records))
    runs = {
        name: [Run("", record["lines"]) for record in records if record["variation"] == name] for name in variations
    }
    print(f"\n{'variation':20} {'model':14} {f'epochs to {MARK:g}':>17} {'never':>6}   best accuracy")
    for name in variations:
        for model, group in by_model(runs[name]).items():
            reached = [run.epochs_until(MARK) for run in group]
            epochs = sorted(n or inf for n in reached)
            shown = " ".join(
                f"{n if n < inf else 'never':>5}" for n in (epochs[0], epochs[len(epochs) // 2], epochs[-1])
            )
            best = sorted(run.best.accuracy for run in group)
            accuracy = f"{best[0]:.3f}  {best[len(best) // 2]:.3f}  {best[-1]:.3f}"
            print(f"{name:20} {model:14} {shown} {reached.count(None):6}   {accuracy}")
    print(f"\nsooner, later, equal over all seeds; what the page says over each {group_size} consecutive seeds")
    said = Counter[str]()
    for name in variations:
        groups = by_model(runs[name])
        for n, (a, b) in enumerate(combinations(groups, 2)):
            pair = compare(groups, a, b)
            line = f"{name:20} {f'{pair.one} before {pair.other}':30} {pair.sooner:3} {pair.later:3} {pair.equal:3}"
            verdicts = page_verdicts(groups, a, b, group_size) if n == 0 else Counter()  # the one that the page tests
            print(line, ", ".join(f"{verdict}: {times}" for verdict, times in verdicts.items()))
            said += verdicts
    print("STABLE:" if len(said) == 1 else "NOT STABLE:", dict(said))


def page_verdicts(groups: Mapping[str, Sequence["Run"]], a: str, b: str, size: int) -> Counter[str]:
    """What the page would say of two models, for every `size` consecutive seeds."""
    from rebased.report.demo import compare

    seeds = sorted({run.seed for group in groups.values() for run in group})
    said = Counter[str]()
    for first in range(max(1, len(seeds) - size + 1)):
        chosen = seeds[first : first + size]
        pair = compare({name: [run for run in groups[name] if run.seed in chosen] for name in (a, b)}, a, b)
        said[f"{pair.one} sooner" if pair.is_decided else "undecided"] += 1
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cores to use")
    parser.add_argument("--seeds", type=int, default=10, help="runs per model and variation, from seed 42 on")
    parser.add_argument("--group", type=int, help="seeds per page; default: the demo's own number")
    parser.add_argument("--variations", nargs="+", default=VARIATIONS, metavar="NAME")
    parser.add_argument("--models", nargs="+", metavar="PRESET", help="default: the demo's")
    parser.add_argument("--config", type=Path, help="default: the demo's own")
    parser.add_argument("--lr", help="short for --set train.lr=LR")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as train.epochs=12")
    parser.add_argument("--out", type=Path, default=Path("demo_stability.json"))
    parser.add_argument("--train", help=argparse.SUPPRESS)  # one job, in the process that this script starts for it
    options = parser.parse_args()
    if options.train:
        config, overrides, folder, threads, ulp = json.loads(options.train)
        return train_here(Path(config), overrides, Path(folder), threads, ulp)

    from rebased.cli.demo import FIRST_SEED, MODELS, SEEDS

    config = options.config or Path(str(files("rebased") / "configs" / "demo.yaml"))
    changes = dict(word.split("=", 1) for word in options.set) | ({"train.lr": options.lr} if options.lr else {})
    variations = [parse_variation(name) for name in options.variations]
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    models = options.models or MODELS
    jobs = [Job(variation, model, seed) for variation in variations for seed in seeds for model in models]
    started = time.perf_counter()
    records = run_all(jobs, options.jobs, config, changes)
    options.out.write_text(json.dumps({"config": config.read_text(), "changes": changes, "records": records}))
    show(records, options.group or SEEDS)
    print(f"{len(jobs)} runs, {time.perf_counter() - started:.0f} s, {changes or 'no changes'}; wrote {options.out}")


if __name__ == "__main__":
    main()
