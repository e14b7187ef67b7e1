"""Compile any Triton kernel for a GPU that need not be there, and find products that ptxas has miscompiled.

    from rebased.kernels.ptxas import check_kernel

    reports = check_kernel(my_kernel, {"x": "*bf16", "n": "i32", "BLOCK": 64}, arch="sm_90")
    assert not any(report.wrong for report in reports)

`rebased kernels ptxas` is the same as a command; docs/ptxas.md says what is wrong with such products.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rebased.kernels.machine_code import compile_launch, read_cubin
from rebased.ops.backend import has_triton

LARGEST_CUBIN = 64 * 2**20
_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
TYPES = (*_INTEGERS, "fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e4b8", "fp8e5", "fp8e5b16")


class KernelReport(NamedTuple):
    """What the compiler made of a kernel."""

    name: str
    constants: dict[str, Any]
    """Its constexpr arguments and the options of the compiler."""
    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread; above 0 where registers were spilled."""
    shared: int | None
    """Bytes of shared memory per program; None if a compiled kernel came without its metadata."""
    instructions: int
    products: int
    """Instructions of the tensor cores that read shared memory through descriptors: wgmma, on Hopper alone."""
    wrong: list[str]
    """Instructions that build a wrong descriptor, or read one that nothing builds. Empty if all is well."""
    seconds: float | None = None
    """How long it took to compile."""


