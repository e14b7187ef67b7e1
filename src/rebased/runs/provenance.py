"""Which code ran on which hardware. Host names, user names and paths are left out."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import rebased


def describe_code() -> dict[str, Any]:
    """{"version", "commit", "dirty"}: the package's version, its Git commit, and whether tracked files differ from it.

    Outside a Git checkout "commit" and "dirty" are None."""
    code: dict[str, Any] = {"version": rebased.__version__, "commit": None, "dirty": None}
    package = Path(rebased.__file__).parent
    # The package may be installed inside another project's checkout, whose commit says nothing about this code.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        changes = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
        code |= {"commit": _git(package, "rev-parse", "HEAD"), "dirty": bool(changes)}
    return code


def describe_machine(device: torch.device) -> dict[str, Any]:
    """{"cpu", "cores", "threads", "gpu", "system", "python", "torch"}; "gpu" is None unless `device` is one."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor_name(machine: dict[str, Any]) -> str:
    """The model of the GPU that a machine computes on, or of its CPU. `machine` is what `describe_machine` returns."""
    name: str = machine["gpu"] or machine["cpu"]
    return name


def _cpu_name() -> str:
    try:
        listing = Path("/proc/cpuinfo").read_text()
    except OSError:
        listing = ""  # not Linux
    for text in (listing, _output("lscpu") or ""):  # on ARM only lscpu knows the model's name
        for line in text.splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() == "model name" and value.strip(" -"):
                return value.strip()
    return platform.processor() or platform.machine()


def _git(folder: Path, *words: str) -> str | None:
    return _output("git", *words, folder=folder)


def _output(*command: str, folder: Path | None = None) -> str | None:
    """What a command prints; None if it fails or is not installed."""
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
