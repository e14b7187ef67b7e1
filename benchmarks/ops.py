"""Polynomial attention beside its peers on a GPU: time and memory over T, one decoding step, and both regimes.

    PYTHONPATH=src python benchmarks/ops.py                          all of it, four minutes on an H200
    PYTHONPATH=src python benchmarks/ops.py --sections decode        one section; --quick: fewer lengths, shorter runs

Ours is ReBased with 12 heads of K = 16 and V = 64, softmax attention has heads of 64; 32,768 tokens in all, bf16. A way
is timed only after its values and gradients were held against fp64; one that is wrong is named, and the command fails.
Times are medians with a cold L2 cache: "eager" with all that Python adds, "graph" of a replayed CUDA graph.

    lengths   T = 256 .. 131,072: ours as it chooses and forced into either regime, and every peer that is installed
    decode    one token for 256 sequences beside the time of copying their states once
    regimes   both regimes over (T, K): what the cost model in gpu/plan.py is tested against

Writes ops-<date>-<device>.json, never over an older one, and draws the same numbers beside it.
"""

import argparse
import json
import math
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine
from benchmarks.ops_report import draw, show

from rebased.kernels.verify_cases import REGIMES, Regime, forced
from rebased.ops import BASED, REBASED, Coefficients, PolyState, init_poly_state, poly_attention, poly_attention_extend
from rebased.ops.backend import has_gpu
from rebased.ops.polynomial.api import EPS

SECTIONS = ("lengths", "decode", "regimes")
K, V = 16, 64
LARGEST_ERROR = 2e-2  # of bf16, norm of the difference over norm
LARGEST_ERROR_FP32 = 1e-5
QUADRATIC_UNTIL = 8192  # ways that are quadratic in T are not timed beyond
TOKENS = 32_768
COMPILERS = 12  # processes that compile kernels before anything is timed
Run = Callable[[], object]


class Scope(NamedTuple):
    """What is measured, and for how long."""

    device: str
    dtype: torch.dtype
    tokens: int
    heads: int
    lengths: tuple[int, ...]
    grid: tuple[tuple[int, int], ...]  # (T, K)
    decode_batch: int
    milliseconds: int  # that one measurement lasts


def scope_of(device: str, quick: bool) -> Scope:
    if device == "cpu":  # for the test of this file: the same steps over plain torch
        return Scope(device, torch.float32, 512, 2, (64, 256), (), 3, 1)
    lengths = (256, 1024, 4096, 32768) if quick else tuple(2**i for i in range(8, 18))
    between = tuple(3 * 2**i for i in range(9, 13))
    grid = (256, 1024, 4096) if quick else tuple(sorted((*(2**i for i in range(8, 15)), *between)))
    pairs = tuple((T, width) for width in ((16, 64) if quick else (16, 32, 64, 128)) for T in grid)
    return Scope(device, torch.bfloat16, TOKENS, 12, lengths, pairs, 256, 20 if quick else 30)