def check_kernel(
    kernel: Any,
    values: Mapping[str, Any],
    *,
    arch: str = "sm_90",
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> list[KernelReport]:
    """Compile a Triton kernel and read its machine code; one report per config if it is autotuned. No GPU is needed.

    Args:
        kernel: a function under @triton.jit, also under @triton.autotune and @triton.heuristics.
        values: its arguments by name. Of an argument that is no constexpr the type is enough: "i32", "fp32", "*bf16"
            for a pointer (aligned to 16 bytes, as torch's are; "*bf16:1" if not), "i32:16" for a multiple of 16. A
            number stands for its type and for what Triton makes of it: 1 is a constant, 4096 a multiple of 16.
        arch: the GPU, "sm_80", "sm_90", ...
        num_warps, num_stages: as at the launch; default: the config's, or Triton's 4 and 3.

    Raises:
        ValueError: if arguments are missing or unknown, the GPU is none of NVIDIA's that Triton compiles for, or the
            kernel does not compile.
        OSError: if ptxas, nvdisasm or cuobjdump is not there.
    """
    need_triton()
    capability = parse_arch(arch)
    function, configs, heuristics = _unwrap(kernel)
    reports, seen = [], []
    for config in configs:
        given = {**config["values"], **values}
        options = config["options"] | {
            name: value for name, value in (("num_warps", num_warps), ("num_stages", num_stages)) if value is not None
        }
        given = _complete(function, given, heuristics)
        if (given, options) not in seen:
            seen.append((given, options))
            reports.append(_compile(function, given, options, capability))
    return reports


def need_triton() -> None:
    """Raise ValueError if Triton is not installed, or too old."""
    if not has_triton():
        raise ValueError("this needs Triton 3.5 or newer: pip install -U triton (on Linux)")


def parse_arch(text: str) -> int:
    """The compute capability of a GPU's name: "sm_90", "sm_90a" or "90" is 90.

    Raises ValueError if Triton's ptxas does not know it: asked for such a GPU, LLVM would end the process.
    """
    found = re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?", text)
    known = _known_archs()
    if found is None or int(found[1]) not in known:
        names = ", ".join(f"sm_{number}" for number in known)
        raise ValueError(f"arch {text!r} is not a GPU that Triton compiles for here; choose one of {names}")
    return int(found[1])


@cache
def _known_archs() -> list[int]:
    """The GPUs that both programs called ptxas know and Triton compiles for, from Turing on."""
    known: set[int] = set()
    for capability, wanted in ((90, range(75, 100)), (100, range(100, 1000))):
        said = subprocess.run([_ptxas(capability).path, "--help"], capture_output=True, text=True, check=False).stdout
        known |= {int(number) for number in re.findall(r"\bsm_(\d+)", said)} & set(wanted)
    return sorted(known)


def parse_value(text: str) -> Any:
    """An argument as a command line gives it: a type ("*bf16", "i32:16"), a number, true, false, none, or a word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def check_cubins(path: Path) -> Iterator[tuple[Path, KernelReport]]:
    """The reports of compiled kernels: a .cubin file, or all of them below a folder, such as Triton's cache.

    Raises ValueError if there is none, or one is larger than 64 MiB or cannot be read.
    """
    need_triton()
    paths = sorted(path.rglob("*.cubin")) if path.is_dir() else [path]
    if not paths or not paths[0].is_file():
        raise ValueError(f"{path}: there is no compiled kernel (.cubin)")
    with ThreadPoolExecutor() as pool:  # each reads by two programs
        yield from zip(paths, pool.map(_read, paths), strict=True)


def _read(path: Path) -> KernelReport:
    if path.stat().st_size > LARGEST_CUBIN:
        raise ValueError(f"{path} is larger than a compiled kernel ({LARGEST_CUBIN >> 20} MiB)")
    code, about = read_cubin(path.read_bytes()), _metadata(path.with_suffix(".json"))
    options: dict[str, Any] = {name: about[name] for name in ("num_warps", "num_stages") if name in about}
    return KernelReport(path.stem, options, shared=about.get("shared"), **code._asdict())


def triton_cache() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    need_triton()
    from triton import knobs

    return Path(knobs.cache.dir)


def ptxas_version(arch: str = "sm_90") -> str:
    """The version of the ptxas that Triton uses for this GPU, such as "12.8"."""
    need_triton()
    return str(_ptxas(parse_arch(arch)).version)


def newer_ptxas() -> tuple[str, str] | None:
    """(version, path) of the ptxas that Triton brings for Blackwell, if it is newer than the one for older GPUs."""
    need_triton()
    try:
        ours, other = _ptxas(90), _ptxas(100)
    except OSError:
        return None
    newer = [int(part) for part in other.version.split(".")] > [int(part) for part in ours.version.split(".")]
    return (str(other.version), str(other.path)) if newer else None


@contextmanager
def using_ptxas(path: str) -> Iterator[None]:
    """Inside, Triton compiles with the ptxas at `path`."""
    need_triton()
    from triton import knobs

    if knobs.NvidiaTool.from_path(path) is None:
        raise OSError(f"{path} is not a ptxas that runs here")
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = path
        yield


def _ptxas(capability: int) -> Any:
    """Triton's description of its ptxas for a GPU: path and version."""
    from triton import knobs

    try:
        if capability >= 100 and "ptxas_blackwell" in vars(type(knobs.nvidia)):  # newer versions of Triton
            return knobs.nvidia.ptxas_blackwell
        return knobs.nvidia.ptxas
    except RuntimeError as error:
        raise OSError("ptxas is not there; Triton's packages for Linux bring it, or set TRITON_PTXAS_PATH") from error


def _unwrap(kernel: Any) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The function under @triton.jit, its configs, and the heuristics that compute further constants."""
    from triton.runtime.jit import JITFunction

    configs: list[dict[str, Any]] = [{"values": {}, "options": {}}]
    heuristics: dict[str, Any] = {}
    while not isinstance(kernel, JITFunction):
        if hasattr(kernel, "configs"):
            found = [{"values": dict(config.kwargs), "options": _options_of(config)} for config in kernel.configs]
            configs = found or configs
        elif isinstance(getattr(kernel, "values", None), dict):
            heuristics |= kernel.values
        elif type(kernel).__name__ == "InterpretedFunction":
            raise ValueError("TRITON_INTERPRET is set, so nothing is compiled; unset it")
        else:
            raise ValueError(f"{kernel!r} is not a Triton kernel: it needs @triton.jit")
        kernel = kernel.fn
    return kernel, configs, heuristics


def _options_of(config: Any) -> dict[str, Any]:
    names = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    return {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}


def _complete(kernel: Any, given: dict[str, Any], heuristics: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every argument. What is not given comes from a heuristic or is the default of the function."""
    unknown = [name for name in given if name not in kernel.arg_names]
    if unknown:
        raise ValueError(
            f"kernel {kernel.__name__} has no argument {unknown[0]!r}; it takes {', '.join(kernel.arg_names)}"
        )
    given = dict(given)
    for name, compute in heuristics.items():
        if name not in given:
            try:
                given[name] = compute(given)
            except Exception:  # it may look at tensors, and there are none
                continue
    missing, values = [], {}
    for parameter in kernel.params:
        name = parameter.name
        if name in given:
            values[name] = given[name] if parameter.is_constexpr else _typed(name, given[name])
        elif parameter.has_default:
            values[name] = parameter.default
        else:
            missing.append((name, parameter.is_constexpr))
    if missing:
        constants, others = (", ".join(n for n, fixed in missing if fixed is wanted) for wanted in (True, False))
        needs = [f"the constants {constants}"] * bool(constants) + [f"types of {others}"] * bool(others)
        raise ValueError(
            f"kernel {kernel.__name__} also needs {' and '.join(needs)}; give each as NAME=VALUE, for example "
            f"{missing[0][0]}={'64' if missing[0][1] else '*bf16'}"
        )
    return values


def _typed(name: str, value: Any) -> Any:
    """The value of an argument that is no constexpr, its type checked. Pointers are aligned unless they say ":1"."""
    if not isinstance(value, str):
        return value
    kind, colon, multiple = value.partition(":")
    if kind.startswith("tensordesc"):
        return kind
    if kind.lstrip("*") not in TYPES or multiple not in (("1", "16") if colon else ("",)):
        raise ValueError(
            f"{name}={value}: not a type; write *bf16 (a pointer), i32, i32:16 (a multiple of 16), fp32, a number, none"
        )
    return f"{kind}:16" if kind.startswith("*") and not colon else value


def _compile(kernel: Any, values: dict[str, Any], options: dict[str, Any], capability: int) -> KernelReport:
    from triton import knobs
    from triton.errors import TritonError

    _ptxas(capability)
    start = time.perf_counter()
    try:
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            compiled = compile_launch({"kernel": kernel, "values": values, "options": options}, capability)
    except OSError:
        raise
    except (TritonError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"kernel {kernel.__name__} does not compile for sm_{capability}: {said[-600:]}") from error
    seconds, code = time.perf_counter() - start, read_cubin(compiled.asm["cubin"])
    fixed = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    shared = compiled.metadata.shared
    return KernelReport(kernel.__name__, fixed | options, shared=shared, seconds=seconds, **code._asdict())


def _metadata(path: Path) -> dict[str, Any]:
    """What Triton wrote beside a compiled kernel; nothing if it did not, or if it cannot be read."""
    try:
        if path.stat().st_size > LARGEST_CUBIN:
            return {}
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
