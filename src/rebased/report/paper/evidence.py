"""The records that the page is computed from: those in the package, or a user's own."""

import gzip
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebased.files import JSON_BYTES, parse_json
from rebased.report.paper.cost import Speeds, load_speeds
from rebased.report.paper.probe_schema import check_probe
from rebased.runs.collect import Collection, gather, nothing_found
from rebased.runs.finished import Run

RECORDS = Path(__file__).parent / "records"
"""The package's records: compact copies of those in the repository's results/ (ship.py makes them)."""
SPEEDS = RECORDS / "speeds.json"
PROBES = ("*.json", "*.json.gz", "*.json.xz")
OPENERS: dict[str, Callable[..., Any]] = {".json": open, ".gz": gzip.open, ".xz": lzma.open}
Probe = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """Records of runs and probes, and the speeds that costs are computed from."""

    found: Collection
    probes: Sequence[tuple[str, Probe]]  # (name of the file, record of a probe on a synthetic task)
    speeds: Speeds
    text_probes: Sequence[tuple[str, Probe]] = ()  # of language models
    shipped: bool = True  # the package's own records
    left_out: Sequence[str] = field(default=())  # files that hold no probe, in words

    @property
    def runs(self) -> list[Run]:
        """The runs on synthetic tasks."""
        return self.found.runs

    @property
    def lm_runs(self) -> list[Run]:
        """The runs of language models."""
        return self.found.lm_runs


def shipped_evidence() -> Evidence:
    """The records in the package."""
    return read_evidence([RECORDS], shipped=True)


def read_evidence(
    paths: Sequence[Path],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    shipped: bool = False,
) -> Evidence:
    """The records in bundles, folders and files of probes. ValueError if there is none, or a named file is damaged."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder")
    named = [path for path in paths if path.is_file() and is_probe_file(path)]
    found = gather([path for path in paths if path not in named], on_progress)
    probes = [(path.name, probe) for path in named for probe in read_probes(path)]
    left_out = []
    for folder in (path for path in paths if path.is_dir()):
        for file in sorted({file for pattern in PROBES for file in folder.rglob(pattern)}):
            try:
                probes += [(file.name, probe) for probe in read_probes(file)]
            except OtherJson:
                continue  # such as a checkpoint's
            except ValueError as error:
                left_out.append(f"{error}; left out.")
    if not found.runs and not found.lm_runs and not probes:
        raise ValueError(nothing_found(paths, found, "a run or a probe"))
    tasks, texts = ([pair for pair in probes if pair[1]["kind"] == kind] for kind in ("task", "text"))
    return Evidence(found, tasks, load_speeds(SPEEDS), texts, shipped, left_out)


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
