"""Known runs: results that were computed elsewhere. A sweep reads them from bundles and does not compute them again.

A known run counts for a sweep if it has ended, its record has all its epochs, and its digest and settings are those of
a run of the sweep. It does not count if it was computed on a CPU and the sweep computes on a GPU, which rounds
differently, or if it was trained on another text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rebased.config import plural
from rebased.runs.collect import ENDED, Collection, distinct, gather, write_bundle
from rebased.runs.finished import Run, code_name
from rebased.runs.provenance import describe_code
from rebased.runs.run_config import RunConfig
from rebased.train.kinds import workload_of
from rebased.train.sweep.grid import Point

MAX_LISTED = 3  # records that are named because they are left out


class Known(NamedTuple):
    """What bundles hold of a sweep's runs."""

    found: Collection  # everything in the bundles
    runs: dict[str, Run]  # those that count, by digest
    rejected: Counter[str]  # how many do not count although their digest is wanted, by reason
    elsewhere: int  # runs of other sweeps

    @property
    def all(self) -> list[Run]:
        """Every record in the bundles: none is lost when a new bundle is written."""
        return [*self.found.runs, *self.found.lm_runs, *self.found.others]


def read_known(paths: Sequence[Path], points: Iterable[Point], *, on_gpu: bool) -> Known:
    """The known runs in these bundles, records and folders. `on_gpu` says where the sweep computes."""
    configs = {point.config.digest(): point.config for point in points}
    found = gather(paths)
    runs: dict[str, Run] = {}
    rejected: Counter[str] = Counter()
    elsewhere = set[str]()
    for run in [*found.runs, *found.lm_runs, *found.others]:
        if run.digest not in configs:
            elsewhere.add(run.digest)
        elif reason := why_not(run, configs[run.digest], on_gpu):
            rejected[reason] += 1
        else:
            runs.setdefault(run.digest, run)
    return Known(found, runs, rejected, len(elsewhere))


def why_not(run: Run, config: RunConfig, on_gpu: bool) -> str | None:
    """Why a run of the right digest does not count, in words after "N known runs do not count: "; None if it does."""
    if run.status not in (*ENDED, "damaged"):
        return "not finished"
    if not is_complete(run):
        return "lines of epochs are missing in the record, or damaged"
    if run.digest_of_settings != run.digest:
        return "the settings in the record are not those that its digest names"
    if on_gpu and not all(line["machine"]["gpu"] for line in run.lines if line["type"] in ("run", "resume")):
        return "computed on a CPU, and this sweep computes on a GPU"
    return workload_of(config).other_data(config, run.lines[0])


def is_complete(run: Run) -> bool:
    """True if a run has ended, and its record lacks no epoch."""
    return run.status in ENDED and not run.lacks_epochs


def describe_known(known: Known, wanted: int) -> Iterator[str]:
    """Sentences about what bundles gave. `wanted` is the number of runs of the sweep."""
    others = f"; {known.elsewhere} of other sweeps" if known.elsewhere else ""
    yield f"known: {len(known.runs)} of {plural(wanted, 'run')}{others}"
    for reason, count in known.rejected.items():
        them = "run does" if count == 1 else "runs do"
        yield f"{count} known {them} not count: {reason}"
    codes, here = Counter(run.code for run in known.runs.values()), code_name(describe_code())
    if codes.keys() - {here}:
        listed = "; ".join(f"{code}: {count}" for code, count in codes.most_common())
        yield f"known runs were made with other versions of the code than {here} ({listed}); all of them count"
    if known.found.other:
        records = plural(known.found.other, "record")
        more = ", ..." if known.found.other > MAX_LISTED else ""
        yield f"left out {records} that cannot be read here: {', '.join(known.found.other_names[:MAX_LISTED])}{more}"
    if known.found.damaged_files:
        yield f"damaged files (their intact records were read): {', '.join(known.found.damaged_files)}"


def write_union(path: Path, known: Known, folder: Path) -> int:
    """Write a bundle of the known runs and of those that have ended in the sweep's folder. Returns their number.

    Of a run that has ended, its unfinished and damaged records are left out; two different results are both kept.
    """
    here = gather([folder])
    runs = [run for run in (*here.runs, *here.lm_runs, *here.others, *known.all) if is_complete(run)]
    ended = {run.digest for run in runs}
    runs += [run for run in known.all if run.digest not in ended]
    write_bundle(distinct(runs), path)
    return len({run.digest for run in runs})
