"""One training step of the MQAR models, its data, and how many runs a GPU finishes in an hour.

    PYTHONPATH=src python benchmarks/train.py                             all but pairs, on a GPU
    PYTHONPATH=src python benchmarks/train.py --only targets presets      some sections
    PYTHONPATH=src python benchmarks/train.py --only pairs                precisions on the same seeds
    PYTHONPATH=src python benchmarks/train.py --only targets --presets rebased --lengths 256 --precisions bf16

A step is 512 sequences: gather, forward, loss at the labelled positions, backward, AdamW. "eager" launches kernel by
kernel, "captured" is the CUDA graph that training replays, "compiled" the same after torch.compile (--compile). Times
are medians with the device waited for; memory is the peak that was allocated above the data.

    targets    ReBased at (T, D) = (256, 64), (512, 128), (2048, 64), (2048, 512), every precision, eager and captured
    presets    every preset at T = 256 and 2,048, D = 64, captured
    profile    where the time of a step goes: the kernels that take most of it, for the first of the lengths and widths
    head       the head's loss alone, by the size of its blocks of logits
    data       100,000 examples at T = 2,048 made on the device
    together   steps of several runs at once in one process, a stream and a graph each (T = 256)
    processes  the same as processes, whole training with evaluation and checkpoints, and runs of Table 1 an hour
    pairs      accuracy in each precision on five paired seeds, beside fp32

Writes train-<date>-<device>.json; what failed stands in it with its error.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.analysis.spread import student_interval
from rebased.models import LanguageModel, preset
from rebased.models.presets import mqar_preset_names
from rebased.ops import linear_cross_entropy
from rebased.ops.backend import has_gpu
from rebased.ops.cross_entropy import api as cross_entropy
from rebased.paper.values import FIGURE_1_PAIRS
from rebased.runs.synthetic_config import Precision, SyntheticRunConfig, SyntheticTrainConfig
from rebased.tasks import MQAR, Questions, find_questions
from rebased.train import RunResult, Sink
from rebased.train.cuda_graph import WARM_UP, own_stream
from rebased.train.executors.jobs import Job
from rebased.train.executors.local import LocalExecutor
from rebased.train.optimiser import build_optimiser
from rebased.train.precision import matmul_precision
from rebased.train.synthetic.step import CapturedStep, Step

SECTIONS = ("targets", "presets", "profile", "head", "data", "together", "processes", "pairs")
TARGETS = {(256, 64): 6, (512, 128): 12, (2048, 64): 40, (2048, 512): 130}  # (T, D): milliseconds that ReBased may take
LIMITS = {"mamba": 100, "rwkv": 60, "hyena": 100, "conv_attention": 60}  # milliseconds at T = 2,048, D = 64
SHORT_LIMIT = 12  # milliseconds, any preset at T = 256
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
ROWS = 512  # of a step
RUN_STEPS = 64 * math.ceil(100_000 / ROWS)  # of a whole run of Table 1

TakeStep = Callable[[Questions, Tensor], Tensor]


def build_step(name: str, T: int, D: int, precision: Precision, mode: str, device: torch.device) -> TakeStep:
    torch.manual_seed(0)
    model = LanguageModel(preset(name, d_model=D, max_len=T)).to(device).train()
    optimiser = build_optimiser(model, SyntheticTrainConfig(), capturable=model.embedding.weight.is_cuda)
    step = Step(model, optimiser, precision=precision, compile="model" if mode == "compiled" else "none")
    return step if mode == "eager" else CapturedStep(step, model.embedding.weight.device)


def questions(T: int, rows: int, device: torch.device) -> Questions:
    return find_questions(MQAR(seq_len=T, kv_pairs=FIGURE_1_PAIRS[T]).build(rows, seed=0, device=device))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measure_step(
    name: str, T: int, D: int, precision: Precision, mode: str, args: argparse.Namespace
) -> dict[str, Any]:
    """The median of some steps after those in which kernels are compiled and the graph is made."""
    device, row = args.device, {"preset": name, "T": T, "D": D, "precision": precision, "mode": mode}
    with matmul_precision(precision), own_stream(device):
        data = questions(T, 2 * args.rows, device)
        order = torch.randperm(2 * args.rows, device=device)[: args.rows]
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        step = build_step(name, T, D, precision, mode, device)
        start = time.perf_counter()
        losses = [step(data, order)[0].item() for _ in range(WARM_UP + 2)]
        row["first_seconds"] = time.perf_counter() - start
        times = milliseconds(lambda: step(data, order), device, args.repeats)
        losses.append(step(data, order)[0].item())
        row |= {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
        row |= {"loss_first": losses[0], "loss_last": losses[-1]}
        if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):  # the same rows again and again
            row["error"] = f"the loss does not fall: {losses[0]:.3f} to {losses[-1]:.3f}"
        if device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    return row


def modes(args: argparse.Namespace) -> list[str]:
    if args.device.type != "cuda":
        return ["eager"]
    return ["eager", "captured", *(["compiled"] if args.compile else [])]


def targets(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    shapes = [shape for shape in TARGETS if shape[0] in args.lengths and shape[1] in args.widths]
    for (T, D), precision, mode in itertools.product(shapes, args.precisions, modes(args)):

        def measure(T: int = T, D: int = D, precision: Precision = precision, mode: str = mode) -> dict[str, Any]:
            return measure_step("rebased", T, D, precision, mode, args) | {"target_ms": TARGETS[T, D]}

        yield measure


def presets(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    lengths, how = [T for T in (256, 2048) if T in args.lengths], modes(args)[1:] or ["eager"]
    for T, name, precision, mode in itertools.product(lengths, args.presets, args.precisions, how):

        def measure(name: str = name, T: int = T, precision: Precision = precision, mode: str = mode) -> dict[str, Any]:
            limit = SHORT_LIMIT if T == 256 else LIMITS.get(name)
            return measure_step(name, T, 64, precision, mode, args) | ({"target_ms": limit} if limit else {})

        yield measure


def profile(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    """One eager step under torch's profiler: time by kernel, not by operator, so that nothing counts twice."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    T, D = args.lengths[0], args.widths[0]
    on_gpu = args.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    for name, precision in itertools.product(args.presets, args.precisions):

        def measure(name: str = name, precision: Precision = precision) -> dict[str, Any]:
            with matmul_precision(precision), own_stream(args.device):
                data, order = questions(T, args.rows, args.device), torch.arange(args.rows, device=args.device)
                step = build_step(name, T, D, precision, "compiled" if args.compile else "eager", args.device)
                for _ in range(3):
                    step(data, order)
                wait(args.device)
                with watch(activities=activities) as seen:
                    step(data, order)
                    wait(args.device)
            quantity = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            events = sorted(seen.key_averages(), key=lambda event: -getattr(event, quantity))
            total = sum(getattr(event, quantity) for event in events) / 1e3
            kernels = [
                {"kernel": event.key[:110], "ms": getattr(event, quantity) / 1e3, "calls": event.count}
                for event in events[: args.kernels]
            ]
            for kernel in kernels:
                print(f"    {kernel['ms']:8.3f} ms {kernel['calls']:5} x  {kernel['kernel']}", flush=True)
            shape = {"preset": name, "T": T, "D": D, "precision": precision}
            return {**shape, "ms": total, "launches": sum(event.count for event in events), "kernels": kernels}

        yield measure


