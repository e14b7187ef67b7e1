"""What every registered mixer costs, forward and backward, as T grows. Training steps: benchmarks/train.py.

    python benchmarks/mixers.py            all of it, on a GPU where there is one
    python benchmarks/mixers.py --small    lengths that a CPU does in a minute

Writes benchmarks/results/mixers-<date>-<device>.json and, of the same numbers, a log-log plot beside it.
"""

import argparse
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.axes import logarithmic
from benchmarks.machine import machine

from rebased.mixers import mixer_class, mixer_names
from rebased.ops.backend import has_gpu

LENGTHS = tuple(2**i for i in range(7, 15))  # 128 .. 16,384
SMALL_LENGTHS = (128, 256, 512, 1024)


def build(name: str, d_model: int, max_len: int) -> nn.Module:
    """The mixer with its defaults, as the second of two layers."""
    context = {"d_model": d_model, "layer": 1, "n_layers": 2, "max_len": max_len}
    if name in ("rebased", "based"):
        context["value_width"] = d_model // 12  # the paper's presets: the floor
    cls = mixer_class(name)
    wanted = inspect.signature(cls).parameters
    return cls(**{key: value for key, value in context.items() if key in wanted})


def seconds(run: Callable[[], None], device: str, repeats: int) -> float:
    """The median of several runs after a warm-up."""
    run()
    run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bytes_needed(run: Callable[[], None], device: str) -> int:
    """On a GPU the peak above what stood there before; on a CPU, which keeps no such count, what autograd saves."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    return sum(storages.values())


def measure_mixer(name: str, T: int, batch: int, d_model: int, device: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    mixer = build(name, d_model, max_len=T).to(device).train()
    x = torch.randn(batch, T, d_model, device=device, requires_grad=True)

    def run() -> None:
        mixer(x).square().mean().backward()
        mixer.zero_grad()
        x.grad = None

    row = {"mixer": name, "T": T, "batch": batch, "d_model": d_model}
    try:
        row["seconds"] = seconds(run, device, repeats)
        row["bytes"] = bytes_needed(run, device)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    return row


def growth(rows: Sequence[dict[str, Any]], quantity: str) -> dict[str, float]:
    """The exponent p of cost ~ T^p between the two longest sequences of each mixer."""
    exponents = {}
    for name in {row["mixer"]: None for row in rows}:
        done = [row for row in rows if row["mixer"] == name and quantity in row]
        if len(done) > 1:
            a, b = done[-2:]
            exponents[name] = round(math.log(b[quantity] / a[quantity]) / math.log(b["T"] / a["T"]), 3)
    return exponents


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, quantity, scale, label in zip(axes, ("seconds", "bytes"), (1e3, 2**-20), ("ms", "MiB"), strict=True):
        for name in {row["mixer"]: None for row in rows}:
            done = [row for row in rows if row["mixer"] == name and quantity in row]
            axis.plot([r["T"] for r in done], [r[quantity] * scale for r in done], marker="o", ms=3, label=name)
        logarithmic(axis)
        axis.set(xlabel="T", ylabel=f"forward + backward, {label}")
        axis.grid(True, which="major", alpha=0.3)
    axes[1].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short sequences, one row each")
    parser.add_argument("--device", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--mixers", nargs="+", default=mixer_names(), metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="T")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--d-model", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(words)
    device, small = args.device, args.small
    lengths = args.lengths or (SMALL_LENGTHS if small else LENGTHS)
    batch, d_model = args.batch or (1 if small else 16), args.d_model or (24 if small else 128)
    repeats = args.repeats or (3 if small else 10)

    rows = []
    for name in args.mixers:
        for T in lengths:
            rows.append(measure_mixer(name, T, batch, d_model, device, repeats))
            say(rows[-1])

    now = datetime.now(UTC)
    spoken = list(words) if words is not None else sys.argv[1:]
    result = {
        "what": "forward and backward of every mixer",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/mixers.py", *(w for w in spoken if w not in ("--out", str(args.out)))]),
        "machine": machine(device, "triton"),
        "bytes": "peak above rest" if device == "cuda" else "saved for the backward",
        "mixers": rows,
        "growth": {quantity: growth(rows, quantity) for quantity in ("seconds", "bytes")},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"mixers-{now:%Y-%m-%d-%H%M}-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, path.with_suffix(".svg"), f"{result['machine']['device']}, batch {batch}, D = {d_model}")
    for name, exponent in result["growth"]["seconds"].items():
        print(f"{name:16} time grows as T^{exponent:.2f}")
    return path


def say(row: dict[str, Any]) -> None:
    cost = row.get("error") or f"{row['seconds'] * 1e3:10.2f} ms {row['bytes'] / 2**20:10.1f} MiB"
    print(f"{row['mixer']:16} T {row['T']:6} {cost}", flush=True)


if __name__ == "__main__":
    main()
