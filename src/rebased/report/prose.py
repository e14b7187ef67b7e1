"""Sentences that the reports of both kinds of runs share."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rebased.config import plural
from rebased.runs.collect import Collection
from rebased.runs.finished import Run
from rebased.runs.own_code import recorded_code

SHOWN = 5  # files or records that a sentence names


def has_changes(run: Run) -> bool:
    """Whether some of its code was in no commit: of its beginning, or of a time when it was resumed."""
    return any(line["code"]["dirty"] for line in run.lines if line["type"] in ("run", "resume"))


def warn_about_code(runs: Sequence[Run]) -> Iterator[str]:
    """Warnings if the runs were made with several versions of the code, or with code that no commit holds."""
    codes = Counter(run.code for run in runs)
    if len(codes) > 1:
        versions = "; ".join(f"{code}: {plural(count, 'run')}" for code, count in codes.most_common())
        many = f"The runs were made with {len(codes)} versions of the code"
        yield f"{many}, which may cause differences between them. {versions}."
    yield from warn_about_changes(runs)
    own = {item for run in runs for item in recorded_code(run.lines).items()}  # (what it is of, checksum)
    for what, count in sorted(Counter(what for what, _ in own).items()):
        if count > 1:
            yield f"The file of {what} was changed between these runs: they have {count} versions of it."


def warn_about_changes(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence if some of the runs were made with code that no commit holds."""
    if changed := sum(map(has_changes, runs)):
        which = f"{changed} of {plural(len(runs), 'run')}"
        yield f"{which} were made by code with changes that no commit holds; nobody can run that code again."


def warn_about_records(found: Collection, ended: Sequence[Run]) -> Iterator[str]:
    """Warnings about records that are damaged or missing, and about runs of sweeps that failed or have not begun.
    `ended` are the runs whose results count."""
    if found.damaged_lines:
        yield f"{plural(found.damaged_lines, 'damaged line')} skipped, in {shortened(found.damaged_files)}."
    if found.nameless:
        where = shortened(found.damaged_files)
        yield f"{plural(found.nameless, 'record')} left out: the first line is not readable, in {where}."
    if found.other:
        yield (
            f"{plural(found.other, 'record')} left out because no run on a synthetic task or of a language model has "
            f"such settings: {shortened(found.other_names)}."
        )
    if found.repeated:
        yield (
            f"{plural(found.repeated, 'record')} left out: of runs that were found already. One record of each run "
            "counts, a whole one if there is one."
        )
    digests = [(run.digest, run.digest_of_settings) for run in (*ended, *found.others)]
    if changed := [digest for digest, own in digests if own not in (None, digest)]:
        yield (
            f"{plural(len(changed), 'record')} whose settings have another digest; perhaps somebody changed them by "
            f"hand: {shortened(sorted(set(changed)))}."
        )
    if unknown := [digest for digest, own in digests if own is None]:
        yield (
            f"{plural(len(unknown), 'record')} with mixers, tasks or settings that are not known here: their settings "
            f"could not be compared with their digest ({shortened(sorted(set(unknown)))}). If you have the code of "
            "these mixers or tasks, give its file with --import."
        )
    done = {run.digest for run in ended}
    if failed := [error for digest, error in found.failures.items() if digest not in done]:
        yield f"{plural(len(failed), 'run')} failed: in no result. The first error: {failed[0]}"
    if absent := found.asked - found.failures.keys() - {run.digest for run in (*found.runs, *found.lm_runs)}:
        yield (
            f"{plural(len(absent), 'run')} of a sweep without a record here: not begun yet, left out by its stages, or "
            "known from a bundle that is not among the files given."
        )


def warn_about_gaps(ended: Sequence[Run]) -> Iterator[str]:
    """A warning about records that lack epochs. The package's own lack most, on purpose."""
    if gaps := sorted({run.digest for run in ended if run.lacks_epochs}):
        yield f"{plural(len(gaps), 'run')} with epochs missing in the record, perhaps the best: {shortened(gaps)}."


def shortened(names: Sequence[str]) -> str:
    """The first few names, and dots if there are more."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def warn_about_open_runs(runs: Sequence[Run], found: Collection) -> Iterator[str]:
    """One warning per status of runs that have not ended; those that a sweep knows as failed are named elsewhere."""
    for status, count in Counter(run.status for run in runs if run.digest not in found.failures).items():
        yield f"{plural(count, 'run')} {status}: in no result, but in the list of all runs."


def warn_about_diverged(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence if some of the runs diverged."""
    if diverged := [run for run in runs if run.status == "diverged"]:
        early = sum(not run.epochs for run in diverged)
        yield (
            f"{plural(len(diverged), 'run')} diverged. Each counts with the best accuracy it had reached. "
            f"{early} of them diverged before the end of the first epoch and count with 0."
        )


def describe_given_up(runs: Sequence[Run]) -> Iterator[str]:
    """One sentence per rule `train.give_up` that ended runs early: the rule, how many runs it ended, and which."""
    ended: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        rule = run.settings["train"].get("give_up")
        if run.gave_up and isinstance(rule, dict):
            ended.setdefault((str(rule.get("below")), str(rule.get("after_epoch"))), []).append(run)
    for (below, epoch), group in ended.items():
        names = [f"{run.model} (D = {run.d_model}, lr {run.lr:g}, seed {run.seed})" for run in group]
        yield (
            f"{plural(len(group), 'run')} ended early by a rule that was set before: test accuracy still below "
            f"{below} after epoch {epoch} (train.give_up). Each counts with the best accuracy it had reached; it "
            f"might have begun to learn later. {shortened(names)}."
        )
