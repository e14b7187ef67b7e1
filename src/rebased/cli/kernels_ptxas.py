"""rebased kernels ptxas: compile a Triton kernel without a GPU, and find products that ptxas has miscompiled."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from rebased.cli.imports import import_user_code
from rebased.cli.output import TO_TERMINAL, Output, say
from rebased.config import did_you_mean
from rebased.kernels.ptxas import (
    KernelReport,
    check_cubins,
    check_kernel,
    need_triton,
    newer_ptxas,
    parse_value,
    ptxas_version,
    triton_cache,
    using_ptxas,
)

WRONG = 1
HEAD = "  registers  stack  shared  instructions  products  seconds  kernel"


def ptxas(
    target: str | None = None,
    *arguments: str,
    arch: str = "sm_90",
    warps: int | None = None,
    stages: int | None = None,
    ptxas: Annotated[Path | None, Parameter(name="--ptxas")] = None,
    to: Output = TO_TERMINAL,
) -> int:
    """Compile a Triton kernel and search its machine code for wrong descriptors of shared memory. No GPU is needed.

    One line per kernel: registers per thread, bytes of stack (spills), bytes of shared memory, instructions, products
    of the tensor cores that read descriptors. An autotuned kernel is compiled once per config. The exit code is 1 if a
    descriptor is wrong, 2 if nothing could be checked.

    Parameters
    ----------
    target
        FILE.py:KERNEL or MODULE:KERNEL; or a .cubin file; or a folder of them. Default: the folder in which Triton
        keeps compiled kernels, so whatever has run here is checked.
    arguments
        The arguments of the kernel, each as NAME=VALUE: a type (x=*bf16, n=i32, n=i32:16 for a multiple of 16), a
        number (BLOCK=64), true, false or none. Pointers are taken to be aligned to 16 bytes; x=*bf16:1 if one is not.
    arch
        The GPU to compile for: sm_80, sm_90, sm_100, ...
    warps
        num_warps of the launch. Default: the config's, or 4.
    stages
        num_stages of the launch. Default: the config's, or 3.
    ptxas
        The program to compile with. Default: the one that Triton uses.
    """
    to.check()
    need_triton()
    source, colon, name = (target or "").rpartition(":")
    given = parse_arguments(arguments)
    console, result = to.console(), to.result_console()
    options: dict[str, Any] = {"arch": arch, "num_warps": warps, "num_stages": stages}
    kernel = find_kernel(import_user_code(source, said=source), source, name) if colon else None
    folder = Path(target) if target else triton_cache()
    if kernel is None and folder.suffix == ".py":
        raise ValueError(f"{target}: which kernel in this file? write {target}:KERNEL")
    if kernel is None and (given or ptxas):
        raise ValueError(f"{folder} is compiled already; arguments and --ptxas need FILE.py:KERNEL")
    found: list[dict[str, Any]] = []
    wrong = products = 0
    with using_ptxas(str(ptxas)) if ptxas else nullcontext():
        what = f"compiled kernels of {folder}" if kernel is None else f"ptxas {ptxas_version(arch)} for {arch}"
        with console.status(Text(f"{what} ...")) as status:
            reports = check_kernel(kernel, given, **options) if kernel is not None else ()
            for path, report in check_cubins(folder) if kernel is None else ((None, each) for each in reports):
                if not found:
                    say(result, f"{what}\n{HEAD}")
                say_report(result, path, report)
                found.append({**({"file": str(path)} if path else {}), **report._asdict()})
                wrong, products = wrong + bool(report.wrong), products + report.products
                status.update(Text(f"{what}: {len(found)} read ..."))
    say(result, verdict(wrong, products, len(found)))
    remedy = find_remedy(kernel, given, options, console) if wrong and kernel is not None and ptxas is None else None
    if remedy:
        say(result, remedy)
    to.emit({"compiler": what, "wrong": wrong, "remedy": remedy, "kernels": found})
    return WRONG if wrong else 0


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """{"x": "*bf16", "BLOCK": 64} of ["x=*bf16", "BLOCK=64"]."""
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(
                f"{word!r} is not an argument of a kernel; write NAME=VALUE, for example x=*bf16 or BLOCK=64"
            )
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = parse_value(text)
    return found


def find_kernel(module: Any, source: str, name: str) -> Any:
    """Return the Triton kernel of a module by its name."""
    kernels = [key for key, value in vars(module).items() if hasattr(value, "fn") and hasattr(value, "arg_names")]
    if not hasattr(module, name):
        known = did_you_mean(name, kernels) if kernels else "it has no Triton kernels"
        raise ValueError(f"{source} has no {name!r}; {known}")
    return getattr(module, name)


def say_report(console: Console, path: Path | None, report: KernelReport) -> None:
    """Print a kernel's line, and one per wrong instruction."""
    shared = "" if report.shared is None else f"{report.shared}"
    seconds = "" if report.seconds is None else f"{report.seconds:.1f}"
    numbers = f"  {report.registers:9}  {report.stack:5}  {shared:>6}  {report.instructions:12}  {report.products:8}"
    constants = " ".join(f"{name}={value}" for name, value in report.constants.items())
    say(console, f"{numbers}  {seconds:>7}  {report.name} {constants}".rstrip())
    if report.wrong and path:
        say(console, f"    {path}")
    for line in report.wrong:
        say(console, f"    WRONG: {line}")


def verdict(wrong: int, products: int, count: int) -> str:
    """The last line: how many kernels are wrong."""
    kernels = f"{count:,} {'kernel' if count == 1 else 'kernels'}"
    if wrong:
        return f"miscompiled: {wrong} of {kernels}"
    if not products:
        return f"nothing to check: no kernel uses Hopper's products ({kernels})"
    return f"all descriptors are sound ({kernels})"


def find_remedy(kernel: Any, given: dict[str, Any], options: dict[str, Any], console: Console) -> str | None:
    """What helps: the newer ptxas that Triton brings, if the same kernel is sound with it."""
    newer = newer_ptxas()
    if newer is None:
        return None
    version, path = newer
    with using_ptxas(path), console.status(Text(f"compiling again with ptxas {version} ...")):
        if any(report.wrong for report in check_kernel(kernel, given, **options)):
            return f"ptxas {version} miscompiles it too; change its tiles, or the number of warps"
    return f"ptxas {version}, which Triton brings for newer GPUs, compiles it right: TRITON_PTXAS_PATH={path}"
