"""Polynomial attention on the CPU beside softmax attention: time over T, and peak memory over T.

    python benchmarks/poly_cpu.py            both, and writes benchmarks/results/poly_cpu-<date>.json
    python benchmarks/poly_cpu.py --small    short lengths and few repeats, writes nothing
    python benchmarks/poly_cpu.py --out F    writes F instead; --lengths 1024 4096 times these alone, and no memory

Ours is ReBased with 12 heads of K = 16 and V = 64, theirs scaled_dot_product_attention with 12 causal heads of 64, both
fp32 and on two threads (--threads). They take turns, so that a busy machine disturbs both; a time is the median of its
turns, a ratio the median of the ratios of a turn. A path is timed only after its values and gradients have been held
against the reference in fp64.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.ops import REBASED, poly_attention

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
MEMORY_LENGTHS = (4096, 8192, 16384, 32768, 65536)
RESULTS = Path(__file__).parent / "results"
Run = Callable[[], None]


class Shape(NamedTuple):
    """Sizes of q, k [B, T, H, K] and v [B, T, H, V]."""

    B: int
    T: int
    H: int
    K: int
    V: int


HEADLINE = Shape(B=1, T=4096, H=12, K=16, V=64)  # the paper's 12 heads of 16, values of an ordinary head


def inputs(shape: Shape, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, and a gradient for the output: normal numbers, the same for every dtype."""
    B, T, H, K, V = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, w, generator=generator, dtype=torch.float64) for w in (K, K, V, V))
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return q, k, v, do.to(dtype)


def check() -> float:
    """The largest error of chunked fp32 against the reference in fp64, over each tensor's largest number."""
    worst = 0.0
    for T in (256, 1024):  # one is done as a single segment, the other chunk by chunk
        results = []
        for dtype, backend in ((torch.float32, "chunked"), (torch.float64, "reference")):
            q, k, v, do = inputs(HEADLINE._replace(T=T, H=2), dtype=dtype)
            o = poly_attention(q, k, v, coefficients=REBASED, backend=backend)  # type: ignore[arg-type]
            results.append((o.detach(), *torch.autograd.grad(o, (q, k, v), do)))
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True)))
    if not worst < 1e-5:
        raise SystemExit(f"the chunked path is off by {worst:.1e} from the reference: not worth timing")
    return worst


def runs(T: int) -> dict[str, tuple[Run, Run]]:
    """(ours, theirs) for the forward alone and for forward and backward."""
    q, k, v, do = inputs(HEADLINE._replace(T=T), dtype=torch.float32)
    a, b, c, d = inputs(HEADLINE._replace(T=T, K=HEADLINE.V), dtype=torch.float32)
    a, b, c, d = (x.detach().transpose(1, 2).contiguous() for x in (a, b, c, d))  # SDPA's own layout [B,H,T,V]
    theirs_in = tuple(x.requires_grad_() for x in (a, b, c))

    def ours() -> Tensor:
        return poly_attention(q, k, v, coefficients=REBASED, backend="chunked")

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(*theirs_in, is_causal=True)

    def forward(function: Callable[[], Tensor]) -> Run:
        def run() -> None:
            with torch.no_grad():
                function()

        return run

    return {
        "forward": (forward(ours), forward(theirs)),
        "forward+backward": (
            lambda: void(torch.autograd.grad(ours(), (q, k, v), do)),
            lambda: void(torch.autograd.grad(theirs(), theirs_in, d)),
        ),
    }


def void(_: Any) -> None:
    """Drops what a run made."""


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(ours: Run, theirs: Run, repeats: int) -> dict[str, float]:
    turns = [(seconds(ours), seconds(theirs)) for _ in range(repeats + 1)][1:]  # the first turn warms up
    mine, other = zip(*turns, strict=True)
    return {
        "ours_ms": 1e3 * statistics.median(mine),
        "sdpa_ms": 1e3 * statistics.median(other),
        "ratio": statistics.median(b / a for a, b in turns),
        "ours_best_ms": 1e3 * min(mine),
        "sdpa_best_ms": 1e3 * min(other),
    }


