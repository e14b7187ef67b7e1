"""How fast text becomes token ids: `rebased data prepare`'s encoder (tiktoken) beside the `tokenizers` library alone.

    python benchmarks/text_data.py enwik8.xz --tokenizer gpt2.tokenizer.json.xz --megabytes 20

Both encoders get the same chunks of text and return uint32 arrays. The benchmark stops if their token ids differ. Each
measurement runs in new processes, and the fastest of `--repeats` counts. Rows:

- one thread: one process with one thread;
- all threads: one process, threads of the library itself;
- all processes: one process per core, each encoding the whole text. This is how `rebased data prepare` works.

MB/s is wall time; MB/core s is CPU time, which depends less on what else the machine does. "last tenth" is the CPU time
of the end of the text alone.

Use an idle machine. Prints a table last and writes benchmarks/results/text_data-<date>.json.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing.managers import SyncManager
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.data import PrepareConfig, prepare
from rebased.data.encode_chunks import read_chunks
from rebased.data.sources import open_text
from rebased.data.tokenizer import JsonTokenizer, load_tokenizer
from rebased.runs.provenance import describe_code

RESULTS = Path(__file__).parent / "results"
Encode = Callable[[Sequence[str]], list[np.ndarray]]


class Case(NamedTuple):
    encoder: str  # rebased or tokenizers
    processes: int
    threads: int  # per process


class Timing(NamedTuple):
    begin: float  # seconds of the system's monotonic clock, which all processes share
    end: float
    cpu_seconds: float  # of all threads of this process
    tail_seconds: float  # CPU seconds of the last tenth of the chunks; nan where chunks are not encoded one by one
    tokens: int
    digest: str  # of all token ids


def make_encoder(name: str, tokenizer: JsonTokenizer) -> Encode:
    """A function from texts to token ids, each [n] uint32."""
    if name == "rebased":
        return lambda texts: tokenizer.encode_many([text.encode() for text in texts])
    engine = tokenizer._tokenizer

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return encode


def read_texts(path: Path, megabytes: float) -> list[str]:
    texts, size = [], 0
    with open_text(path) as (stream, _):
        for chunk in read_chunks(stream):
            texts.append(chunk.decode(errors="replace"))
            size += len(chunk)
            if size >= megabytes * 1e6:
                break
    return texts


def run_case(case: Case, path: Path, tokenizer_name: str, megabytes: float, barrier: Barrier) -> Timing:
    """Encode the text in this process, which has not encoded anything before."""
    os.environ["RAYON_NUM_THREADS"] = str(case.threads)  # before the library starts its threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if case.threads > 1 else "false"
    tokenizer = load_tokenizer(tokenizer_name)
    assert isinstance(tokenizer, JsonTokenizer)
    encode = make_encoder(case.encoder, tokenizer)
    encode(["A few words, so that all tables are made.\n"])
    texts = read_texts(path, megabytes)
    barrier.wait()
    begin, cpu_begin = time.monotonic(), time.process_time()
    found: list[np.ndarray] = []
    if case.threads > 1:
        found, tail = encode(texts), float("nan")
    else:
        times = []
        for text in texts:
            found += encode([text])
            times.append(time.process_time())
        few = max(1, len(texts) // 10)
        tail = times[-1] - (times[-few - 1] if few < len(times) else cpu_begin)
    end, cpu_end = time.monotonic(), time.process_time()
    digest = hashlib.sha256(np.concatenate(found).tobytes()).hexdigest()
    return Timing(begin, end, cpu_end - cpu_begin, tail, sum(map(len, found)), digest)


def measure(
    case: Case, path: Path, tokenizer_name: str, megabytes: float, repeats: int, manager: SyncManager
) -> dict[str, Any]:
    best: dict[str, Any] = {}
    texts = read_texts(path, megabytes)
    few = max(1, len(texts) // 10)
    size, tail_size = (sum(len(text.encode()) for text in some) for some in (texts, texts[-few:]))
    for _ in range(repeats):
        barrier = manager.Barrier(case.processes)
        with ProcessPoolExecutor(case.processes, multiprocessing.get_context("spawn")) as pool:
            arguments = (case, path, tokenizer_name, megabytes, barrier)
            timings = [job.result() for job in [pool.submit(run_case, *arguments) for _ in range(case.processes)]]
        if len({timing.digest for timing in timings}) != 1:
            raise SystemExit(f"{case}: processes disagree about the token ids")
        seconds = max(timing.end for timing in timings) - min(timing.begin for timing in timings)
        tail = max(timing.tail_seconds for timing in timings)
        row = case._asdict() | {
            "seconds": seconds,
            "tokens_per_s": case.processes * timings[0].tokens / seconds,
            "mb_per_s": case.processes * size / 1e6 / seconds,
            "mb_per_cpu_s": case.processes * size / 1e6 / sum(timing.cpu_seconds for timing in timings),
            "last_tenth_mb_per_cpu_s": None if np.isnan(tail) else tail_size / 1e6 / tail,
            "tokens": timings[0].tokens,
            "sha256": timings[0].digest,
        }
        if not best or seconds < best["seconds"]:
            best = row
    return best


def measure_prepare(path: Path, tokenizer_name: str, workers: int) -> dict[str, Any]:
    """The whole command over the whole file: unpacking, encoding, hashing, writing."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        config = PrepareConfig(sources=(str(path),), tokenizer=tokenizer_name, split=("train=1",))
        split = prepare(config, Path(folder) / "out", workers=workers).splits["train"]
        seconds = time.monotonic() - begin
    size = (split.text_bytes or 0) / 1e6
    return {"workers": workers, "seconds": seconds, "tokens": split.tokens, "mb_per_s": size / seconds}


