"""How long the kernels of a first call take to compile, one after the other and all at once.

    PYTHONPATH=src python benchmarks/first_call.py                    T = 1,024 and 4,096, K 16, V 64; without a GPU
    PYTHONPATH=src python benchmarks/first_call.py -K 128 -V 128 -T 4096 --regime quadratic
    PYTHONPATH=src python benchmarks/first_call.py --run -T 256 1024 4096             the call itself, on a GPU

With --run a process calls forward and backward of each length in turn, with an empty cache, after CUDA has started. The
first length also has to start Triton. results/first_call-<time>-<GPU>.json has the seconds of each first call, of the
second, and of the first of softmax attention (cuDNN).

Without it nothing runs: the kernels of a call with a backward pass are compiled, in bf16 for sm_90, nothing cached. Per
kernel: seconds in Python (Triton's language to its first representation), in the compiler's passes and LLVM, and in
ptxas. Python holds the interpreter's lock, the others do not, so kernels that are compiled in threads share the cores.
The last lines say what a call takes either way.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.launches import Call, launches_of
from benchmarks.machine import write_record

from rebased.kernels.machine_code import compile_launch
from rebased.kernels.verify_cases import REGIMES
from rebased.ops import REBASED, poly_attention


def compile_timed(launch: dict[str, Any]) -> dict[str, float]:
    """Seconds that a kernel took: in all, in Python, in passes and LLVM, in ptxas."""
    from triton import knobs

    stages: dict[str, float] = {}

    def listen(*, times: Any, **_: Any) -> None:
        stages["python"] = times.ir_initialization / 1e6
        stages.update({name: microseconds / 1e6 for name, microseconds in times.lowering_stages})

    knobs.compilation.listener = listen
    start = time.perf_counter()
    compile_launch(launch, 90)
    total = time.perf_counter() - start
    passes = sum(stages.get(name, 0.0) for name in ("ttir", "ttgir", "llir", "ptx"))
    return {"all": total, "python": stages["python"], "passes": passes, "ptxas": stages["cubin"]}


def measure(call: Call) -> None:
    from triton import knobs

    launches = launches_of(call)
    print(f"\nK {call.K}, V {call.V}, T {call.T}, {call.regime}: {len(launches)} kernels")
    print("kernel               seconds  python  passes and LLVM  ptxas")
    total = 0.0
    for launch in launches:
        took = compile_timed(launch)
        total += took["all"]
        name = launch["kernel"].__name__
        numbers = f"{took['all']:7.2f}  {took['python']:6.2f}  {took['passes']:15.2f}  {took['ptxas']:5.2f}"
        print(f"{name:19}  {numbers}", flush=True)
    knobs.compilation.listener = None
    start = time.perf_counter()
    with ThreadPoolExecutor(len(launches)) as pool:
        list(pool.map(lambda launch: compile_launch(launch, 90), launches))
    print(f"one after the other  {total:7.2f}")
    print(f"all at once          {time.perf_counter() - start:7.2f}  on {os.cpu_count()} cores", flush=True)


def first_calls(K: int, V: int, lengths: Sequence[int], together: bool) -> list[dict[str, float]]:
    """By length: seconds of the first and the second call, and of the first of softmax attention, V wide."""
    from rebased.ops.polynomial.gpu import launch

    if not together:
        launch.compile_together = lambda *_: None
    torch.ones(8, device="cuda").sum().item()  # starts CUDA

    def seconds(call: Callable[..., torch.Tensor], T: int, *widths: int) -> float:
        given = [torch.randn(1, T, 8, w, device="cuda", dtype=torch.bfloat16, requires_grad=True) for w in widths]
        do = torch.ones_like(given[-1])
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(call(*given), given, do)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return poly_attention(q, k, v, coefficients=REBASED)

    def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    rows = []
    for T in lengths:
        first, second = seconds(ours, T, K, K, V), seconds(ours, T, K, K, V)
        rows.append({"T": T, "first": first, "second": second, "softmax": seconds(softmax, T, V, V, V)})
    return rows


def run(K: int, V: int, lengths: Sequence[int], out: Path) -> Path:
    """Runs first calls in processes of their own and writes the record."""
    rows: dict[str, list[dict[str, float]]] = {}
    options = ["-K", str(K), "-V", str(V), "-T", *map(str, lengths)]
    for how, more in (("together", []), ("apart", ["--apart"])):
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, __file__, "--one", *options, *more], check=True, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"TRITON_CACHE_DIR": cache},
            )  # fmt: skip
        rows[how] = json.loads(done.stdout.splitlines()[-1])
        for row in rows[how]:
            numbers = f"{row['first']:6.2f} s, then {1e3 * row['second']:6.2f} ms; softmax {row['softmax']:.2f} s"
            print(f"K {K}, V {V}, T {row['T']:6}, compiled {how:8}: {numbers}", flush=True)
    what = "seconds of first calls, forward and backward in bf16, 8 heads, nothing cached, by length in turn"
    return write_record(out, "first_call", f"--run {' '.join(options)}", what, rows=rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-K", type=int, default=16, help="width of keys")
    parser.add_argument("-V", type=int, default=64, help="width of values")
    parser.add_argument("-T", nargs="+", type=int, default=[1024, 4096], help="lengths")
    parser.add_argument("--regime", choices=REGIMES, help="default: chunked above T = 1,340, which is right for K 16")
    parser.add_argument("--run", action="store_true", help="run first calls on a GPU")
    parser.add_argument("--one", action="store_true", help="run them in this process and print JSON")
    parser.add_argument("--apart", action="store_true", help="with --one: compile one kernel after the other")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if (args.run or args.one) and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    if args.one:
        print(json.dumps(first_calls(args.K, args.V, args.T, together=not args.apart)))
        return
    if args.run:
        run(args.K, args.V, args.T, args.out)
        return
    from triton import knobs

    knobs.compilation.always_compile = True
    for T in args.T:
        regime = args.regime or ("quadratic" if T <= 1340 else "chunked")
        measure(Call(torch.bfloat16, args.K, args.V, T, REBASED, regime))


if __name__ == "__main__":
    main()