class Way(NamedTuple):
    """One way to compute attention. Inputs are [B,T,H,width], for softmax [B,H,T,V]."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    coefficients: Coefficients | None  # None: softmax
    ours: bool = False
    longest: int = 2**30
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # for forward and backward


def one_regime(regime: Regime) -> Way:
    """Ours, forced into one regime."""
    longest = QUADRATIC_UNTIL if regime == "quadratic" else 2**30
    attend = partial(poly_attention, coefficients=REBASED)
    return Way(f"ours, {regime}", attend, REBASED, True, longest, partial(forced, regime))


def ways(device: str) -> tuple[list[Way], dict[str, str]]:
    """All that can be measured here, and the reason for each one that cannot."""
    ours = partial(poly_attention, coefficients=REBASED)
    found, left_out = [Way("ours", ours, REBASED, ours=True)], {}
    if device == "cuda":
        found += [one_regime(regime) for regime in REGIMES]
    softmax = partial(F.scaled_dot_product_attention, is_causal=True)
    for name, backend in (("SDPA Flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):
        found.append(Way(name, softmax, None, longest=QUADRATIC_UNTIL, context=partial(sdpa_kernel, backend)))
    try:
        from fla.ops.based import fused_chunk_based
        from fla.ops.rebased import parallel_rebased
    except Exception as error:  # whatever a stranger's import raises
        left_out["fla"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        same = partial(parallel_rebased, eps=EPS)  # its own is 1e-5: another function where similarities are small
        found.append(Way("fla parallel_rebased", same, REBASED, longest=QUADRATIC_UNTIL))
        found.append(Way("fla fused_chunk_based", fused_chunk_based, BASED))
    return found, left_out


# --- right or wrong --------------------------------------------------------------------------------------------------


def inputs(
    B: int, T: int, H: int, key_width: int, softmax: bool, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, and a gradient for the output."""
    generator = torch.Generator(device).manual_seed(T)
    shape, width = ((B, H, T), V) if softmax else ((B, T, H), key_width)
    made = [torch.randn(*shape, w, generator=generator, device=device, dtype=dtype) for w in (width, width, V, V)]
    q, k, v = (x.requires_grad_() for x in made[:3])
    return q, k, v, made[3]


