"""Attention, Based and ReBased of one small size on enwik8: the same tokens in the same order, several seeds.

    rebased data prepare enwik8.xz -o data/enwik8 --tokenizer 20B_tokenizer.json --split train=90MB,valid=5MB,test=5MB
    PYTHONPATH=src python benchmarks/enwik8.py --minutes 9                    nine runs
    PYTHONPATH=src python benchmarks/enwik8.py --seeds 42 --train.steps 20    any setting, as in `rebased lm train`
    rebased lm compare runs/enwik8/enwik8.jsonl.gz                            its table, from the records alone

The runs are lm/enwik8-{attention,based,rebased}, seed by seed, in one process, so that each kind of block
is compiled once. A run that is done is not repeated; none is begun that would not end in time. Leaves a folder a run
under --out and all of their records in one small file, enwik8.jsonl.gz, written anew after each; weights and
checkpoints of runs that are done are removed unless --keep.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from rebased.cli.overrides import parse_overrides
from rebased.config import load_config
from rebased.models.weights import WEIGHTS
from rebased.report.language_models import compare_language_models
from rebased.runs.collect import collect, is_text, write_bundle
from rebased.runs.lm_config import TextRunConfig
from rebased.runs.shipped import find_config
from rebased.train.lm import TextSink, train_text
from rebased.train.synthetic.loop import Diverged

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
            run = load_config(
                TextRunConfig, find_config(f"enwik8-{model}", "lm"), overrides | {"train.seed": str(seed)}
            )
            try:
                result = train_text(run, args.out / name, resume=True, sinks=[Say(name)])
            except Diverged as error:  # the others go on, and the table says that this one is missing
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if result.status == "interrupted":
                raise SystemExit(f"{name}: interrupted at step {result.step}, saved; type the command again to go on")
            if result.status == "done":
                took.append(time.monotonic() - begun)
            if not args.keep:
                remove_weights(args.out / name)
            records = sorted(args.out.glob("*-*/record.jsonl"))
            write_bundle(collect(records, wanted=is_text).runs, bundle)
    if bundle.exists():
        print(compare_language_models(collect([bundle], wanted=is_text).runs).to_markdown(), end="")
    return bundle


def remove_weights(folder: Path) -> None:
    """What is large; the config, the record and its end stay, so the run counts as done."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / "checkpoint.json").unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
