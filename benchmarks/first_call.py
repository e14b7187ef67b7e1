"""How long the kernels of a first call take to compile, one after the other and all at once. No GPU is needed.

    PYTHONPATH=src python benchmarks/first_call.py                    T = 1,024 and 4,096, K 16, V 64
    PYTHONPATH=src python benchmarks/first_call.py -K 128 -V 128 -T 4096 --regime quadratic

A call with a backward pass, in bf16 for sm_90, nothing cached. Per kernel: seconds in Python (Triton's language to its
first representation), in the compiler's passes and LLVM, and in ptxas. Python holds the interpreter's lock, the others
do not, so kernels that are compiled in threads share the cores. The last lines say what a call takes either way.
"""

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rebased.ops import REBASED
from rebased.ops.inspection import compile_launch
from rebased.ops.polynomial.gpu.inspection import REGIMES, Call, launches_of


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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-K", type=int, default=16, help="width of keys")
    parser.add_argument("-V", type=int, default=64, help="width of values")
    parser.add_argument("-T", nargs="+", type=int, default=[1024, 4096], help="lengths")
    parser.add_argument("--regime", choices=REGIMES, help="default: chunked above T = 1,340, which is right for K 16")
    args = parser.parse_args(words)
    from triton import knobs

    knobs.compilation.always_compile = True
    for T in args.T:
        regime = args.regime or ("quadratic" if T <= 1340 else "chunked")
        measure(Call(torch.bfloat16, args.K, args.V, T, REBASED, regime))


if __name__ == "__main__":
    main()
