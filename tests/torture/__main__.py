"""python -m tests.torture: thousands of mutated inputs, each given to a command that must not break.

    python -m tests.torture --seconds 300 --seed 7 [--only manifest]      prints each input that broke a command

An input is a function of the seed and its number, so `--seed 7 --first 1234 --count 1` repeats one.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", REBASED_TRACEBACK="0")

from tests.torture.inputs import hostile_value, mutate_json, mutate_text, mutate_words, mutate_yaml, write
from tests.torture.outcome import Limits, judge, run_forked

RUN: dict[str, Any] = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 40}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 20}],
        "held_out": [],
        "train_seed": 1,
        "seeds": "shared",
    },
    "model": {
        "d_model": 8,
        "n_layers": 2,
        "mlp_ratio": 0,
        "embed_dropout": 0.1,
        "mixers": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4, "eps": 1e-12}],
    },
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99], "device": "cpu"},
}
TEXT_RUN: dict[str, Any] = {
    "data": {"folder": "text", "seq_len": 16},
    "model": {"vocab_size": 257, "d_model": 8, "n_layers": 1, "mixers": [{"name": "based", "n_heads": 2}]},
    "train": {"steps": 2, "batch_size": 2, "lr": 0.01, "warmup_steps": 1, "eval_windows": 2, "final_windows": 2}
    | {"log_every": 1, "clip_norm": 1.0, "device": "cpu"},
}
SWEEP: dict[str, Any] = {"base": RUN, "grid": {"train.seed": [1, 2], "both": [{"train.lr": 0.1, "train.epochs": 2}]}}
MIXERS = ("based", "attention", "sliding_window", "short_conv", "mamba", "rwkv", "hyena", "rebased")
ARGUMENTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "train": (
        ["train", "--config", "run.yaml", "--out", "out", "--train.epochs", "1"],
        (
            "--train.lr",
            "--model.d_model",
            "--model.mixers.1.n_heads",
            "--resume",
            "--import",
            "--out",
            "--task",
            "--wandb",
        ),
    ),
    "lm train": (
        ["lm", "train", "--config", "lm.yaml", "--out", "out", "--train.steps", "1"],
        ("--train.lr", "--data.seq_len", "--model", "--model.n_layers", "--train.batch_size", "--out", "--resume"),
    ),
    "sweep": (
        ["sweep", "sweep.yaml", "--dry-run", "--out", "out"],
        ("--grid.train.seed", "--workers", "--grid", "--train.lr", "--executor", "--import"),
    ),
    "lm eval": (
        ["lm", "eval", "lm-run", "--device", "cpu"],
        (
            "--batch-size",
            "--split",
            "--windows",
            "--seq-len",
            "--json",
            "--data",
            "--precision",
            "--warmup",
            "--stride",
        ),
    ),
    "lm recall": (
        ["lm", "recall", "lm-run", "--facts", "facts.jsonl", "--questions", "2"],
        ("--questions", "--together", "--length", "--seed", "--batch-size", "--squad", "--facts", "--json"),
    ),
    "data prepare": (
        ["data", "prepare", "text.txt", "-o", "out", "--tokenizer", "bytes"],
        ("--shard-tokens", "--workers", "--valid", "--test", "--seed", "--field", "--document-start", "--tokenizer"),
    ),
    "data check": (["data", "check", "text"], ("--split",)),
    "report": (["report", "done", "-o", "out.html"], ("--title", "--reference", "--tables", "--bundle", "--replace")),
    "lm compare": (["lm", "compare", "lm-run"], ("--json",)),
    "configs": (["configs", "mqar/quick"], ("--name",)),
    "params": (["params"], ("--json", "--d-model")),
}


def make_world(folder: Path) -> None:
    """A prepared text, a finished run of each kind and an unfinished one, made by children: this process stays warm."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "it", "rained", "all", "day"]
    (folder / "text.txt").write_text("\n\n".join(" ".join(words[i % 13 :]) for i in range(60)))
    (folder / "facts.jsonl").write_text(
        "\n".join(json.dumps({"context": f"x {i} is", "continuation": f"{i}"}) for i in range(9))
    )
    write(folder / "run.yaml", json.dumps(RUN))
    write(folder / "lm.yaml", json.dumps(TEXT_RUN))
    write(folder / "sweep.yaml", json.dumps(SWEEP))
    for command in (
        ["data", "prepare", "text.txt", "-o", "text", "--tokenizer", "bytes"],
        ["train", "--config", "run.yaml", "--out", "done"],
        ["lm", "train", "--config", "lm.yaml", "--out", "lm-run"],
    ):
        outcome = run_forked(command, folder, Limits(60.0))
        if outcome.code != 0:
            raise SystemExit(f"{command} failed: {outcome}")
    shutil.copytree(folder / "done", folder / "begun")
    (folder / "begun" / "model.safetensors").unlink()
    lines = (folder / "begun" / "record.jsonl").read_text().splitlines()
    (folder / "begun" / "record.jsonl").write_text("".join(f"{line}\n" for line in lines if '"end"' not in line))


def config(random: Random, folder: Path) -> list[str]:
    tree = json.loads(json.dumps(RUN))
    tree["model"]["mixers"][1] = random.choice((tree["model"]["mixers"][1], *MIXERS))
    write(folder / "x.yaml", mutate_yaml(random, tree))
    return ["train", "--config", "x.yaml", "--out", "out"]


