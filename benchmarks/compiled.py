"""Compiles kernels for a GPU that need not be there, and reads what the compiler made of them.

    PYTHONPATH=src python benchmarks/compiled.py                polynomial attention over widths and lengths, for sm_90
    PYTHONPATH=src python benchmarks/compiled.py -K 16 -V 64    some of it
    PYTHONPATH=src python benchmarks/compiled.py --dtype float32 --tf32 -K 16 -V 5 -T 256

One line per kernel: registers per thread, bytes spilled, shared memory, instructions. The command fails where a
product of the tensor cores reads shared memory through a descriptor that ptxas has built wrong (docs/ptxas.md).
`rebased kernels ptxas` does the same for any Triton kernel.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import product

import torch

from rebased.kernels.machine_code import compile_launch, read_cubin
from rebased.kernels.polynomial import Call, launches_of
from rebased.ops import BASED, REBASED


def calls(dtype: torch.dtype, keys: Sequence[int], values: Sequence[int], lengths: Sequence[int]) -> Iterator[Call]:
    """Lengths that fill tiles and one that does not, documents in a row, a state in and out."""
    for K, V, coefficients, T in product(keys, values, (REBASED, BASED), lengths):
        yield Call(dtype, K, V, T, coefficients, "quadratic" if T <= 1024 else "chunked")
    for K, V in product(keys, values):
        yield Call(dtype, K, V, 700, REBASED, "chunked", "packed")
        yield Call(dtype, K, V, 700, BASED, "chunked", "extend")


def read(call: Call) -> list[str]:
    """A line for each kernel of a call; one that is wrong says so."""
    lines = []
    for launch in launches_of(call):
        compiled, options = compile_launch(launch, 90), launch["options"]
        code = read_cubin(compiled.asm["cubin"])
        name = launch["kernel"].__name__.removesuffix("_kernel")
        what = f"{name:15} {'-'.join(map(str, options.values())):10} {code.registers:>4} {code.stack:>5}"
        wrong = "".join(f"\n  WRONG: {each}" for each in code.wrong)
        lines.append(f"{what} {compiled.metadata.shared:>7} {code.instructions:>6}{wrong}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-K", nargs="+", type=int, default=[16, 32, 64], help="widths of keys")
    parser.add_argument("-V", nargs="+", type=int, default=[5, 21, 64, 128], help="widths of values")
    parser.add_argument(
        "-T", nargs="+", type=int, default=[256, 300, 1024, 4096, 16_384], help="lengths; above 1,024, chunks"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tf32", action="store_true", help="of float32: plain TF32, as where torch allows it")
    parser.add_argument("--calls", type=int, help="stop after so many calls")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(words)
    todo = list(calls(getattr(torch, args.dtype), args.K, args.V, args.T))[: args.calls]
    wrong, precision = 0, "high" if args.tf32 else "highest"
    torch.set_float32_matmul_precision(precision)
    print("kernel          launched    reg spill  shared  instr")
    # Started anew: a fork of a process that has computed gradients waits for ever for threads it does not have.
    with ExitStack() as stack:
        results = map(read, todo)
        if args.workers > 1:
            begin = torch.set_float32_matmul_precision
            pool = ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"), begin, (precision,))
            results = stack.enter_context(pool).map(read, todo)
        for number, (call, lines) in enumerate(zip(todo, results, strict=True), 1):
            print(f"\n{number} of {len(todo)}: K {call.K}, V {call.V}, T {call.T}, {call.coefficients}, {call.kind}")
            print("\n".join(lines), flush=True)
            wrong += sum("WRONG" in line for line in lines)
    print(f"\n{wrong} kernels are wrong" if wrong else "\nall descriptors are sound")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
