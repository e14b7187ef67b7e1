"""Compile Triton kernels for a GPU that need not be there, and read the machine code."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def record_launches(kernel: Any, launches: list[dict[str, Any]]) -> Any:
    """A stand-in for a Triton kernel. It appends to `launches` what it is launched with (of tensors only the dtype)."""

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


def tool(name: str, *options: str, cubin: bytes) -> str:
    """What a program that comes with Triton, such as nvdisasm, prints about a compiled kernel."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, *options, file.name], check=True, capture_output=True, text=True).stdout


def instructions(cubin: bytes) -> list[str]:
    """The machine instructions of a compiled kernel, without their predicates."""
    listing = tool("nvdisasm", "-c", cubin=cubin)
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", listing, re.M)


def false_descriptors(listing: Sequence[str]) -> list[str]:
    """The instructions that build a wrong descriptor of shared memory.

    A descriptor has 64 bits: a constant added to an address whose upper half is zero. The ptxas of CUDA 12.8 sometimes
    adds it to the kernel's own arguments instead. Such an instruction adds to an upper half that is not zero.
    """
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
