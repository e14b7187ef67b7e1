"""Compile Triton kernels for a GPU that need not be there, and read the machine code."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rebased.kernels.alignment import misaligned

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compile_launch(launch: dict[str, Any], capability: int) -> Any:
    """The compiled kernel of a launch, for compute capability 80, 90, ...

    launch: "kernel", its "values" by name, and "options" of the compiler (num_warps, ...). A value that is not a
    constant of the kernel is a tensor (its dtype counts), a number, None, or a type as Triton writes it: "i32" or
    "*bf16", with ":16" if the number, or the address, is a multiple of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants, attributes = launch["kernel"], {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value, divisible = launch["values"][name], False
        is_one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or value is None or (is_one and not parameter.do_not_specialize):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], divisible = _POINTERS[value.dtype], True
        elif isinstance(value, str):
            signature[name], _, multiple = value.partition(":")
            divisible = multiple == "16"
        elif isinstance(value, int):
            signature[name], divisible = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
        else:
            signature[name] = "fp32"
        if divisible and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch["options"])


def tool(name: str, *options: str, cubin: bytes) -> str:
    """What a program that comes with Triton, such as nvdisasm, prints about a compiled kernel.

    Raises OSError if the program is not there, ValueError if it cannot read the kernel.
    """
    from triton import knobs

    try:
        program = getattr(knobs.nvidia, name).path
    except RuntimeError as error:
        raise OSError(
            f"{name} is not there; Triton's packages for Linux bring it, or set TRITON_{name.upper()}_PATH to CUDA's"
        ) from error
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, *options, file.name], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{name} cannot read this compiled kernel: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout


def instructions(cubin: bytes) -> list[str]:
    """The machine instructions of a compiled kernel, without their predicates."""
    return _instructions(tool("nvdisasm", "-c", cubin=cubin))


def _instructions(listing: str) -> list[str]:
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", listing, re.M)


class MachineCode(NamedTuple):
    """What the compiler made of a kernel."""

    registers: int  # per thread
    stack: int  # bytes per thread; above 0 where registers are spilled
    instructions: int
    products: int  # of tensor cores that read shared memory through descriptors (wgmma)
    wrong: list[str]  # instructions that build a wrong descriptor, or access shared memory where they cannot


def read_cubin(cubin: bytes) -> MachineCode:
    """The machine code of a compiled kernel: what it needs, and whether its descriptors and addresses are right."""
    listing = tool("nvdisasm", "-c", cubin=cubin)
    found = _instructions(listing)
    products = sum(_PRODUCT.match(line) is not None for line in found)
    wrong = [*false_descriptors(found), *misaligned(listing)]
    return MachineCode(*read_resources(cubin), len(found), products, wrong)


class Resources(NamedTuple):
    """What a thread of a compiled kernel needs."""

    registers: int
    stack: int  # bytes; above 0 where registers are spilled


def read_resources(cubin: bytes) -> Resources:
    """The resources of a compiled kernel, without disassembling it as `read_cubin` does, which takes long."""
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", cubin=cubin)))
    return Resources(int(usage["REG"]), int(usage["STACK"]))


_PRODUCT = re.compile(r"[HIQB]GMMA\S* (?:UP\d, )?(?:R\d+|RZ), (?P<register>R\d+)?.*?gdesc\[UR(?P<first>\d+)\]")
_WRITES = re.compile(
    r"(?!\w*SETP)(?P<name>U\w\S*|(?:R2|S2|CS2)UR\S*|VOTEU\S*|C?REDUX\S*)\s+(?:!?U?PT?\d*, )*UR(?P<first>\d+)\b"
)


def false_descriptors(listing: Sequence[str]) -> list[str]:
    """The instructions that build a wrong descriptor of shared memory, or read one that nothing builds.

    A descriptor has 64 bits in two uniform registers: a constant added to an address whose upper half is zero. The
    ptxas of CUDA 12.8 sometimes adds it to another register instead: one that holds an argument of the kernel, or one
    that nothing ever sets, or only the addition itself. So an addition is wrong if its upper half was not set to zero
    before.
    """
    found = []
    ever = {number for line in listing for number in _written(line) if len(re.findall(rf"\bUR{number}\b", line)) < 2}
    for at, line in enumerate(listing):
        if product := _PRODUCT.match(line):
            first = int(product["first"])  # of four registers; the first two are not read if a factor is in registers
            numbers = range(first + 2, first + 4) if product["register"] else range(first, first + 4)
            found += [f"{line} reads UR{number}, which nothing sets" for number in numbers if number not in ever]
        upper = re.match(r"UIADD3\.X UR\d+, (UR\d+|URZ), -?0x[0-9a-f]{8}, URZ, UP\d", line)
        if upper is None or upper[1] == "URZ":
            continue
        number = int(upper[1][2:])
        if number not in ever:
            found.append(f"{line} reads {upper[1]}, which nothing sets")
        last = next((before for before in reversed(listing[:at]) if number in _written(before)), None)
        if last is not None and last != f"UMOV {upper[1]}, URZ":
            found.append(f"{line} after {last}")
    return found


def _written(line: str) -> range:
    """The uniform registers that an instruction writes."""
    written = _WRITES.match(line)
    if written is None:
        return range(0)
    one = written["name"].startswith("USHF")  # of a number of 64 bits it gives half: USHF.L.U64.HI
    width = 2 if not one and re.search(r"64|WIDE", written["name"]) else 1
    return range(int(written["first"]), int(written["first"]) + width)
