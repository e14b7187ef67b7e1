"""What a gate costs on a GPU: poly_attention with and without log_decay, forward and backward, against fp64 first.

    PYTHONPATH=src python benchmarks/gate_gpu.py

32,768 tokens, 12 heads, K 16, V 64, bf16, ReBased. Values and gradients of two heads are compared with fp64 at each
length. Times are medians of a replayed CUDA graph with a cold L2 cache; both ways take turns. The last lines are the
table. Writes gate_gpu-<date>-<device>.json.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import write_record

from rebased.ops import REBASED, poly_attention

TOKENS, HEADS, K, V = 32_768, 12, 16, 64
LENGTHS = (256, 1024, 4096, 32_768)
NAMES = ("o", "dq", "dk", "dv", "dg")
LIMIT = 1.25  # times the time without a gate


def draw(B: int, T: int, H: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and log_decay, whose memory is from 10 to 1,000 tokens; and do."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, w, generator=generator, device=device).to(dtype) for w in (K, K, V, V))
    memory = 10 ** (1 + 2 * torch.rand(B, T, H, generator=generator, device=device))
    return [x.requires_grad_() for x in (q, k, v)], (-1 / memory).requires_grad_(), do


def compute(given: list[Tensor], g: Tensor | None, do: Tensor, backend: Any) -> list[Tensor]:
    """o and the gradients."""
    o = poly_attention(*given, coefficients=REBASED, log_decay=g, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, [*given, *([] if g is None else [g])], do)]


def errors(T: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors against fp64, of one row with two heads."""
    given, g, do = draw(1, T, 2, device, dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    got = compute(given, g, do, "auto")
    want = compute(exact, g.detach().double().requires_grad_(), do.double(), "chunked")
    pairs = zip(NAMES, got, want, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def times(T: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, without and with a gate; forward alone, and with the backward pass."""
    given, g, do = draw(max(1, TOKENS // T), T, HEADS, "cuda", torch.bfloat16)
    flush = torch.empty(2**27, dtype=torch.uint8, device="cuda")

    def forward(gate: Tensor | None) -> None:
        with torch.no_grad():
            poly_attention(*given, coefficients=REBASED, log_decay=gate)

    graphs = {}
    for name, gate in (("plain", None), ("gated", g)):
        for kind in ("forward", "both"):

            def run(kind: str = kind, gate: Tensor | None = gate) -> None:
                forward(gate) if kind == "forward" else compute(given, gate, do, "auto")

            for _ in range(3):  # compiles
                run()
            torch.cuda.synchronize()
            graphs[f"{name} {kind}"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[f"{name} {kind}"]):
                run()
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 3):
        for name, graph in graphs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                found[name].append(start.elapsed_time(end))
    return found


def main() -> int:
    """Check, time, print and write; 1 if a gradient is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    rows = []
    for T in args.lengths:
        row: dict[str, Any] = {"T": T, "errors": errors(T, device, dtype)}
        if on_gpu:
            found = times(T, args.rounds)
            row |= {f"{name} ms": statistics.median(each) for name, each in found.items()}
            for kind in ("forward", "both"):
                pairs = zip(found[f"gated {kind}"], found[f"plain {kind}"], strict=True)
                row[f"ratio {kind}"] = statistics.median(a / b for a, b in pairs)
        rows.append(row)
    options = f"--lengths {' '.join(map(str, args.lengths))} --rounds {args.rounds}"
    what = f"ms of poly_attention with and without a gate: {TOKENS} tokens, {HEADS} heads, K {K}, V {V}, bf16"
    write_record(args.out, "gate_gpu", options, what, device=device, limit=LIMIT, rows=rows)
    print("     T  largest error  plain ms  gated ms  ratio  forward")
    for row in rows:
        name, error = max(row["errors"].items(), key=lambda item: item[1])
        line = f"{row['T']:6}  {name:2} {error:10.1e}"
        if on_gpu:
            line += f"  {row['plain both ms']:8.3f}  {row['gated both ms']:8.3f}  {row['ratio both']:5.2f}"
            line += f"  {row['ratio forward']:7.2f}"
        print(line)
    return int(any(not error < 2e-2 for row in rows for error in row["errors"].values()))


if __name__ == "__main__":
    sys.exit(main())
