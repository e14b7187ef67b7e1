"""Polynomial attention called from Python, one call after the other: what the host adds to the kernels.

    python benchmarks/eager.py                 five processes; writes benchmarks/results/eager-<time>-<GPU>.json

Forward and backward of 32,768 tokens in bf16, 12 heads, K = 16 and V = 64, beside softmax attention with 12 heads of
64 (torch's scaled_dot_product_attention, by cuDNN). Calls follow each other without waiting, as in training. Host time
depends on what a process did before, so each process measures fresh, and after calls of other shapes; and last with
gradients computed on the calling thread (torch.autograd.set_multithreading_enabled(False)) instead of torch's own. A
number is the median over processes of the median over rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import write_record

from rebased.ops import REBASED, poly_attention

TOKENS, HEADS, K, V = 32_768, 12, 16, 64
LENGTHS = (256, 1024, 2048)
OTHERS = (96, 300, 512, 640, 2048, 4096)  # lengths that a process meets between its two measurements
CALLS, ROUNDS = 50, 9


def ours(T: int) -> Callable[[], Any]:
    q, k = (torch.randn(TOKENS // T, T, HEADS, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v, do = (torch.randn(TOKENS // T, T, HEADS, V, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(poly_attention(q, k, v, coefficients=REBASED), (q, k, v), do)


def softmax(T: int) -> Callable[[], Any]:
    q, k, v, do = (torch.randn(TOKENS // T, HEADS, T, V, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), do)

    return run


WAYS = {"rebased": ours, "cudnn": softmax}


def milliseconds(run: Callable[[], Any]) -> float:
    """Per call, the median over rounds; the first round warms up and does not count."""
    rounds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
        rounds.append(1e3 * (time.perf_counter() - start) / CALLS)
    return statistics.median(rounds[1:])


def one_process() -> dict[str, float]:
    """Milliseconds by way, length and moment."""
    found = {}
    for moment in ("fresh", "later", "one thread"):
        with torch.autograd.set_multithreading_enabled(moment != "one thread"):
            for (name, way), T in ((item, T) for item in WAYS.items() for T in LENGTHS):
                found[f"{name} {T} {moment}"] = milliseconds(way(T))
        for way in WAYS.values():
            for T in OTHERS:
                way(T)()
    return found


def main(words: Sequence[str] | None = None) -> Path | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="measure in this process and print JSON")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    if args.one:
        print(json.dumps(one_process()))
        return None
    found = []
    for number in range(args.processes):
        print(f"process {number + 1} of {args.processes}", file=sys.stderr)
        done = subprocess.run([sys.executable, __file__, "--one"], check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    median = {key: statistics.median(each[key] for each in found) for key in found[0]}
    for key, ms in median.items():
        print(f"{key:24} {ms:.3f} ms   {min(p[key] for p in found):.3f} to {max(p[key] for p in found):.3f}")
    what = f"eager forward and backward, {TOKENS} tokens in bf16, milliseconds by process"
    options = f"--processes {args.processes}"
    return write_record(args.out, "eager", options, what, processes=found, median=median)


if __name__ == "__main__":
    main()