def head(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    sizes = range(22, 29) if args.device.type == "cuda" else (18, 20)
    labels = args.rows * FIGURE_1_PAIRS[max(T for T in args.lengths)]
    for D, precision, size in itertools.product((64, 512), args.precisions, sizes):

        def measure(D: int = D, precision: Precision = precision, size: int = size) -> dict[str, Any]:
            hidden = torch.randn(labels, D, device=args.device, requires_grad=True)
            weight = (torch.randn(8192, D, device=args.device) / 8).requires_grad_()
            target = torch.randint(8192, (labels,), device=args.device)

            def run() -> None:
                with torch.autocast(args.device.type, torch.bfloat16, enabled=precision == "bf16"):
                    loss = linear_cross_entropy(hidden, weight, target)
                torch.autograd.grad(loss, [hidden, weight])

            name = "GPU_CHUNK_LOGITS" if args.device.type == "cuda" else "CPU_CHUNK_LOGITS"
            former = getattr(cross_entropy, name)
            setattr(cross_entropy, name, 1 << size)
            try:
                with matmul_precision(precision):
                    run()
                    times = milliseconds(run, args.device, args.repeats)
            finally:
                setattr(cross_entropy, name, former)
            shape = {"labels": labels, "D": D, "precision": precision, "log2_block": size}
            return {**shape, "ms": statistics.median(times)}

        yield measure


def data(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    for T in args.lengths:

        def measure(T: int = T) -> dict[str, Any]:
            questions(T, 2, args.device)
            wait(args.device)
            start = time.perf_counter()
            questions(T, args.examples, args.device)
            wait(args.device)
            took = time.perf_counter() - start
            return {"T": T, "examples": args.examples, "seconds": took} | ({"target_seconds": 3} if T == 2048 else {})

        yield measure


def together(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    """Each run has its stream and its graph; one thread replays them in turn. An upper bound: graphs that draw dropout
    from torch's one generator on several streams at once are not reproducible, so training does not do this."""
    for precision, runs in itertools.product(args.precisions, args.at_once):

        def measure(precision: Precision = precision, runs: int = runs) -> dict[str, Any]:
            mode = "captured" if args.device.type == "cuda" else "eager"
            order = torch.arange(args.rows, device=args.device)
            with matmul_precision(precision), own_stream(args.device):
                rows = questions(256, args.rows, args.device)
            streams, steps = [], []
            for _ in range(runs):
                stream = torch.cuda.Stream() if mode == "captured" else None
                streams.append(torch.cuda.stream(stream) if stream else nullcontext())
                wait(args.device)
                with streams[-1], matmul_precision(precision):
                    steps.append(build_step("rebased", 256, 64, precision, mode, args.device))
                    for _ in range(WARM_UP + 1):
                        steps[-1](rows, order)
                    wait(args.device)

            def turn() -> None:
                for stream, step in zip(streams, steps, strict=True):
                    with stream:
                        step(rows, order)

            def turns() -> None:
                for _ in range(5):
                    turn()

            times = milliseconds(turns, args.device, args.repeats)
            ms = statistics.median(times) / (5 * runs)
            shape = {"precision": precision, "runs": runs, "mode": mode}
            return {**shape, "ms": ms, "runs_per_hour": 3.6e6 / (RUN_STEPS * ms)}

        yield measure


class Clock(Sink):
    """When each epoch ended, as the process that waits hears of it."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def line(self, line: dict[str, Any]) -> None:
        self.moments.append(time.perf_counter())


def table1(args: argparse.Namespace, **changes: Any) -> SyntheticRunConfig:
    """A run of Table 1 at T = 256, with other settings where told."""
    segment = {"seq_len": 256, "kv_pairs": 32}
    settings = {"device": args.device.type, "stop_above": 1.0, "checkpoint_seconds": 1e6}
    return SyntheticRunConfig.model_validate(
        {
            "task": {
                "train": [{**segment, "examples": args.examples}],
                "test": [{**segment, "examples": max(1, args.examples * 3 // 100)}],
            },
            "model": {"preset": "rebased", "d_model": args.table1_width},
            "train": {**settings, "batch_size": args.rows, **changes},
        }
    )


def processes(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    """Whole runs in processes of their own, as `rebased sweep --workers` trains them; the first epoch, in which kernels
    are compiled, is not counted."""
    for precision, runs in itertools.product(args.precisions, args.at_once):

        def measure(precision: Precision = precision, runs: int = runs) -> dict[str, Any]:
            started, clocks, errors = time.perf_counter(), [Clock() for _ in range(runs)], []

            def ended(index: int, outcome: Any) -> None:
                if hasattr(outcome, "error"):
                    errors.append(outcome.error)

            with tempfile.TemporaryDirectory() as folder:
                jobs = [
                    Job(
                        table1(args, precision=precision, seed=seed, epochs=args.epochs),
                        Path(folder) / str(seed),
                        clock,
                    )
                    for seed, clock in enumerate(clocks)
                ]
                LocalExecutor(runs, uses_gpu=args.device.type == "cuda").run(jobs, ended)
            row: dict[str, Any] = {"precision": precision, "runs": runs, "D": args.table1_width}
            if errors:
                return row | {"error": errors[0]}
            epochs = [after - before for clock in clocks for before, after in itertools.pairwise(clock.moments)]
            epoch = statistics.median(epochs)
            first = statistics.median(clock.moments[0] for clock in clocks) - started
            row |= {
                "epoch_seconds": epoch,
                "first_epoch_after": first,
                "runs_per_hour": runs * 3600 / (first + 63 * epoch),
            }
            return row | {"ms": 1e3 * epoch / math.ceil(args.examples / args.rows) / runs}

        yield measure


def pairs(args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    """The first row trains all, `--workers` at once; those of one seed have the same weights, data and order."""
    seeds, accuracies = range(42, 42 + args.seeds), dict[tuple[int, str], float]()
    cells = list(itertools.product(seeds, args.precisions))

    def train_all() -> None:
        settings = {"epochs": args.pair_epochs, "lr": args.lr}
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                Job(
                    table1(args, precision=precision, seed=seed, **settings),
                    Path(folder) / f"{precision}-{seed}",
                    Sink(),
                )
                for seed, precision in cells
            ]
            outcomes = LocalExecutor(args.workers, uses_gpu=args.device.type == "cuda").run(jobs, lambda *_: None)
        for cell, outcome in zip(cells, outcomes, strict=True):
            if not isinstance(outcome, RunResult):
                raise RuntimeError(f"{cell}: {outcome.error if outcome else 'not begun'}")
            accuracies[cell] = outcome.accuracy

    for seed in seeds:

        def measure(seed: int = seed) -> dict[str, Any]:
            if not accuracies:
                train_all()
            row: dict[str, Any] = {"seed": seed, "epochs": args.pair_epochs, "lr": args.lr, "examples": args.examples}
            row["D"] = args.table1_width
            row |= {precision: accuracies[seed, precision] for precision in args.precisions}
            if "fp32" in args.precisions:
                others = [precision for precision in args.precisions if precision != "fp32"]
                row["differences"] = {each: row[each] - row["fp32"] for each in others}
            return row

        yield measure


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By precision, the mean difference from fp32 and its 95 % interval (Student's t)."""
    by_precision: dict[str, list[float]] = {}
    for row in rows:
        for precision, difference in row.get("differences", {}).items():
            by_precision.setdefault(precision, []).append(difference)
    outcome = {}
    for precision, values in by_precision.items():
        if len(values) > 1:
            outcome[precision] = {
                "mean_difference": statistics.mean(values),
                "interval": list(student_interval(values)),
            }
    return outcome


def say(row: dict[str, Any]) -> None:
    words = []
    for key, value in row.items():
        if key in ("kernels", "section"):
            continue
        if key == "peak_bytes":
            key, value = "GiB", value / 2**30
        words.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    print("  ".join(words), flush=True)


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Row by row; one that fails is written down, and the others go on. No row is begun after the time limit."""
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    for section in args.only:
        print(f"\n{section}", flush=True)
        for measure in globals()[section](args):
            if time.perf_counter() - started > args.seconds:
                print(f"the time limit of {args.seconds} s is reached: the rest is left out", flush=True)
                return rows
            try:
                row = measure()
            except Exception as error:
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            rows.append({"section": section, **row})
            say(rows[-1])
            if args.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> None:
    print("\npreset           T     D    precision  mode      ms      target   GiB")
    for row in rows:
        if row["section"] in ("targets", "presets") and "preset" in row:
            limit = row.get("target_ms")
            verdict = "" if limit is None or "ms" not in row else ("  met" if row["ms"] <= limit else "  MISSED")
            print(
                f"{row['preset']:15} {row['T']:5} {row['D']:5}  {row['precision']:9} {row['mode']:9}"
                f"{row.get('ms', math.nan):8.2f} {limit or '-':>7}{verdict:8} {row.get('peak_bytes', 0) / 2**30:7.2f}"
                f"  {row.get('error', '')}"
            )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[each for each in SECTIONS if each != "pairs"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if has_gpu() else "cpu"))
    parser.add_argument(
        "--presets", nargs="+", choices=mqar_preset_names(), metavar="NAME", help="default: all, or rebased in profile"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 512, 256], metavar="T")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 512], metavar="D")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--rows", type=int, default=ROWS, help="sequences of a step")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--examples", type=int, default=100_000, help="of data, processes and pairs")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 2, 4, 8], help="runs in together and processes")
    parser.add_argument("--epochs", type=int, default=4, help="of processes")
    parser.add_argument("--table1-width", type=int, default=48, metavar="D", help="of processes and pairs")
    parser.add_argument("--seeds", type=int, default=5, help="of pairs")
    parser.add_argument("--workers", type=int, default=4, help="runs at once in pairs")
    parser.add_argument("--pair-epochs", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3, help="of pairs")
    parser.add_argument("--kernels", type=int, default=25, help="that profile shows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after this many")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(words)
    args.presets = args.presets or (["rebased"] if args.only == ["profile"] else mqar_preset_names())
    return args


def main(words: Sequence[str] | None = None) -> Path:
    args = parse(words)
    rows = measure_all(args)
    now = datetime.now(UTC)
    spoken = list(words) if words is not None else sys.argv[1:]
    result = {
        "what": f"training steps of {args.rows} sequences, vocabulary 8,192, logits at labelled positions",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(
            ["python benchmarks/train.py", *(word for word in spoken if word not in ("--out", str(args.out)))]
        ),
        "machine": machine(args.device.type, "triton"),
        "rows": rows,
        "pairs": summary([row for row in rows if row["section"] == "pairs"]),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"train-{now:%Y-%m-%d-%H%M%S}-{args.device.type}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    table(rows)
    if result["pairs"]:
        print(result["pairs"])
    print(path)
    return path


if __name__ == "__main__":
    main()
