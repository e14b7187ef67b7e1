"""python -m tests.torture: mutated inputs, kills and full disks; commands must not break, and results must be the same.

    python -m tests.torture --minutes 5 --seed 7 [--only manifest]        prints each trial that broke something

A trial is a function of the seed and its number, so `--seed 7 --first 1234 --count 1` repeats one.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from xml.etree import ElementTree

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", REBASED_TRACEBACK="0")

from tests.torture.edges import EDGES, MISSING, Case, is_installed
from tests.torture.inputs import hostile_value, mutate_json, mutate_text, mutate_words, mutate_yaml, write
from tests.torture.kills import SCENARIOS, make_reference, run_trial, write_configs
from tests.torture.outcome import Limits, judge, run_forked

from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.shipped import find_config

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
    "data verify": (["data", "verify", "text"], ("--split",)),
    "report": (["report", "done", "-o", "out.html"], ("--title", "--reference", "--tables", "--bundle", "--replace")),
    "lm compare": (["lm", "compare", "lm-run"], ("--json",)),
    "lm generate": (
        ["lm", "generate", "lm-run", "--prompt", "the", "--max-tokens", "4"],
        ("--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--n", "--stop", "--file"),
    ),
    "probe": (
        ["probe", "done", "--device", "cpu"],
        ("--examples", "--split", "--windows", "--seq-len", "-o", "--json"),
    ),
    "paper": (["paper", "bundle.jsonl.gz"], ("-o", "--json", "--quiet")),
    "suite": (["suite", "suite.yaml", "--known", "bundle.jsonl.gz"], ("-o", "--json", "--for", "--workers")),
    "configs": (["list", "configs", "mqar/quick"], ("--name",)),
    "params": (["paper", "--params"], ("--json", "-o")),
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
    # A name of its own: the shipped results of `quick` would take most of a trial's time.
    write(folder / "suite.yaml", find_config(Path("quick"), "suite").read_text())
    write_configs(folder)
    for command in (
        ["data", "prepare", "text.txt", "-o", "text", "--tokenizer", "bytes"],
        ["train", "--config", "run.yaml", "--out", "done"],
        ["lm", "train", "--config", "lm.yaml", "--out", "lm-run"],
        ["probe", "done", "--device", "cpu", "--json", "probes.json"],
        ["report", "done", "-o", "report.html", "--bundle", "bundle.jsonl.gz"],
        *([["lm", "export", "lm-run", "-o", "exported"]] if is_installed("exported") else []),
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


def mutate_safetensors(random: Random, path: Path) -> None:
    """Change the header of a safetensors file, or what it says of us, or some bytes of its tensors."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    key = random.choice(list(header["__metadata__"]))
    if random.random() < 0.2:
        at = random.randrange(len(tensors))
        tensors[at : at + 8] = random.randbytes(8)
        changed = json.dumps(header).encode()
    elif random.random() < 0.7:
        try:
            text = mutate_json(random, json.loads(header["__metadata__"][key])).decode(errors="replace")
        except ValueError:
            text = mutate_text(random, header["__metadata__"][key])
        header["__metadata__"][key] = text
        changed = json.dumps(header).encode()
    else:
        changed = mutate_json(random, header)
    write(path, len(changed).to_bytes(8, "little") + changed + bytes(tensors))


def weights(random: Random, folder: Path) -> list[str]:
    mutate_safetensors(random, folder / "lm-run" / "model.safetensors")
    return ["lm", "eval", "lm-run", "--device", "cpu"]


def prompts(random: Random, folder: Path) -> list[str]:
    lines = [mutate_json(random, {"prompt": "the quick", "id": 1}) for _ in range(3)]
    write(folder / "x.jsonl", b"\n".join(lines))
    return ["lm", "generate", "lm-run", "--file", "x.jsonl", "--max-tokens", "2"]


def probes(random: Random, folder: Path) -> list[str]:
    write(folder / "x.json", mutate_json(random, json.loads((folder / "probes.json").read_text())))
    return random.choice((["probe", "x.json", "-o", "out.html"], ["paper", "x.json", "-o", "out.html"]))


def bundle(random: Random, folder: Path) -> list[str]:
    lines = [json.loads(line) for line in gzip.decompress((folder / "bundle.jsonl.gz").read_bytes()).splitlines()]
    at = random.randrange(len(lines))
    changed = [mutate_json(random, line) if n == at else json.dumps(line).encode() for n, line in enumerate(lines)]
    packed = gzip.compress(b"\n".join(changed) + b"\n")
    write(folder / "x.jsonl.gz", packed[: random.randrange(len(packed))] if random.random() < 0.1 else packed)
    verb = random.choice((["report"], ["paper"], ["suite", "suite.yaml", "--known"]))
    return [*verb, "x.jsonl.gz", "-o", "out" if "suite" in verb else "out.html"]


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


