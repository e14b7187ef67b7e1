"""Attention, Based and ReBased of one small size on enwik8: the same tokens in the same order, several seeds.

    rebased data prepare enwik8.xz -o data/enwik8 --tokenizer 20B_tokenizer.json --split train=90MB,valid=5MB,test=5MB
    PYTHONPATH=src python benchmarks/enwik8.py --minutes 9                    nine runs
    PYTHONPATH=src python benchmarks/enwik8.py --seeds 42 --train.steps 20    any setting, as in `rebased lm train`

The runs are configs/lm/enwik8-{attention,based,rebased}.yaml, seed by seed, in one process, so that each kind of block
is compiled once. A run that is done is not repeated; none is begun that would not end in time. Leaves a folder a run
under --out and all of their records in one small file, enwik8.jsonl.gz, written anew after each; weights and
checkpoints of runs that are done are removed unless --keep.
"""

import argparse
import gzip
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from rebased.atomic import replacing
from rebased.cli.overrides import parse_overrides
from rebased.config import load_config
from rebased.train import read_record
from rebased.train.text import TextRunConfig, TextSink, train_text
from rebased.train.weights import WEIGHTS

CONFIGS = Path(__file__).parents[1] / "configs" / "lm"
MODELS = ("rebased", "attention", "based")
SEEDS = (42, 43, 44)


class Say(TextSink):
    """A line a report would be too many for nine runs: one in ten, and every evaluation."""

    def __init__(self, name: str) -> None:
        self.name, self.reports = name, 0

    def report(self, line: dict[str, float]) -> None:
        self.reports += 1
        if self.reports % 10 == 0:
            self._say(f"step {line['step']}  loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tokens/s")

    def evaluation(self, line: dict[str, float]) -> None:
        self._say(f"step {line['step']}  valid perplexity {line['perplexity']:.3f}")

    def _say(self, text: str) -> None:
        print(f"{self.name:14} {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all runs together")
    parser.add_argument("--out", type=Path, default=Path("runs") / "enwik8", metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep weights and checkpoints")
    args, settings = parser.parse_known_args(words)
    overrides = parse_overrides(settings, [])
    torch._dynamo.config.recompile_limit = 64  # kinds of blocks, not of shapes: each is compiled once
    start, took, bundle = time.monotonic(), [], args.out / "enwik8.jsonl.gz"
    for seed in args.seeds:
        for model in args.models:
            name = f"{model}-{seed}"
            if time.monotonic() - start + max(took, default=0.0) > 60 * args.minutes:
                print(f"{name}: not begun, the time is over", file=sys.stderr)
                continue
            begun = time.monotonic()
            run = load_config(TextRunConfig, CONFIGS / f"enwik8-{model}.yaml", overrides | {"train.seed": str(seed)})
            result = train_text(run, args.out / name, resume=True, sinks=[Say(name)])
            if result.status == "interrupted":
                raise SystemExit(f"{name}: interrupted at step {result.step}, saved; type the command again to go on")
            if result.status == "done":
                took.append(time.monotonic() - begun)
            if not args.keep:
                remove_weights(args.out / name)
            write_bundle(args.out, bundle)
    show(args.out)
    return bundle


def remove_weights(folder: Path) -> None:
    """What is large; the config, the record and its end stay, so the run counts as done."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / "checkpoint.json").unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)


def write_bundle(out: Path, path: Path) -> None:
    """All records one after another, each begun by a line that names its folder."""
    lines = []
    for folder in sorted(out.glob("*-*/record.jsonl")):
        lines += [{"type": "folder", "folder": folder.parent.name}, *read_record(folder)]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with replacing(path) as file:
        file.write(gzip.compress(text, mtime=0))


def show(out: Path) -> None:
    """Mean perplexities over the seeds, from the records' last lines."""
    print(f"{'model':12}{'seeds':>6}{'all':>10}{'AR':>10}{'non-AR':>10}{'AR share':>10}{'tokens/s':>12}")
    for model in MODELS:
        records = [read_record(path) for path in sorted(out.glob(f"{model}-*/record.jsonl"))]
        ends = [lines[-1] for lines in records if lines[-1]["type"] == "end" and lines[-1]["status"] == "done"]
        if not ends:
            continue
        split = "test" if "test" in ends[0] else "valid"
        cells = [statistics.mean(end[split][part]["perplexity"] for end in ends) for part in ("all", "ar", "non_ar")]
        speeds = [line["tokens_per_second"] for lines in records for line in lines if line["type"] == "step"]
        share = ends[0][split]["ar_share"]
        numbers = "".join(f"{cell:>10.3f}" for cell in (*cells, share))
        print(f"{model:12}{len(ends):>6}{numbers}{statistics.median(speeds):>12,.0f}")


if __name__ == "__main__":
    main()