def lm_config(random: Random, folder: Path) -> list[str]:
    tree = json.loads(json.dumps(TEXT_RUN))
    tree["model"]["mixers"] = random.choice((tree["model"]["mixers"], [random.choice(MIXERS)]))
    write(folder / "x.yaml", mutate_yaml(random, tree))
    return ["lm", "train", "--config", "x.yaml", "--out", "out"]


def sweep(random: Random, folder: Path) -> list[str]:
    write(folder / "x.yaml", mutate_yaml(random, SWEEP))
    return ["sweep", "x.yaml", "--out", "out", "--dry-run"]


def override(random: Random, folder: Path) -> list[str]:
    keys = (
        "train.lr",
        "train",
        "model.mixers",
        "model.mixers.1",
        "model.mixers.1.n_heads",
        "task.train.0.seq_len",
        "task",
    )
    value = mutate_text(random, "[1, {a: 2}]") if random.random() < 0.3 else str(hostile_value(random))
    return ["train", "--config", "run.yaml", "--out", "out", f"--{random.choice(keys)}={value}".replace("\0", "")]


def arguments(random: Random, folder: Path) -> list[str]:
    words, options = ARGUMENTS[random.choice(list(ARGUMENTS))]
    return mutate_words(random, words, options)


def pointer(random: Random, folder: Path) -> list[str]:
    path = folder / "begun" / "checkpoint.json"
    write(path, mutate_json(random, json.loads(path.read_text())))
    return ["train", "--config", "begun/config.yaml", "--out", "begun", "--resume"]


def saved_config(random: Random, folder: Path) -> list[str]:
    write(folder / "begun" / "config.yaml", mutate_yaml(random, json.loads(json.dumps(RUN))))
    return ["train", "--config", "run.yaml", "--out", "begun", "--resume"]


def manifest(random: Random, folder: Path) -> list[str]:
    path = folder / "text" / "manifest.json"
    write(path, mutate_json(random, json.loads(path.read_text())))
    return random.choice((["data", "check", "text"], ["lm", "train", "--config", "lm.yaml", "--out", "out"]))


def preparation(random: Random, folder: Path) -> list[str]:
    path = folder / "text" / ".prepare.json"
    write(path, mutate_json(random, json.loads(path.read_text())))
    return ["data", "prepare", "text.txt", "-o", "text", "--tokenizer", "bytes", "--resume"]


def weights(random: Random, folder: Path) -> list[str]:
    path = folder / "lm-run" / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if random.random() < 0.6:
        header["__metadata__"]["rebased"] = mutate_json(random, json.loads(header["__metadata__"]["rebased"])).decode(
            errors="replace"
        )
        changed = json.dumps(header).encode()
    else:
        changed = mutate_json(random, header)
    write(path, len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    return ["lm", "eval", "lm-run", "--device", "cpu"]


def jsonl(random: Random, folder: Path) -> list[str]:
    lines = [mutate_json(random, {"text": "some text", "meta": {"a": [1]}}) for _ in range(3)]
    write(folder / "x.jsonl", b'{"text": "first"}\n' + b"\n".join(lines))
    return ["data", "prepare", "x.jsonl", "-o", "out", "--tokenizer", "bytes", "--valid", "0.4", "--test", "0"]


def facts(random: Random, folder: Path) -> list[str]:
    tree = {
        "data": [
            {
                "paragraphs": [
                    {"context": "This is a text of Oslo.", "qas": [{"answers": [{"text": "Oslo", "answer_start": 18}]}]}
                ]
            }
        ]
    }
    write(folder / "x.json", mutate_json(random, tree))
    return ["lm", "recall", "lm-run", "--squad", "x.json", "--questions", "2", "--device", "cpu"]


KINDS: tuple[Callable[[Random, Path], list[str]], ...] = (
    config,
    lm_config,
    sweep,
    override,
    arguments,
    pointer,
    saved_config,
    manifest,
    preparation,
    weights,
    jsonl,
    facts,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after this time")
    parser.add_argument("--count", type=int, default=10**9, help="stop after so many inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[kind.__name__ for kind in KINDS], action="append")
    parser.add_argument("--keep", type=Path, help="folder that gets the files of inputs that broke a command")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.only or kind.__name__ in options.only]
    for module in ("train", "lm_train", "sweep", "lm_eval", "lm_recall", "data", "report", "lm_compare", "params"):
        __import__(f"rebased.cli.{module}")
    __import__("torch._dynamo")  # the optimiser needs it, and its import takes seconds
    limits, broken, number, started = Limits(), 0, options.first, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        world = Path(scratch) / "world"
        world.mkdir()
        make_world(world)
        while number < options.first + options.count and time.monotonic() - started < options.seconds:
            random = Random(f"{options.seed} {number}")
            folder = Path(scratch) / "case"
            shutil.copytree(world, folder)
            kind = random.choice(kinds)
            words = kind(random, folder)
            outcome = run_forked(words, folder, limits)
            if problem := judge(outcome, limits):
                broken += 1
                print(
                    f"{number} {kind.__name__}: {problem}\n  {' '.join(words)[:300]!r}\n  ...{outcome.output[-700:]!r}",
                    flush=True,
                )
                if options.keep:
                    shutil.copytree(folder, options.keep / f"{options.seed}-{number}", dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            number += 1
    print(f"{number - options.first} inputs, {broken} broke a command (seed {options.seed})")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
