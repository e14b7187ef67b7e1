"""What a benchmark's record says about the machine, and how a record is written."""

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rebased.files import replacing
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


def write_record(folder: Path, name: str, options: str, what: str, *, device: str = "cuda", **content: Any) -> Path:
    """Write what `python benchmarks/NAME.py OPTIONS` measured into folder/NAME-<time>-<GPU, or kind of CPU>.json."""
    now, about = datetime.now(UTC), machine(device, "triton")
    kind = platform.machine() if about["gpu"] is None else "h200" if "H200" in about["gpu"] else "cuda"
    record = {
        "what": what,
        "date": now.isoformat(timespec="seconds"),
        "command": f"python benchmarks/{name}.py {options}".rstrip(),
        "machine": about,
        **content,
    }
    path = folder / f"{name}-{now:%Y-%m-%d-%H%M%S}-{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")
    print(path)
    return path
