"""Compiles kernels for a GPU that need not be there, and reads what the compiler made of them.

    PYTHONPATH=src python benchmarks/compiled.py                polynomial attention over widths and lengths, for sm_90
    PYTHONPATH=src python benchmarks/compiled.py -K 16 -V 64    some of it

A line for each kernel: registers a thread, bytes spilled, shared memory, instructions. The command fails where a
product of the tensor cores reads shared memory through a descriptor that ptxas has built wrong (docs/kernels.md).
"""

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.regimes import Regime, forced

from rebased.ops import BASED, REBASED, Coefficients, init_poly_state, poly_attention, poly_attention_extend

HEADS = 12
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def record_launches(kernel: Any, launches: list[dict[str, Any]]) -> Any:
    """A stand-in for a kernel that only writes down what it is launched with, of tensors no more than their dtype."""

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in kwargs}
                args = tuple(x.new_empty(0) if isinstance(x, torch.Tensor) else x for x in args)
                values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
                launches.append({"kernel": kernel, "values": values, "options": options})

            return launch

    return Recorder()


def compile_launch(launch: dict[str, Any], capability: int) -> Any:
    """The compiled kernel of a recorded launch, for compute capability 80, 90, ..."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants, attributes = launch["kernel"], {}, {}, {}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    for index, name in enumerate(kernel.arg_names):
        value = launch["values"][name]
        if name in fixed or value is None or (isinstance(value, int) and value == 1 and not isinstance(value, bool)):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch["options"])


class Call(NamedTuple):
    """A call of polynomial attention."""

    dtype: torch.dtype
    K: int
    V: int
    T: int
    coefficients: Coefficients
    regime: Regime
    kind: str = "plain"  # packed: with cu_seqlens; extend: with a state in and out
    gradients: bool = True


def gpu_modules() -> list[ModuleType]:
    package = import_module("rebased.ops.polynomial.gpu")
    return [import_module(f"{package.__name__}.{module.name}") for module in iter_modules(package.__path__)]


def kernels_of(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.endswith("_kernel")}


def launches_of(call: Call) -> list[dict[str, Any]]:
    """What a call and its backward pass launch; nothing runs."""
    launches: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(forced(call.regime))
        for module in gpu_modules():
            for name, kernel in kernels_of(module).items():
                stack.enter_context(patch.object(module, name, record_launches(kernel, launches)))
            if hasattr(module, "triton_interpreted"):  # so that CPU tensors get this far
                stack.enter_context(patch.object(module, "triton_interpreted", lambda: True))
        c = call.coefficients
        q, k, v = (
            torch.zeros(1, call.T, HEADS, w, dtype=call.dtype, requires_grad=call.gradients)
            for w in (call.K, call.K, call.V)
        )
        if call.kind == "extend":
            state = init_poly_state(1, HEADS, call.K, call.V, c)
            o, after = poly_attention_extend(q, k, v, state, coefficients=c, backend="triton")
            loss = o.sum() + after.kv.sum() + after.z.sum()
        else:
            cu_seqlens = torch.tensor([0, 5, call.T], dtype=torch.int32) if call.kind == "packed" else None
            loss = poly_attention(q, k, v, coefficients=c, cu_seqlens=cu_seqlens, backend="triton").sum()
        if call.gradients:
            loss.backward()
    return launches


def tool(name: str, *options: str, cubin: bytes) -> str:
    """What one of the programs that come with Triton says of a compiled kernel."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, *options, file.name], check=True, capture_output=True, text=True).stdout


def instructions(cubin: bytes) -> list[str]:
    """Those of the machine, without what they depend on."""
    listing = tool("nvdisasm", "-c", cubin=cubin)
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", listing, re.M)


def false_descriptors(listing: Sequence[str]) -> list[str]:
    """A descriptor of shared memory is 64 bits, a constant added to an address whose upper half is zero. The ptxas of
    CUDA 12.8 sometimes adds it to the kernel's own arguments. Found here: upper halves whose base is not zero."""
    found = []
    for at, line in enumerate(listing):
        upper = re.match(r"UIADD3\.X UR\d+, (UR\d+|URZ), -?0x[0-9a-f]{8}, URZ, UP\d", line)
        if upper is None or upper[1] == "URZ":
            continue
        number = int(upper[1][2:])
        for before in reversed(listing[:at]):
            written = re.match(r"(U(?!ISETP)\w\S*|R2UR|S2UR)\s+(?:UP\d, )?UR(\d+)\b", before)
            width = 2 if written and re.search(r"64|WIDE", written[1]) else 1
            if written and int(written[2]) <= number < int(written[2]) + width:
                if before != f"UMOV {upper[1]}, URZ":
                    found.append(f"{line} after {before}")
                break
    return found


# --- the command -----------------------------------------------------------------------------------------------------


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
        cubin = compiled.asm["cubin"]
        usage = dict(re.findall(r"\b(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", cubin=cubin)))
        listing = instructions(cubin)
        name = launch["kernel"].__name__.removesuffix("_kernel")
        what = f"{name:15} {'-'.join(map(str, options.values())):10} {usage['REG']:>4} {usage['STACK']:>5}"
        wrong = "".join(f"\n  WRONG: {each}" for each in false_descriptors(listing))
        lines.append(f"{what} {compiled.metadata.shared:>7} {len(listing):>6}{wrong}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-K", nargs="+", type=int, default=[16, 32, 64], help="widths of keys")
    parser.add_argument("-V", nargs="+", type=int, default=[5, 21, 64, 128], help="widths of values")
    parser.add_argument(
        "-T", nargs="+", type=int, default=[256, 300, 1024, 4096, 16_384], help="lengths; above 1,024, chunks"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(words)
    todo = list(calls(getattr(torch, args.dtype), args.K, args.V, args.T))
    wrong = 0
    print("kernel          launched    reg spill  shared  instr")
    # Started anew: a fork of a process that has computed gradients waits for ever for threads it does not have.
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for number, (call, lines) in enumerate(zip(todo, pool.map(read, todo), strict=True), 1):
            print(f"\n{number} of {len(todo)}: K {call.K}, V {call.V}, T {call.T}, {call.coefficients}, {call.kind}")
            print("\n".join(lines), flush=True)
            wrong += sum("WRONG" in line for line in lines)
    print(f"\n{wrong} kernels are wrong" if wrong else "\nall descriptors are sound")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