def with_gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    o = attend(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


@lru_cache(maxsize=2)  # ways that follow one another are held against the same numbers
def law(
    T: int, key_width: int, coefficients: Coefficients | None, device: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of one sequence with many heads, for errors hang on few numbers, and o, dq, dk, dv in fp64."""
    given = inputs(1, T, max(2, TOKENS // T), key_width, coefficients is None, device, dtype)
    exact = [x.detach().double() for x in given]
    qkv, do = [x.requires_grad_() for x in exact[:3]], exact[3]
    if coefficients is None:
        attend: Callable[..., Tensor] = partial(F.scaled_dot_product_attention, is_causal=True)
    else:  # beyond some length the equation itself takes too much memory
        backend = "reference" if T <= 2048 else "chunked"
        attend = partial(poly_attention, coefficients=coefficients, backend=backend)
    return list(given), with_gradients(attend, *qkv, do)


def errors_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Each tensor's relative error."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def largest(errors: Sequence[float]) -> float:
    """A NaN stays one."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def is_right(error: float, dtype: torch.dtype) -> bool:
    return error < (LARGEST_ERROR_FP32 if dtype == torch.float32 else LARGEST_ERROR)


def check(way: Way, T: int, key_width: int, scope: Scope) -> list[float]:
    """The errors of o, dq, dk and dv."""
    given, want = law(T, key_width, way.coefficients, scope.device, scope.dtype)
    with way.context():
        return errors_of(with_gradients(way.attend, *given), want)


# --- how long and how much -------------------------------------------------------------------------------------------


def median_ms(run: Run, scope: Scope) -> float:
    if scope.device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=scope.milliseconds // 4, rep=scope.milliseconds, return_mode="median")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def graph_ms(run: Run, scope: Scope) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay, scope)


def peak_bytes(run: Run, device: str) -> int | None:
    """What a run needs beyond what is there before it; a CPU keeps no such count."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(way: Way, T: int, key_width: int, scope: Scope, modes: Sequence[str]) -> dict[str, Any]:
    """One row: the error, and if it is small forward and forward+backward in each mode."""
    row: dict[str, Any] = {"way": way.name, "T": T, "K": key_width if way.coefficients else V, "V": V}
    row["errors"] = dict(zip(("o", "dq", "dk", "dv"), check(way, T, key_width, scope), strict=True))
    row["error"] = largest(list(row["errors"].values()))
    if not is_right(row["error"], scope.dtype):
        return {**row, "wrong": f"off by {row['error']:.1e} from fp64: not timed"}
    B = max(1, scope.tokens // T)
    q, k, v, do = inputs(B, T, scope.heads, key_width, way.coefficients is None, scope.device, scope.dtype)

    def forward() -> None:
        with torch.no_grad():
            way.attend(q, k, v)

    def both() -> None:
        torch.autograd.grad(way.attend(q, k, v), (q, k, v), do)

    clocks = {"eager": median_ms, "graph": graph_ms}
    with way.context():
        for mode in modes:
            row[f"{mode}_forward_ms"] = clocks[mode](forward, scope)
            row[f"{mode}_both_ms"] = clocks[mode](both, scope)
        row["peak_bytes"] = peak_bytes(both, scope.device)
    return {**row, "B": B, "H": scope.heads}


def attempt(way: Way, T: int, key_width: int, scope: Scope, modes: Sequence[str]) -> dict[str, Any]:
    """As measure; a peer that fails is a row with the reason, our own failure is a failure."""
    try:
        row = measure(way, T, key_width, scope, modes)
    except torch.OutOfMemoryError:
        row = {"way": way.name, "T": T, "K": key_width, "failed": "out of memory"}
    except Exception as error:
        if way.ours:
            raise
        row = {"way": way.name, "T": T, "K": key_width, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    times = [f"{key} {value:.3f}" for key, value in row.items() if key.endswith("_ms")]
    print(way.name, f"T {T} K {row['K']}", row.get("wrong") or row.get("failed") or " ".join(times), file=sys.stderr)
    return row


# --- sections --------------------------------------------------------------------------------------------------------


def measure_lengths(scope: Scope, found: Sequence[Way], bytes_per_ms: float) -> list[dict[str, Any]]:
    rows = []
    for T in scope.lengths:
        for way in found:
            if way.longest >= T:
                modes = ("eager", "graph") if scope.device == "cuda" else ("eager",)
                row = attempt(way, T, K, scope, modes)
                if way.ours and "peak_bytes" in row:
                    floor = floors(row["B"] * T * scope.heads, scope.dtype.itemsize, bytes_per_ms)
                    row |= {f"floor_{part}_ms": ms for part, ms in floor.items()}
                rows.append(row)
    return rows


def floors(rows: int, itemsize: int, bytes_per_ms: float) -> dict[str, float]:
    """The time of moving everything once. The backward reads q, k, v, o, do and writes dq, dk, dv."""
    forward = rows * itemsize * (2 * K + 2 * V)
    backward = rows * itemsize * (4 * K + 4 * V)
    return {"forward": forward / bytes_per_ms, "both": (forward + backward) / bytes_per_ms}


def copy_rate(scope: Scope) -> float:
    """Bytes a millisecond that a copy moves, reading and writing."""
    source = torch.empty(2**28 if scope.device == "cuda" else 2**20, device=scope.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), scope)


def measure_decode(scope: Scope) -> dict[str, Any]:
    """One step of extend beside a copy of the state: what reading and writing it once takes.

    The state is one that a step has made, as it is in a long generation.
    """
    B, H, T = scope.decode_batch, scope.heads, 100
    q, k, v, _ = (x.detach() for x in inputs(B, T + 1, H, K, False, scope.device, scope.dtype))
    prompt, token = ([x[:, part] for x in (q, k, v)] for part in (slice(0, T), slice(T, None)))
    extend = partial(poly_attention_extend, coefficients=REBASED)
    with torch.no_grad():
        _, before = extend(*prompt, init_poly_state(B, H, K, V, REBASED, device=scope.device))
        o, state = extend(*token, before)
        exact = [x.double() for x in token], PolyState(*(x.double() for x in before))
        want, want_state = extend(*exact[0], exact[1], backend="reference")
        row: dict[str, Any] = {
            "B": B,
            "H": H,
            "K": K,
            "V": V,
            "error": largest(errors_of((o, *state), (want, *want_state))),
        }
        if not is_right(row["error"], scope.dtype):
            return {**row, "wrong": f"off by {row['error']:.1e} from fp64: not timed"}
        source = torch.cat([x.flatten() for x in state])
        target = torch.empty_like(source)
        row["state_bytes"] = source.nbytes
        row["copy_ms"] = median_ms(lambda: target.copy_(source), scope)
        row["eager_ms"] = median_ms(lambda: extend(*token, state), scope)
        if scope.device == "cuda":
            row["graph_ms"] = graph_ms(lambda: extend(*token, state), scope)
    return row


def measure_regimes(scope: Scope) -> list[dict[str, Any]]:
    """Graph times of both regimes: what the GPU does, without what Python adds to both."""
    return [
        {"regime": regime, **attempt(one_regime(regime), T, key_width, scope, ("graph",))}
        for T, key_width in scope.grid
        for regime in REGIMES
    ]


def compile_kernels(scope: Scope, sections: Sequence[str], found: Sequence[Way]) -> None:
    """Fill Triton's cache from many processes: one after another the kernels of all shapes would take minutes."""
    jobs = []
    if "lengths" in sections:
        jobs += [(way.name, T, K) for way in found for T in scope.lengths if min(way.longest, 32_768) >= T]
    if "regimes" in sections:
        jobs += [(one_regime(regime).name, T, width) for regime in REGIMES for T, width in scope.grid]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(run_once, *zip(*dict.fromkeys(jobs), strict=True), chunksize=2))


def run_once(name: str, T: int, key_width: int) -> None:
    """In a process of its own. What fails here fails again, and is told, where it is measured."""
    way = next(way for way in ways("cuda")[0] if way.name == name)
    with suppress(Exception), way.context():
        with_gradients(way.attend, *inputs(1, T, 12, key_width, way.coefficients is None, "cuda", torch.bfloat16))
        torch.cuda.synchronize()


# --- the record ------------------------------------------------------------------------------------------------------


def save(record: dict[str, Any], folder: Path) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", record["machine"]["device"].lower().removeprefix("nvidia"))
    moment = re.sub(r"[^\d-]", "", record["date"].split("+")[0].replace("T", "-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ops-{moment}-{name.strip('-')}.json"
    with path.open("x") as file:  # never over an older one
        file.write(json.dumps(record, indent=1) + "\n")
    return path


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="fewer lengths and shorter measurements")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if args.device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --device cpu goes through the same steps at a small size")
    scope = scope_of(args.device, args.quick)
    found, left_out = ways(args.device)
    spoken = [word for word in (sys.argv[1:] if words is None else words) if word not in ("--out", str(args.out))]
    record: dict[str, Any] = {
        "what": "polynomial attention and its peers: ms, bytes, relative error against fp64",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/ops.py", *spoken]),
        "machine": machine(args.device, "triton", "flash-linear-attention"),
        "shape": {"tokens": scope.tokens, "H": scope.heads, "K": K, "V": V, "dtype": str(scope.dtype)},
    }
    if args.device == "cuda":
        compile_kernels(scope, args.sections, found)
    rate = copy_rate(scope)
    record["copy_GB_per_s"] = rate / 1e6
    if "lengths" in args.sections:
        record["lengths"] = measure_lengths(scope, found, rate)
    if "decode" in args.sections:
        record["decode"] = measure_decode(scope)
    if "regimes" in args.sections:
        record["regimes"] = measure_regimes(scope)
    rows = [*record.get("lengths", []), *record.get("regimes", []), record.get("decode", {})]
    record["left_out"] = left_out | {row["way"]: row["failed"] for row in rows if "failed" in row}
    path = save(record, args.out)
    if record.get("lengths"):
        draw(json.loads(path.read_text()), path.with_suffix(".svg"))
    show(record)
    if wrong := {row.get("way", "decode") for row in rows if "wrong" in row}:
        raise SystemExit(f"wrong, so not timed: {', '.join(sorted(wrong))}")
    return path


if __name__ == "__main__":
    main()
