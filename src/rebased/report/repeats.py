"""Runs that were trained more than once, by one person or by several: equal results, or different ones."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rebased.config import plural
from rebased.report.tables import NONE, Table
from rebased.runs.collect import Collection
from rebased.runs.finished import Run

SCORES = ("test", "valid", "accuracy")  # of an end line: what a run was found to reach


class Repeat(NamedTuple):
    """A run and further records of it, each of which ended."""

    counted: Run  # the one that results are computed from
    others: Sequence[Run]

    @property
    def differing(self) -> list[Run]:
        """The other records whose results are not those of the one that counts."""
        return [run for run in self.others if outcome(run) != outcome(self.counted)]


def outcome(run: Run) -> list[Any]:
    """What a run computed, without times and places: equal for two runs that agree to the last digit."""
    lines: list[Any] = [[line["epoch"], line["test"], line.get("held_out")] for line in run.epochs]
    return [*lines, run.status, {key: run.lines[-1].get(key) for key in SCORES}]


def find_repeats(found: Collection) -> list[Repeat]:
    """The runs of which there are several trainings, not only copies of one record."""
    others: dict[str, list[Run]] = {}
    for run in found.others:
        if all(run.lines != other.lines for other in others.get(run.digest, [])):
            others.setdefault(run.digest, []).append(run)
    counted = {run.digest: run for run in (*found.runs, *found.lm_runs)}
    return [Repeat(counted[digest], runs) for digest, runs in others.items()]


def warn_about_repeats(repeats: Sequence[Repeat]) -> Iterator[str]:
    """Sentences about runs that were trained several times: how many agree, and how far the others are apart."""
    equal = sum(not repeat.differing for repeat in repeats)
    if equal:
        yield f"{plural(equal, 'run')} trained more than once, with equal results."
    differing = [repeat for repeat in repeats if repeat.differing]
    if differing:
        yield (
            f"{plural(len(differing), 'run')} trained more than once, with different results; they are listed below. "
            "One whole record of each counts, chosen by settings and code and never by its result. On a GPU sums are "
            "taken in another order each time, so equal runs drift apart, and chance may decide whether a run begins "
            "to learn."
        )


def repeat_table(repeats: Sequence[Repeat]) -> Table:
    """One row per record of the runs whose results differ: what was reached, where, and with which code."""
    rows = []
    for repeat in repeats:
        for run in [repeat.counted, *repeat.differing] if repeat.differing else []:
            counts = "yes" if run is repeat.counted else "no"
            rows.append((run.digest, run.model, str(run.seed), score(run), counts, run.device, run.code, run.file))
    return Table(("run", "model", "seed", "result", "counts", "device", "code", "file"), rows)


def score(run: Run) -> str:
    """The result of a run: its best test accuracy, or the test perplexity of a language model."""
    if run.kind.has_epochs:
        return f"{run.best.accuracy:.4f}"
    try:
        return f"perplexity {run.lines[-1]['test']['all']['perplexity']:.3f}"
    except (KeyError, TypeError, ValueError):
        return NONE


def code_table(runs: Sequence[Run]) -> Table | None:
    """One row per version of the code: its runs, models, devices and files. None if there is one version only."""
    codes: dict[str, list[Run]] = {}
    for run in runs:
        codes.setdefault(run.code, []).append(run)
    if len(codes) < 2:
        return None
    rows = []
    for code, group in sorted(codes.items(), key=lambda item: -len(item[1])):
        models, devices, files = (
            ", ".join(sorted({name(run) for run in group}))
            for name in (lambda run: run.model, lambda run: run.device, lambda run: run.file or run.folder)
        )
        rows.append((code, str(len(group)), models, devices, files))
    return Table(("code", "runs", "models", "devices", "files"), rows)
