"""Trains a few small runs with two versions of the code, and says whether all results are the same to the bit.

    python benchmarks/same_results.py 782dd77                    that commit against the working tree
    python benchmarks/same_results.py 782dd77 --known FILE       the same; the commit's results are kept in FILE

Compared are the trained weights, byte by byte, and the records, less times, speeds, machine, code version and execution
settings. Configs are compared by their digests: a field may have been added since.
The runs go through the command line, so that everything below it may be rearranged: use it after a refactoring.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIFFERS = (
    "seconds",
    "sha256",  # of the whole record, times included
    "test_seconds",
    "tokens_per_second",
    "mfu",
    "code",
    "machine",
    "how",
    "execution",
    "processes",
    "config",
)

MQAR = """
task:
  vocab_size: 32
  train: [{seq_len: 16, kv_pairs: 3, examples: 200}, {seq_len: 24, kv_pairs: 4, examples: 120}]
  test: [{seq_len: 16, kv_pairs: 3, examples: 50}, {seq_len: 24, kv_pairs: 5, examples: 30}]
  held_out: [{seq_len: 16, kv_pairs: 3, examples: 20}]
model: {preset: PRESET, d_model: 24}
train: {epochs: 3, batch_size: 32, lr: 1e-2, device: cpu, micro_batch: 20, SETTINGS}
"""

TEXT = """
data: {folder: FOLDER, seq_len: 48}
model: {vocab_size: 257, d_model: 24, n_layers: 2, mixers: [short_conv, {name: MIXER, n_heads: 2}], mlp_ratio: 2,
        embed_dropout: 0.1}
train: {steps: 23, batch_size: 6, micro_batch: 4, lr: 1e-2, warmup_steps: 5, log_every: 7, eval_every: 5,
        eval_windows: 20, final_windows: 30, checkpoint_every: 9, device: cpu}
"""

SWEEP = """
base:
  task: {vocab_size: 32, train: [{seq_len: 16, kv_pairs: 2, examples: 100}],
         test: [{seq_len: 16, kv_pairs: 2, examples: 20}]}
  model: {preset: based, d_model: 12}
  train: {epochs: 2, batch_size: 20, device: cpu}
grid:
  train.seed: [42, 43]
  train.lr: [1e-3, 1e-2]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="a commit to compare the working tree with")
    parser.add_argument("--known", type=Path, help="JSON file with that commit's results, written where it is missing")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if words.known and words.known.exists():
            former = json.loads(words.known.read_text())
        else:
            former = results_of(words.commit, scratch)
            if words.known:
                words.known.write_text(json.dumps(former))
        today = train_all(ROOT / "src", scratch / "today")
    differences = [key for key in sorted(former.keys() | today.keys()) if former.get(key) != today.get(key)]
    for key in differences:
        print(f"differs: {key}")
        for a, b in zip(former.get(key) or [], today.get(key) or [], strict=False):
            if a != b:
                print(f"  {a}\n  {b}"[:400])
    print(f"{len(former)} files compared, {len(differences)} differ")
    return 1 if differences else 0


def results_of(commit: str, scratch: Path) -> dict[str, Any]:
    tree = scratch / "former-tree"
    subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), commit], cwd=ROOT, check=True)
    try:
        return train_all(tree / "src", scratch / "former")
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def train_all(source: Path, folder: Path) -> dict[str, Any]:
    """The weights and records of all runs, by path."""
    folder.mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "it", "rained", "all", "day"]
    text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(6000))
    (folder / "text.txt").write_text("\n\n".join(text[i : i + 400] for i in range(0, len(text), 400)))
    call(source, folder, "data", "prepare", "text.txt", "-o", "text", "--tokenizer", "bytes")
    settings = {
        "rebased": "seed: 42",
        "based": "precision: bf16",
        "conv_attention": "protocol: held_out",
        "mamba": "seed: 7",
        "rwkv": "seed: 3",
        "conv_rwkv": "precision: bf16",
    }
    for preset, more in settings.items():
        file = folder / f"{preset}.yaml"
        file.write_text(MQAR.replace("PRESET", preset).replace("SETTINGS", more))
        call(source, folder, "train", "--config", file.name, "--out", f"runs/{preset}")
    for mixer in ("rebased", "attention"):
        file = folder / f"lm-{mixer}.yaml"
        file.write_text(TEXT.replace("FOLDER", "text").replace("MIXER", mixer))
        call(source, folder, "lm", "train", "--config", file.name, "--out", f"runs/lm-{mixer}")
    (folder / "sweep.yaml").write_text(SWEEP)
    call(source, folder, "sweep", "sweep.yaml", "--out", "runs/sweep")
    found: dict[str, Any] = {}
    for path in sorted((folder / "runs").rglob("*")):
        key = str(path.relative_to(folder))
        if path.name == "model.safetensors":
            found[key] = contents(path.read_bytes())
        elif path.name == "record.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[key] = [{k: v for k, v in line.items() if k not in DIFFERS} for line in lines]
    return found


def contents(model: bytes) -> list[Any]:
    """The config, the names, dtypes and shapes, and the checksum of the weights of a model.safetensors."""
    start = 8 + int.from_bytes(model[:8], "little")
    header = json.loads(model[8:start])
    about = json.loads(header.pop("__metadata__")["rebased"])
    return [about["model"], header, hashlib.sha256(model[start:]).hexdigest()]


def call(source: Path, folder: Path, *words: str) -> None:
    code = f"from rebased.cli import main; main({list(words)!r})"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
