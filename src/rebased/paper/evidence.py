"""The records that the page is computed from: those in the package, or a user's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rebased.paper.precision import PrecisionTest, load_precision_test
from rebased.report.probe.files import PROBES, OtherJson, Probe, is_probe_file, read_probes
from rebased.runs.collect import Collection, gather, nothing_found
from rebased.runs.finished import Run

RECORDS = Path(__file__).parent / "records"
"""The package's records: compact copies of those in the repository's results/ (scripts/ship_paper.py makes them)."""
PLANNED = RECORDS / "planned"  # one folder per plan that was committed before its runs, with their records
PRECISION = RECORDS / "precision.json"


@dataclass(frozen=True)
class Evidence:
    """Records of runs and probes, and the test of TF32 against fp32."""

    found: Collection
    probes: Sequence[tuple[str, Probe]]  # (name of the file, record of a probe on a synthetic task)
    precision: PrecisionTest
    shipped: bool = True  # the package's own records
    left_out: Sequence[str] = ()  # files that hold no probe, in words

    @property
    def runs(self) -> list[Run]:
        """The runs on synthetic tasks."""
        return self.found.runs

    @property
    def lm_runs(self) -> list[Run]:
        """The runs of language models."""
        return self.found.lm_runs


def shipped_evidence() -> Evidence:
    """The records in the package, without those of plans, which are judged by themselves."""
    files = [file for file in sorted(RECORDS.iterdir()) if file.is_file() and file != PRECISION]
    return read_evidence(files, shipped=True)


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
    tasks = [pair for pair in probes if pair[1]["kind"] == "task"]
    return Evidence(found, tasks, load_precision_test(PRECISION), shipped, left_out)
