"""What a sweep and a suite have in common: their options, and the files that they share with other machines."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from cyclopts import CoercionError, Parameter, Token, convert

from rebased.config import plural
from rebased.runs.collect import Collection, check_bundle_name
from rebased.runs.sweep_log import SweepLog
from rebased.train.sweep.grid import Point
from rebased.train.sweep.known import Known, describe_known, read_known, write_union
from rebased.train.sweep.plan import Plan, make_plan
from rebased.train.sweep.unfinished import MIB, SUFFIX, Moved, archives, digests_in, pack, unpack

CARRY_MIB = 16  # the largest file of unfinished runs, if no other size is asked for
EVERY = 30.0  # seconds between two bundles that are written while a sweep runs
CARRY_EVERY = 120.0  # seconds between two times that unfinished runs are written


def read_time(kind: Any, tokens: Sequence[Token]) -> timedelta:
    """The time that --for was given. Raises ValueError, which says how to write one."""
    typed = tokens[0].value
    try:
        found: timedelta = convert(timedelta, [typed])
    except (CoercionError, OverflowError):
        found = timedelta()
    if found <= timedelta():
        raise ValueError(f"give a time, such as 9m, 45s or 1h30m, not {typed or 'nothing'}")
    return found


@Parameter(name="*")
@dataclass(frozen=True)
class SweepOptions:
    """How many runs are trained at once, for how long, and what is read and written for other machines.

    Parameters
    ----------
    dry_run
        Print the plan and an estimate of the time, and stop.
    workers
        Number of runs at once. If there are more than GPUs, several runs share a GPU.
    mps
        Start CUDA's MPS daemon meanwhile: several runs then share a GPU better.
    known
        Bundles, records or folders with runs from elsewhere, and files of --carry-unfinished. What has ended there is
        not trained again.
    bundle
        Write one compressed file, such as all.jsonl.gz, with the results of --known and of this command. An older one
        of that name is read first, so nothing in it is lost. It is also written while runs are trained.
    time_limit
        Stop in time, such as 9m or 1h30m: no run is started that would not end by then, and running ones are saved.
    carry_unfinished
        Write the checkpoints of unfinished runs into this file (.tar), or into up to four files in this folder. With
        --known the same command goes on with them elsewhere. Then runs need not end in the time of --for. They are also
        written while runs are trained.
    carry_mib
        The largest size of such a file, in MiB.
    """

    dry_run: Annotated[bool, Parameter(negative="")] = False
    workers: Annotated[int | None, Parameter(name=["--workers", "--jobs"])] = None
    mps: Annotated[bool, Parameter(negative="")] = False
    known: Annotated[tuple[Path, ...], Parameter(negative="", consume_multiple=True, show_default=False)] = ()
    bundle: Path | None = None
    time_limit: Annotated[timedelta | None, Parameter(name="--for", converter=read_time)] = None
    carry_unfinished: Path | None = None
    carry_mib: int = CARRY_MIB


DEFAULT_SWEEP = SweepOptions()


class SweepFiles:
    """The files that the options name; `shipped` is known without being named. Raises ValueError if an option cannot be
    followed."""

    def __init__(self, options: SweepOptions = DEFAULT_SWEEP, shipped: Sequence[Path] = ()) -> None:
        known, bundle, carry = options.known, options.bundle, options.carry_unfinished
        if options.workers is not None and options.workers < 1:
            raise ValueError(f"--workers {options.workers}: give 1 or more")
        if bundle:
            check_bundle_name(bundle)
        if carry and (carry.is_file() if carry.suffix != SUFFIX else carry.is_dir()):
            raise ValueError(f"--carry-unfinished {carry}: give a name that ends in {SUFFIX}, or a folder")
        if options.carry_mib < 1:
            raise ValueError(f"--carry-mib {options.carry_mib}: give 1 or more")
        if missing := [path for path in known if not path.exists()]:
            raise ValueError(f"--known {missing[0]}: there is no such file or folder; leave it out the first time")
        self._bundles = [path for path in (*shipped, *known) if path.suffix != SUFFIX]
        own = [carry] if carry and carry.exists() else []
        self._archives = list(dict.fromkeys(archive for path in (*known, *own) for archive in archives(path)))
        self.options, self._bundle, self._carry, self._limit = options, bundle, carry, options.carry_mib * MIB
        self.known = Known(Collection(), {}, Counter(), 0)
        self._unpacked: list[tuple[Path, Moved]] = []
        self._taken: dict[str, Path] = {}  # which file each unfinished run is from
        self._last = dict.fromkeys((bundle, carry), time.monotonic())  # when a file was written
        self.unwritten: list[Path] = []

    def plan(
        self, points: Sequence[Point], folder: Path, log: SweepLog, file: Path, *, on_gpu: bool, dry_run: bool
    ) -> Plan:
        """The plan of a sweep with what is known from elsewhere. Unless it is a dry run, unfinished runs are unpacked.

        Raises ValueError if a file that is to be written cannot be, or would lose what it holds.
        """
        if not dry_run:
            self._check_writable()
        self._read(points, on_gpu=on_gpu)
        plan = make_plan(points, folder, log.failures, self.known.runs)
        if dry_run:
            return plan
        log.begin(file, [run.digest for run in plan.runs])  # whatever ends this now, the folder is a sweep's
        unpacked = self._unpack(plan)
        return make_plan(points, folder, log.failures, self.known.runs) if unpacked else plan

    def _check_writable(self) -> None:
        """Make the folders of what is to be written. Raises ValueError if nothing can be written there: better before
        hours of training than after."""
        for option, path in (("--bundle", self._bundle), ("--carry-unfinished", self._carry)):
            if path:
                folder = path if path is self._carry and path.suffix != SUFFIX else path.parent
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryFile(dir=folder):
                        pass
                except OSError as error:
                    raise ValueError(
                        f"{option} {path}: nothing can be written in {folder} ({error.strerror}); choose another place"
                    ) from error

    def _read(self, points: Sequence[Point], *, on_gpu: bool) -> None:
        """Read what is known. Raises ValueError if the bundle that is to be written is there and cannot be read whole:
        what was left out would be lost."""
        paths = [*self._bundles, *([self._bundle] if self._bundle and self._bundle.exists() else [])]
        self.known = read_known(paths, points, on_gpu=on_gpu)
        if self._bundle and self._bundle.exists():
            found = read_known([self._bundle], [], on_gpu=on_gpu).found
            if found.damaged_files:
                raise ValueError(f"--bundle {self._bundle}: this file is damaged; move it, or choose another name")
            if found.other:
                raise ValueError(
                    f"--bundle {self._bundle}: this file holds {plural(found.other, 'record')} that cannot be read "
                    f"here ({found.other_names[0]}) and would be lost; move it, or choose another name"
                )

    def _unpack(self, plan: Plan) -> bool:
        """Unpack the unfinished runs that the plan wants. True if there was one. Raises ValueError if files that are
        to be replaced hold runs of another sweep."""
        digests = {run.digest for run in plan.runs}
        for path in archives(self._carry) if self._carry and self._carry.exists() else []:
            if digests_in(path) - digests:
                raise ValueError(f"{path} holds unfinished runs of another sweep; give --carry-unfinished another name")
        self._unpacked = [(path, unpack(path, plan.runs, plan.folder, self._taken)) for path in self._archives]
        return bool(self._taken)

    def describe(self, plan: Plan) -> Iterator[str]:
        """Sentences about the files that --known read."""
        if self._bundles or self.known.found.files:
            yield from describe_known(self.known, len(plan.runs))
        for path, moved in self._unpacked:
            runs = sum(source == path for source in self._taken.values())
            left = moved.runs + moved.left - runs
            others = f"; {plural(left, 'other run')} in it not needed or damaged" if left else ""
            yield f"{path}: {plural(runs, 'unfinished run')} to go on with{others}"
        if not self._unpacked:  # a dry run
            new = {run.digest for run in plan.runs if run.status == "new"}
            for path in self._archives:
                yield f"{path}: {plural(len(digests_in(path) & new), 'unfinished run')} to go on with"

    def keep(self, plan: Plan) -> Callable[[], None]:
        """A function to call after a run: it writes the bundle and the unfinished runs, if the last ones are old. So
        little is lost if the machine is taken away."""

        def write() -> None:
            for path, written, every in self._outputs():
                if time.monotonic() - self._last[path] > every:
                    with suppress(OSError):  # the last one, after the sweep, says what is wrong
                        written(path, plan)
                    self._last[path] = time.monotonic()

        return write

    def write(self, plan: Plan) -> Iterator[str]:
        """Write the bundle and the unfinished runs. Yields a sentence about each; `unwritten` has those that failed."""
        for path, written, _ in self._outputs():
            try:
                yield f"wrote {path}: {written(path, plan)}"
            except OSError as error:
                self.unwritten.append(path)
                reason = error.strerror or error
                yield f"could not write {path} ({reason}): make room there, or choose another place; then continue"

    def _outputs(self) -> Iterator[tuple[Path, Callable[[Path, Plan], str], float]]:
        """Yield (path, writer, interval in seconds) for the bundle and the unfinished runs. A writer returns a text."""
        if self._bundle:
            yield self._bundle, self._write_bundle, EVERY
        if self._carry:
            yield self._carry, self._write_unfinished, CARRY_EVERY

    def _write_bundle(self, path: Path, plan: Plan) -> str:
        runs = write_union(path, self.known, plan.folder)
        return f"{plural(runs, 'run')}, {path.stat().st_size / 1000:,.0f} kB"

    def _write_unfinished(self, path: Path, plan: Plan) -> str:
        packed = pack(plan.runs, path, self._limit)
        left = f"; no room for {packed.left} more (--carry-mib)" if packed.left else ""
        return f"{plural(packed.runs, 'unfinished run')}, {packed.bytes / 1e6:,.1f} MB{left}"
