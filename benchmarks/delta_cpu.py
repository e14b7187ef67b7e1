"""The gate and the delta rule on the CPU beside polynomial attention with a state of as many numbers, in turn.

    python benchmarks/delta_cpu.py                     writes benchmarks/results/delta_cpu-<time>-<CPU>.json
    python benchmarks/delta_cpu.py -T 256 --turns 1    a quick look

12 heads of values of 64, fp32, forward and backward. Keys of 16 have 136 features of degree 2; for degree 1, keys of
136 have as many. A time is the median of its turns, a ratio the median of the ratios of a turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import write_record

from rebased.ops import REBASED, delta_attention, poly_attention

H, K, V, FEATURES = 12, 16, 64, 136


def calls(T: int) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name; the first is what the others are compared with."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, T, H, *shape).requires_grad_()

    q, k, v, wide_q, wide_k = random(K), random(K), random(V), random(FEATURES), random(FEATURES)
    g = (-torch.rand(1, T, H)).requires_grad_()
    beta = torch.rand(1, T, H).requires_grad_()
    return {
        "poly_attention": lambda: poly_attention(q, k, v, coefficients=REBASED),
        "with a gate": lambda: poly_attention(q, k, v, coefficients=REBASED, log_decay=g),
        "delta rule, degree 2": lambda: delta_attention(q, k, v, beta, degree=2),
        "delta rule, degree 2, gate": lambda: delta_attention(q, k, v, beta, g, degree=2),
        "delta rule, degree 1, gate": lambda: delta_attention(wide_q, wide_k, v, beta, g),
    }


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-T", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    timed = calls(args.T)
    turns: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(args.turns + 1):  # the first warms up
        for name, call in timed.items():
            start = time.perf_counter()
            call().sum().backward()
            if turn:
                turns[name].append(time.perf_counter() - start)
    base = turns["poly_attention"]
    rows = [
        {
            "what": name,
            "ms": 1e3 * statistics.median(times),
            "ratio": statistics.median(one / other for one, other in zip(times, base, strict=True)),
        }
        for name, times in turns.items()
    ]
    for row in rows:
        print(f"{row['what']:28} {row['ms']:8.0f} ms  {row['ratio']:5.2f} times poly_attention")
    options = f"-T {args.T} --turns {args.turns} --threads {args.threads}"
    what = f"milliseconds forward and backward, fp32, {H} heads, values of {V}, {FEATURES} features"
    write_record(args.out, "delta_cpu", options, what, device="cpu", rows=rows)


if __name__ == "__main__":
    main()
