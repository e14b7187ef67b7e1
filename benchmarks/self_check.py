"""How long the check of newly compiled kernels takes, and how far their errors are from their tolerances.

    python benchmarks/self_check.py            writes benchmarks/results/self_check-<time>-<GPU>.json

Polynomial attention over dtypes, widths and lengths, with gradients. Verdicts are kept in a new folder, so that every
set of kernels is checked. A check is timed from the result to the verdict; the first one of a process also loads
torch's kernels in fp64, and is left out of the summary.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import write_record

from rebased.ops import BASED, REBASED, poly_attention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = ((16, 64), (24, 5), (64, 64))
LENGTHS = (200, 4096)


def measure(dtype: torch.dtype, K: int, V: int, T: int, coefficients: Any) -> list[dict[str, Any]]:
    """The checks of one call and its gradients."""
    from rebased.ops.self_check import Judged, listening

    shapes = ((2, T, 3, K), (2, T, 3, K), (2, T, 3, V))
    q, k, v = (torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes)
    with listening() as heard:
        o = poly_attention(q, k, v, coefficients=coefficients)
        o.backward(torch.randn_like(o))
        torch.cuda.synchronize()
    about = {"dtype": str(dtype).removeprefix("torch."), "K": K, "V": V, "T": T, "low": coefficients is BASED}
    return [
        {
            **about,
            "operator": each.operator,
            "kernels": len(each.kernels),
            "ms": round(1e3 * each.seconds, 2),
            "error_over_tolerance": round(max(each.errors.values()), 4),
            "right": each.right,
        }
        for each in heard
        if isinstance(each, Judged)
    ]


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    os.environ["REBASED_CACHE"] = tempfile.mkdtemp()
    rows: list[dict[str, Any]] = []
    for dtype, (K, V), T in product(DTYPES, WIDTHS, LENGTHS):
        rows += measure(dtype, K, V, T, BASED if V == 5 else REBASED)
    times = sorted(row["ms"] for row in rows[2:])
    per_kernel = sorted(row["ms"] / row["kernels"] for row in rows[2:])
    summary = {
        "checks": len(rows),
        "wrong": sum(not row["right"] for row in rows),
        "median_ms": statistics.median(times),
        "largest_ms": times[-1],
        "largest_ms_per_kernel": round(per_kernel[-1], 2),
        "largest_error_over_tolerance": max(row["error_over_tolerance"] for row in rows),
    }
    print("  ".join(f"{key} {value}" for key, value in summary.items()))
    what = "checks of newly compiled kernels: ms, and the largest error over its tolerance"
    return write_record(args.out, "self_check", "", what, summary=summary, rows=rows)


if __name__ == "__main__":
    main()
