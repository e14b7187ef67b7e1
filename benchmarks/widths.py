"""Polynomial attention with wider keys and values, beside softmax attention of the same value width.

    python benchmarks/widths.py                writes benchmarks/results/widths-<time>-<GPU>.json

32,768 tokens in bf16; forward, and forward with backward, as a replayed CUDA graph. Softmax attention is torch's
scaled_dot_product_attention by cuDNN. A shape is timed only if its values and gradients agree with fp64.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import write_record
from benchmarks.ops import errors_of, graph_ms, is_right, largest, scope_of, with_gradients

from rebased.ops import REBASED, poly_attention

TOKENS = 32_768


class Shape(NamedTuple):
    H: int
    K: int
    V: int
    T: int


SHAPES = (
    Shape(12, 16, 64, 1024),
    Shape(12, 16, 64, 4096),
    Shape(12, 16, 64, 32_768),
    Shape(12, 24, 64, 1536),
    Shape(8, 64, 64, 4096),
    Shape(8, 128, 128, 4096),  # the released checkpoint's
)


def inputs(B: int, shape: Shape, softmax: bool) -> tuple[Tensor, ...]:
    """q, k, v that want gradients, and a gradient for the output."""
    widths = (shape.V,) * 4 if softmax else (shape.K, shape.K, shape.V, shape.V)
    first = (B, shape.H, shape.T) if softmax else (B, shape.T, shape.H)
    made = [torch.randn(*first, w, device="cuda", dtype=torch.bfloat16) for w in widths]
    return *(x.requires_grad_() for x in made[:3]), made[3]


def milliseconds(attend: Callable[..., Tensor], given: Sequence[Tensor]) -> dict[str, float]:
    q, k, v, do = given
    scope = scope_of("cuda", quick=False)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    both = partial(with_gradients, attend, q, k, v, do)
    both()  # compiles
    return {"forward_ms": graph_ms(forward, scope), "both_ms": graph_ms(both, scope)}


def measure(shape: Shape) -> dict[str, Any]:
    ours = partial(poly_attention, coefficients=REBASED)
    softmax = partial(F.scaled_dot_product_attention, is_causal=True)
    small = inputs(1, shape._replace(H=2), softmax=False)
    q, k, v, do = (x.detach().double() for x in small)
    for x in (q, k, v):
        x.requires_grad_()
    wanted = with_gradients(partial(ours, backend="chunked"), q, k, v, do)
    q, k, v, do = small
    error = largest(errors_of(with_gradients(ours, q, k, v, do), wanted))
    row: dict[str, Any] = {**shape._asdict(), "error": error}
    if not is_right(error, torch.bfloat16):
        return row | {"wrong": "not timed"}
    B = max(1, TOKENS // shape.T)
    row |= {"B": B, "rebased": milliseconds(ours, inputs(B, shape, softmax=False))}
    if shape.T <= 8192:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            row["cudnn"] = milliseconds(softmax, inputs(B, shape, softmax=True))
    return row


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    rows = []
    for shape in SHAPES:
        rows.append(row := measure(shape))
        name = f"H {shape.H} K {shape.K} V {shape.V} T {shape.T}"
        times = [
            f"{way} {row[way]['forward_ms']:.3f} / {row[way]['both_ms']:.3f}"
            for way in ("rebased", "cudnn")
            if way in row
        ]
        print(f"{name:28} {row.get('wrong') or '   '.join(times)}   error {row['error']:.1e}", flush=True)
    what = "polynomial attention of several widths: forward / forward and backward, graph, ms"
    path = write_record(args.out, "widths", "", what, rows=rows)
    if wrong := [row for row in rows if "wrong" in row]:
        raise SystemExit(f"{len(wrong)} shapes are wrong")
    return path


if __name__ == "__main__":
    main()
