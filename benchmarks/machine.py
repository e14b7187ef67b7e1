"""What a benchmark's record says about the machine."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from rebased.runs.provenance import describe_machine


def machine(device: str, *packages: str) -> dict[str, Any]:
    """`describe_machine` plus "device", the name of the GPU or CPU, and "versions" of torch and `packages`."""
    about = describe_machine(torch.device(device))
    versions = {"python": about["python"], "torch": about["torch"]}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return about | {"device": about["gpu"] or f"{platform.machine()} CPU", "versions": versions}
