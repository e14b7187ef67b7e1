"""Files of probes: what `rebased probe --json` and probed runs have written, read within limits and checked."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rebased.files import JSON_BYTES, parse_json
from rebased.report.probe.schema import check_probe

PROBES = ("*.json", "*.json.gz", "*.json.xz")
OPENERS: dict[str, Callable[..., Any]] = {".json": open, ".gz": gzip.open, ".xz": lzma.open}
Probe = dict[str, Any]


class OtherJson(ValueError):
    """A JSON file that is whole but holds no probe."""


def is_probe_file(path: Path) -> bool:
    """Whether the name is that of a file of probes: .json, .json.gz or .json.xz."""
    return path.suffix == ".json" or path.suffixes[-2:] in ([".json", ".gz"], [".json", ".xz"])


def read_probes(path: Path) -> list[Probe]:
    """The records of probes in a file that `rebased probe --json` or a probed run has written. ValueError if none."""
    try:
        with OPENERS[path.suffix](path, "rb") as file:
            content = file.read(JSON_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) > JSON_BYTES:
        raise ValueError(f"{path} holds more than {JSON_BYTES:,} bytes; that is no file of probes")
    tree = parse_json(content, str(path))
    kind = tree.get("type") if isinstance(tree, dict) else None
    if kind not in ("probe", "probes"):
        raise OtherJson(f"{path} is not the record of a probe; give what `rebased probe --json` wrote")
    records = tree.get("records") if kind == "probes" else [tree]
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} has no list of probes; write it again with `rebased probe --json`")
    for n, record in enumerate(records, start=1):
        try:
            check_probe(record)
        except ValueError as error:
            raise ValueError(f"{path} is damaged, or of other code: probe {n}: {error}") from error
    return records