def show(rows: Sequence[dict[str, Any]], prepared: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'encoder':12} {'processes':>9} {'threads':>7} {'tokens/s':>12} {'MB/s':>8} {'MB/core s':>9} "
        f"{'last tenth':>10}"
    )
    for row in rows:
        tail = row["last_tenth_mb_per_cpu_s"]
        print(
            f"{row['encoder']:12} {row['processes']:9} {row['threads']:7} {row['tokens_per_s']:12,.0f} "
            f"{row['mb_per_s']:8.2f} {row['mb_per_cpu_s']:9.2f} {'' if tail is None else f'{tail:.2f}':>10}"
        )
    for row in prepared:
        print(f"rebased data prepare, workers {row['workers']}, the whole file: {row['mb_per_s']:.2f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, also .gz, .xz or .zst")
    parser.add_argument("--tokenizer", required=True, help="a byte-level tokenizer.json with GPT-2's pattern")
    parser.add_argument("--megabytes", type=float, default=20, help="of text per process (default 20)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-prepare", action="store_true", help="do not time the whole command")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not isinstance(load_tokenizer(options.tokenizer), JsonTokenizer):
        raise SystemExit("the bytes tokenizer needs no measuring; name a tokenizer.json")
    cores = options.processes
    encoders = ["rebased", "tokenizers"]
    cases = [Case(name, 1, 1) for name in encoders]
    if cores > 1:
        cases.append(Case("tokenizers", 1, cores))
        cases += [Case(name, cores, 1) for name in encoders]
    load = os.getloadavg()[0]
    rows = []
    with multiprocessing.Manager() as manager:
        for case in cases:
            rows.append(measure(case, options.text, options.tokenizer, options.megabytes, options.repeats, manager))
            print(f"{case.encoder}, {case.processes} x {case.threads}: {rows[-1]['mb_per_s']:.2f} MB/s", flush=True)
            if rows[-1]["sha256"] != rows[0]["sha256"]:
                raise SystemExit(f"the token ids of {case.encoder} differ from those of {rows[0]['encoder']}")
    prepared = []
    if not options.skip_prepare:
        prepared = [measure_prepare(options.text, options.tokenizer, n) for n in sorted({1, cores})]
    now = datetime.now(UTC)
    record = {
        "benchmark": "text_data",
        "time": now.isoformat(timespec="seconds"),
        "code": describe_code(),
        "machine": machine("cpu", "tokenizers", "tiktoken", "numpy"),
        "load": load,
        "text": options.text.name,
        "tokenizer": options.tokenizer.rpartition("/")[2],
        "megabytes": options.megabytes,
        "results": rows,
        "prepare": prepared,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"text_data-{now:%Y-%m-%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")
    show(rows, prepared)


if __name__ == "__main__":
    main()