Kind = Callable[[Random, Path], list[str] | Case]
KINDS: tuple[Kind, ...] = (
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
    prompts,
    probes,
    bundle,
    *EDGES,
)
WRITTEN = (".html", ".md", ".tex", ".csv", ".svg")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def warm_up() -> None:
    """Import what commands need, so that children fork with it. Nothing may be computed here."""
    for module in (
        "train",
        "lm_train",
        "sweep",
        "lm_eval",
        "lm_recall",
        "data",
        "report",
        "lm_compare",
        "lm_generate",
        "suite",
        "probe",
        "paper",
        "lm_serve",
        "lm_export",
        "lm_import",
    ):
        __import__(f"rebased.cli.{module}")
    for module, kind in (("rebased.serve.server", "requests"), ("rebased.models.hf", "exported")):
        if is_installed(kind):
            __import__(module)
    __import__("torch._dynamo")  # the optimiser needs it, and its import takes seconds


class Tally(NamedTuple):
    """How many trials of one kind there were, and how many of them broke something."""

    trials: Counter[str]
    broken: Counter[str]

    def lines(self) -> Iterator[str]:
        """One line per kind."""
        for kind in sorted(self.trials):
            yield f"{kind:<32} {self.trials[kind]:>7,} {self.broken[kind]:>7,}"


def try_input(random: Random, kinds: Sequence[Kind], folder: Path) -> tuple[str, str | None]:
    """Give a command a mutated input. Returns the kind, and what broke."""
    kind = random.choice(kinds)
    case = kind(random, folder)
    words, prepare = case if isinstance(case, Case) else (case, None)
    outcome = run_forked(words, folder, Limits(), prepare=prepare)
    problem = judge(outcome, Limits()) or look_at_files(folder)
    said = f"{problem}\n  {' '.join(words)[:300]!r}\n  ...{outcome.output[-700:]!r}" if problem else None
    return f"input: {kind.__name__}", said


def look_at_files(folder: Path) -> str | None:
    """What is wrong with the reports in "out" and "out.html": a control character, or a figure that is no XML."""
    for path in (file for file in [folder / "out.html", *folder.glob("out/*")] if file.suffix in WRITTEN):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found := CONTROL.search(text):
            return f"{path.name} holds {found.group()!r}"
        try:
            [ElementTree.fromstring(svg) for svg in re.findall("<svg .*?</svg>", text, flags=re.DOTALL)]
        except ElementTree.ParseError as error:
            return f"{path.name}: {error}"
    return None


def where_from() -> dict[str, Any]:
    """The command, the code and the machine, for a record."""
    import torch

    words = sys.argv[1:]
    if "--keep" in words:  # where a user keeps files says nothing about the trials
        at = words.index("--keep")
        del words[at : at + 2]
    command = " ".join(["python -m tests.torture", *words])
    return {"command": command, "code": describe_code(), "machine": describe_machine(torch.device("cpu"))}


def main() -> int:
    """Run trials until the time is over; print what broke, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="stop after this time")
    parser.add_argument("--count", type=int, default=10**9, help="stop after so many trials")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    names = [kind.__name__ for kind in KINDS] + [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", choices=names, action="append", help="kinds of inputs, and commands to kill")
    parser.add_argument("--kills", type=float, default=0.5, help="share of the trials that are kills and full disks")
    parser.add_argument("--workers", action="store_true", help="also kill commands that start processes; seconds each")
    parser.add_argument("--keep", type=Path, help="folder that gets the files of trials that broke something")
    parser.add_argument("--record", type=Path, help="new JSON file for the table")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.only or kind.__name__ in options.only]
    for kind in [kind for kind in kinds if not is_installed(kind.__name__)]:
        print(f"left out: {kind.__name__}, which needs rebased[{MISSING[kind.__name__]}]")
        kinds.remove(kind)
    scenarios = [each for each in SCENARIOS if not options.only or each.name in options.only]
    scenarios = [each for each in scenarios if options.workers or not each.workers]
    warm_up()
    tally, number, began = Tally(Counter(), Counter()), options.first, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        world, folder = Path(scratch) / "world", Path(scratch) / "case"
        world.mkdir()
        make_world(world)
        reference = cache(lambda scenario: make_reference(scenario, world, Path(scratch)))
        while number < options.first + options.count and time.monotonic() - began < 60 * options.minutes:
            random = Random(f"{options.seed} {number}")
            if scenarios and (not kinds or random.random() < options.kills):
                scenario = random.choice(scenarios)
                kind, problem = run_trial(scenario, reference(scenario), random, world, folder)
            else:
                shutil.copytree(world, folder)
                kind, problem = try_input(random, kinds, folder)
            tally.trials[kind] += 1
            if problem:
                tally.broken[kind] += 1
                print(f"{number} {kind}: {problem}", flush=True)
                if options.keep:
                    shutil.copytree(folder, options.keep / f"{options.seed}-{number}", dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            number += 1
    print(f"{'kind':<32} {'trials':>7} {'broken':>7}", *tally.lines(), sep="\n")
    print(f"{tally.trials.total():,} trials, {tally.broken.total()} broke something (seed {options.seed})")
    if options.record:
        about = {"seed": options.seed, "first": options.first, "minutes": options.minutes}
        counts = {"trials": dict(sorted(tally.trials.items())), "broken": dict(sorted(tally.broken.items()))}
        options.record.write_text(json.dumps(about | counts | where_from(), indent=1) + "\n")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
