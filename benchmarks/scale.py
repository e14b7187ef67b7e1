"""Counts what two processes send each other per training step, and holds it against the cost model of docs/scaling.md.

    PYTHONPATH=src python benchmarks/scale.py              some minutes on two cores; then the page's numbers
    PYTHONPATH=src python benchmarks/scale.py --out DIR    the record alone, elsewhere

Two processes on this machine train a small model through gloo, with DDP and with FSDP, at two lengths.
Bytes are what the system says that a process has written during one step. The time of a step is compared with the
same computation without any communication, in both processes at once, plus the bytes over gloo's speed here.
Needs Linux (/proc/self/io). Writes scale-<date>.json.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine
from benchmarks.scale_counts import count
from benchmarks.scaling import FP32, WAYS, all_reduce_bytes, sent_bytes

from rebased.data import TextBatch
from rebased.files import replacing
from rebased.models import LanguageModel, LMConfig, preset
from rebased.runs.lm_config import LMTrainConfig
from rebased.train.lm.step import LMStep
from rebased.train.world import World

RESULTS = Path(__file__).parent / "results"
PROCESSES = 2
SEQUENCES = 4  # of a step, over both processes
LENGTHS = (256, 512)
WARM_UP, ROUNDS = 1, 8
MODELS = {"rebased": "lm-paper-text-rebased", "attention": "lm-attention"}


class Case(NamedTuple):
    model: str
    way: str
    T: int


def config_of(model: str, T: int) -> LMConfig:
    """The paper's model at a size for two cores: four layers of width 96."""
    small = preset(MODELS[model], d_model=96, vocab_size=512, max_len=T)
    return small.model_copy(update={"n_layers": 4, "positions": "none"})


def written() -> int:
    """Bytes that this process has written so far, to files and sockets."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def seconds_of(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The least time of each run, which both processes begin together; runs take turns, so that others disturb all."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, of_run in zip(runs, times, strict=True):
            distributed.barrier()
            start = time.perf_counter()
            run()
            of_run.append(time.perf_counter() - start)
    return [min(of_run) for of_run in times]


def ready_step(case: Case, rank: int, shared: bool) -> Callable[[], object]:
    """A training step of this process's share, with the other process or, if not shared, without a word to it."""
    torch.manual_seed(0)
    config = config_of(case.model, case.T)
    size = PROCESSES if shared else 1
    train = LMTrainConfig(batch_size=SEQUENCES, compile="none", device="cpu", parallel=case.way)  # type: ignore[arg-type]
    step = LMStep(LanguageModel(config), train, World(rank if shared else 0, size, torch.device("cpu")))
    tokens = torch.randint(config.vocab_size, (SEQUENCES, case.T)).chunk(PROCESSES)[rank]
    batch = [TextBatch(tokens, tokens.roll(-1, 1), None)]
    return lambda: step(batch, 0)


def measure(case: Case, rank: int, rounds: int) -> dict[str, Any]:
    """A row of the record: bytes and seconds of a step, and what the model says."""
    alone, run = (ready_step(case, rank, shared) for shared in (False, True))
    for _ in range(WARM_UP):
        alone(), run()
    before = written()
    run()
    sent = written() - before
    counted = count(config_of(case.model, case.T))
    expected = sent_bytes(counted, case.way, PROCESSES)  # type: ignore[arg-type]
    if case.way == "fsdp":  # gloo has no reduce-scatter: it sums everything everywhere
        expected["gradients"] = all_reduce_bytes(FP32 * counted.parameters, PROCESSES)
    bytes_of = {"sent_bytes": sent, "expected_bytes": round(sum(expected.values()))}
    seconds_alone, seconds = seconds_of((alone, run), rounds)
    return {**case._asdict(), **bytes_of, "seconds_alone": seconds_alone, "seconds": seconds}


def work(rank: int, port: int, rounds: int, answers: Any) -> None:
    """One of the two processes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    gradients = torch.zeros(count(config_of("rebased", LENGTHS[0])).parameters)
    (seconds,) = seconds_of([lambda: distributed.all_reduce(gradients)], 10 * rounds)
    speed = all_reduce_bytes(FP32 * gradients.numel(), PROCESSES) / seconds
    if rank == 0:
        answers.put({"gloo_bytes_per_second": speed})
    for model in MODELS:
        for way in WAYS:
            for T in LENGTHS:
                row = measure(Case(model, way, T), rank, rounds)
                if rank == 0:
                    answers.put(row)
    distributed.barrier()
    distributed.destroy_process_group()


def run_processes(rounds: int) -> tuple[float, list[dict[str, Any]]]:
    """gloo's bytes per second here, and one row per case."""
    context = get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.SimpleQueue()
    processes = [context.Process(target=work, args=(rank, store.port, rounds, answers)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    total = 1 + len(MODELS) * len(WAYS) * len(LENGTHS)
    found: list[dict[str, Any]] = []
    while len(found) < total:
        if answers.empty():
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise SystemExit("error: a process ended before its time; its error is above")
            time.sleep(0.05)
            continue
        found.append(answers.get())
        say(found[-1])
    for process in processes:
        process.join()
    return found[0]["gloo_bytes_per_second"], found[1:]


def say(row: dict[str, Any]) -> None:
    if "way" not in row:
        text = f"gloo sends {row['gloo_bytes_per_second'] / 1e6:,.0f} MB per second"
    else:
        text = f"{row['model']:10} {row['way']:8} T {row['T']:4}  {row['sent_bytes']:10,} bytes sent"
        text += f" ({row['expected_bytes']:10,} expected)  {row['seconds']:.3f} s ({row['seconds_alone']:.3f} alone)"
    print(text, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times that a step is timed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the record goes; the page is then left as it is")
    args = parser.parse_args(words)
    if not Path("/proc/self/io").is_file():
        raise SystemExit("error: this system has no /proc/self/io, which counts the bytes that a process writes")
    now = datetime.now(UTC)
    speed, rows = run_processes(args.rounds)
    record = {
        "what": "a training step in two processes through gloo: bytes that one of them sends, and seconds",
        "date": now.isoformat(timespec="seconds"),
        "command": f"python benchmarks/scale.py --rounds {args.rounds}",
        "machine": machine("cpu"),
        "sequences": SEQUENCES,
        "gloo_bytes_per_second": speed,
        "steps": rows,
    }
    folder = args.out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"scale-{now:%Y-%m-%d-%H%M%S}.json"
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")
    print(f"wrote {path}", file=sys.stderr)
    if args.out is None:
        from benchmarks.scale_report import write  # which counts models of full size

        write()
    return path


if __name__ == "__main__":
    main()
