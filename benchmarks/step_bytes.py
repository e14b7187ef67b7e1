"""Bytes and operations of a training step of ReBased, part by part: python benchmarks/step_bytes.py [--D 512]

Counts, not measurements: every tensor that a kernel of an eager step on a GPU reads or writes, once each time,
parameters left out. The last mixer computes queries and outputs at the labelled positions alone. Divided by a GPU's
bandwidth the counts say what no kernel can go below, and beside benchmarks/train.py --only profile which kernels stay
far from it.
"""

import argparse
import json

HEADS, KEY_WIDTH, VOCAB = 12, 16, 8192


def parts(rows: int, T: int, D: int, labels: int, precision: str) -> dict[str, tuple[float, float]]:
    """(bytes, floating point operations) of each part, forward and backward together."""
    M, L = rows * T, rows * labels
    K, V = HEADS * KEY_WIDTH, D // HEADS * HEADS
    half = precision == "bf16"
    small = 2 if half else 4  # bytes of a number that is multiplied
    logit = 4 if precision == "fp32" else 2
    x, h = 4 * M * D, small * M * D  # the residual stream; what a mixer reads
    k, v = small * M * K, small * M * V
    chosen, h_chosen = 4 * L * D, small * L * D  # the same at the labelled positions
    q, o = small * L * K, small * L * V
    cast = x + h if half else 0  # of the gradient that enters a mixer
    narrow_head = precision != "fp32" and D <= 128  # no logit is written (ops/cross_entropy/narrow_gpu.py)
    joined = precision != "fp32" and D <= 64  # projections of q and k with their norms (ops/norm/linear_gpu.py)
    return {
        "embedding, positions, dropout": (7 * x + 2 * M * D, 0),
        "norms of the stream": (2 * (x + h) + 2 * (2 * x + h) + 5 * x + 10 * chosen, 0),  # two first, one second
        "short convolution and its gate": (2 * h + 4 * h + 3 * h + 6 * h, 0),
        "residuals": (2 * x + h + 2 * chosen + h_chosen + 2 * 3 * x + 2 * cast, 0),
        "projections": (  # the gate's; v; q and k; out. Forward, then gradients of inputs (and their sum) and weights
            (2 * h + 4 * h + 6 * h)
            + 3 * (v + h)
            + 3 * (h_chosen + o)
            + (0 if joined else 3 * (h + k) + 3 * (h_chosen + q))
            + 6 * h,
            6 * D * (M * (D + V) + L * V) + (0 if joined else 6 * D * (M + L) * K),
        ),
        "norms of q and k": (
            (h + k + 2 * h + k + h_chosen + q + 2 * h_chosen + q, 6 * D * (M + L) * K) if joined else (5 * k + 5 * q, 0)
        ),  # with their projections where these are joined
        "polynomial attention (its inputs and outputs)": (3 * k + 3 * q + 3 * v + 3 * o, 0),
        "labelled positions": (4 * chosen + x + 4 * h_chosen + h, 0),
        "head": (
            (5 * chosen, 8 * L * VOCAB * D) if narrow_head else (5 * logit * L * VOCAB + 4 * chosen, 6 * L * VOCAB * D)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--T", type=int, default=2048)
    parser.add_argument("--D", type=int, default=64)
    parser.add_argument("--labels", type=int, help="per row; T / 4 by default")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second; the H200's by default")
    parser.add_argument(
        "--json", action="store_true", help="print exact counts: {precision: {part: [bytes, operations]}}"
    )
    args = parser.parse_args()
    labels = args.labels or args.T // 4
    found = {name: parts(args.rows, args.T, args.D, labels, name) for name in ("fp32", "tf32", "bf16")}
    if args.json:
        print(json.dumps(found))
        return
    for precision, counted in found.items():
        print(f"{precision}: {args.rows} rows of T = {args.T}, D = {args.D}")
        for name, (moved, multiplied) in counted.items():
            say(name, moved, multiplied, args.bandwidth)
        say("all", *map(sum, zip(*counted.values(), strict=True)), args.bandwidth)


def say(name: str, moved: float, multiplied: float, bandwidth: float) -> None:
    cost = f"{moved / 1e9:7.2f} GB {1e3 * moved / bandwidth:7.2f} ms {multiplied / 1e12:7.2f} TFLOP"
    print(f"  {name:46} {cost}")


if __name__ == "__main__":
    main()