def time_lengths(lengths: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for T in lengths:
        for part, (ours, theirs) in runs(T).items():
            row = {"T": T, "pass": part, **compare(ours, theirs, repeats if T <= HEADLINE.T else min(repeats, 2))}
            rows.append(row)
            print(f"T {T:6d} {part:17s} ratio {row['ratio']:.1f}", file=sys.stderr)
    return rows


def peak_bytes(T: int) -> int:
    """What a forward and backward adds to the resident memory of a fresh process, inputs and gradients included."""
    command = [sys.executable, __file__, "--peak-of", str(T), "--threads", str(torch.get_num_threads())]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(T: int) -> None:
    def run(length: int) -> None:
        B, _, H, K, V = HEADLINE
        q, k, v = (torch.ones(B, length, H, w, requires_grad=True) for w in (K, K, V))
        o = poly_attention(q, k, v, coefficients=REBASED, backend="chunked")
        void(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))

    run(128)  # what torch itself takes, at any length
    before = resident("VmRSS")
    run(T)
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Resident bytes of this process, now (VmRSS) or at their peak (VmHWM).

    getrusage would not do: on Linux the peak it gives to a child starts at its parent's.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def show(timing: list[dict[str, Any]], memory: list[dict[str, Any]]) -> None:
    console = Console()
    table = Table(title=f"ReBased (K {HEADLINE.K}, V {HEADLINE.V}) and SDPA (64), {HEADLINE.H} heads, fp32, CPU")
    for column in ("T", "pass", "ours ms", "SDPA ms", "SDPA / ours"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    for r in timing:
        table.add_row(
            f"{r['T']:,}", r["pass"], f"{r['ours_ms']:.1f}", f"{r['sdpa_ms']:.1f}", f"[bold]{r['ratio']:.1f}x[/bold]"
        )
    console.print(table)
    if not memory:
        return
    table = Table(title="Peak memory of forward+backward, inputs and gradients included")
    for column in ("T", "MB", "bytes per token"):
        table.add_column(column, justify="right")
    for r in memory:
        table.add_row(f"{r['T']:,}", f"{r['bytes'] / 1e6:.0f}", f"{r['bytes_per_token']:,.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short lengths and few repeats; writes nothing")
    parser.add_argument("--repeats", type=int, default=7, help="turns up to T = 4096; 2 beyond")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2, on any machine)")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="time these only, and measure no memory")
    parser.add_argument("--out", type=Path, help="file of records to append to (default: benchmarks/results)")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print_peak(options.peak_of)
        return
    about = machine("cpu") | {"architecture": platform.machine(), "load_at_start": round(os.getloadavg()[0], 1)}
    error = check()
    lengths, memory_lengths = (LENGTHS[:3], MEMORY_LENGTHS[:2]) if options.small else (LENGTHS, MEMORY_LENGTHS)
    if options.lengths:
        lengths, memory_lengths = tuple(options.lengths), ()
    memory = []
    for T in memory_lengths:
        size = peak_bytes(T)
        memory.append({"T": T, "bytes": size, "bytes_per_token": size / T})
    timing = time_lengths(lengths, 2 if options.small else options.repeats)
    show(timing, memory)
    if options.small:
        return
    words = [word for word in sys.argv[1:] if word != "--out" and Path(word) != options.out]
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/poly_cpu.py", *words]),
        "machine": about,
        "shape": HEADLINE._asdict(),
        "error_against_fp64_reference": error,
        "time": timing,
        "peak_memory": memory,
    }
    path = options.out or RESULTS / f"poly_cpu-{datetime.now(UTC):%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(path.read_text()) if path.exists() else []  # append only
    path.write_text(json.dumps([*records, record], indent=1) + "\n")


if __name__ == "__main__":
    main()
