"""Compiles a kernel for a GPU that need not be there, from the arguments of a real launch."""

from typing import Any

import torch

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def record_launches(kernel: Any, launches: list[dict[str, Any]]) -> Any:
    """A stand-in for a kernel that only writes down what it is launched with."""

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in kwargs}
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
