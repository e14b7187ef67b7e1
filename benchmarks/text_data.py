"""How fast text becomes tokens on one core, ours beside the library's own way, and that both give the same tokens.

    python benchmarks/text_data.py enwik8.xz --tokenizer 20B_tokenizer.json.xz

Seconds are this process's time on a core, with one thread, so that what else the machine does counts little. Prints a
table and writes benchmarks/results/text_data-<date>.json.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # before the library starts its threads

import numpy as np
import torch

from rebased.data import PrepareConfig, prepare
from rebased.data.encode_chunks import PART, read_parts
from rebased.data.sources import open_text
from rebased.data.tokenizer import JsonTokenizer, load_tokenizer
from rebased.runs.provenance import describe_code, describe_machine

RESULTS = Path(__file__).parent / "results"
LIBRARY_BYTES = 10 * 10**6  # the library is slow, and its speed does not change on the way


def read(path: Path) -> Iterator[bytes]:
    with open_text(path) as (stream, _):
        yield from read_parts(stream)


def rate(parts: list[bytes], seconds: float) -> float:
    return sum(map(len, parts)) / 1e6 / seconds


def encode_ours(path: Path, tokenizer: JsonTokenizer, rows: list[dict[str, Any]]) -> list[np.ndarray]:
    """From cold, words learnt on the way; then the last tenth again by itself: what a long job settles to."""
    parts = list(read(path))
    found, times = [], []
    for part in parts:
        begin = time.process_time()
        found += tokenizer.encode_many([part])
        times.append(time.process_time() - begin)
    tail = max(1, len(parts) // 10)
    rows.append({"what": "ours, from cold", "mb_per_s": rate(parts, sum(times))})
    rows.append({"what": "ours, the last tenth", "mb_per_s": rate(parts[-tail:], sum(times[-tail:]))})
    return found


def encode_library(path: Path, tokenizer: JsonTokenizer, ours: list[np.ndarray], rows: list[dict[str, Any]]) -> None:
    parts = list(read(path))[: max(1, LIBRARY_BYTES // PART)]
    engine = tokenizer._tokenizer
    begin = time.process_time()
    found = engine.encode_batch_fast([part.decode(errors="replace") for part in parts], add_special_tokens=False)
    rows.append({"what": "tokenizers, the same parts", "mb_per_s": rate(parts, time.process_time() - begin)})
    lines = [line for part in parts for line in part.decode(errors="replace").splitlines(keepends=True)]
    begin = time.process_time()
    engine.encode_batch_fast(lines, add_special_tokens=False)
    rows.append({"what": "tokenizers, line by line", "mb_per_s": rate(parts, time.process_time() - begin)})
    for mine, theirs in zip(ours, found, strict=False):
        if mine.tolist() != theirs.ids:
            raise SystemExit("ours differs from the library; no number is worth anything then")


def prepare_whole(path: Path, tokenizer: str, rows: list[dict[str, Any]]) -> int:
    """The whole command with one worker: unpacking, encoding, hashing, writing."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        config = PrepareConfig(sources=(str(path),), tokenizer=tokenizer, split=("train=1",))
        manifest = prepare(config, Path(folder) / "out")
        split = manifest.splits["train"]
        rows.append(
            {
                "what": "prepare, one worker, all of it",
                "mb_per_s": (split.text_bytes or 0) / 1e6 / (time.process_time() - begin),
            }
        )
        return split.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast text becomes tokens on one core.")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", required=True)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    if not isinstance(tokenizer, JsonTokenizer):
        raise SystemExit("bytes need no measuring; name a tokenizer.json")
    rows: list[dict[str, Any]] = []
    ours = encode_ours(arguments.text, tokenizer, rows)
    encode_library(arguments.text, tokenizer, ours, rows)
    tokens = prepare_whole(arguments.text, arguments.tokenizer, rows)
    load = os.getloadavg()[0]
    for row in rows:
        print(f"{row['what']:32} {row['mb_per_s']:6.2f} MB/s a core")
    print(f"{tokens:,} tokens; load of the machine {load:.1f}")
    now = datetime.now(UTC)
    record = {
        "benchmark": "text_data",
        "time": now.isoformat(timespec="seconds"),
        "code": describe_code(),
        "machine": describe_machine(torch.device("cpu")),
        "load": load,
        "text": arguments.text.name,
        "tokenizer": tokenizer.name,
        "tokens": tokens,
        "results": rows,
    }
    path = RESULTS / f"text_data-{now:%Y-%m-%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
