"""rebased check: the contract suite for one mixer or task, without a checkout and without pytest."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from rebased.cli.imports import import_user_code, registered_as
from rebased.cli.output import OPTIONS as OUTPUT
from rebased.cli.output import TO_TERMINAL, Output
from rebased.cli.overrides import parse_overrides
from rebased.config import did_you_mean, parse_yaml
from rebased.evaluate.checks import CheckResult, Outcome
from rebased.evaluate.mixer_contract import run_mixer_contract
from rebased.evaluate.task_contract import run_task_contract
from rebased.mixers import mixer_names
from rebased.tasks import task_names

OPTIONS = ("--help", *OUTPUT, "--task.seq_len")
FAILED = 1
COLOURS: dict[Outcome, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}


SUITES: dict[str, tuple[Callable[[], Sequence[str]], Callable[..., Iterable[CheckResult]]]] = {
    "mixer": (mixer_names, run_mixer_contract),
    "task": (task_names, run_task_contract),
}
"""The names in each register, and the contract of one: it takes a name, and settings where some are given."""


def check(
    target: str,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    to: Output = TO_TERMINAL,
) -> int:
    """Run the contract suite for a mixer or a task: one line per check.

    A check of something optional that yours does not have is skipped, and its line says why.

    The fields of a task can be set with --task.KEY VALUE, for example --task.seq_len 32; a field without a default must
    be set. The exit code is 1 if a check failed, 2 if there is nothing to check (no such file, no such name).

    Parameters
    ----------
    target
        FILE:NAME, for example my_mixers.py:running_mean: the file is imported, and what it registers under that name is
        checked; the name of a mixer's class will do. MODULE:NAME works too. NAME alone checks a mixer or a task of this
        package.
    """
    to.check()
    source, _, name = target.rpartition(":")
    shipped = {each for names, _ in SUITES.values() for each in names()}
    if source:
        import_user_code(source, said=source)
        name = registered_as(name) or name
    elif name.endswith(".py"):
        raise ValueError(f"{name}: which mixer or task in this file? write {name}:NAME")
    registered = {kind: names() for kind, (names, _) in SUITES.items()}
    kinds = [kind for kind, names in registered.items() if name in names]
    if not kinds:
        known = {each for names in registered.values() for each in names}
        near = did_you_mean(name, sorted(known - shipped or known))
        where = f"{source} registers neither a mixer nor a task" if source else "there is neither a mixer nor a task"
        yours = "@register_mixer and @register_task register your own"
        raise ValueError(f"{where} named {name!r}; {near} ({yours})")
    fields = task_fields(settings)
    if fields and kinds == ["mixer"]:
        raise ValueError(f"--task.{next(iter(fields))}: {name!r} is a mixer; only tasks take settings here")
    found: list[dict[str, Any]] = []
    for kind in kinds:
        given = (fields,) if fields and kind == "task" else ()
        for each in run_suite(kind, name, SUITES[kind][1](name, *given), to):
            about = {"kind": kind, "check": each.name, "ok": each.ok, "outcome": each.outcome}
            found.append(about | {"message": each.message})
    counts = Counter(check["outcome"] for check in found)
    to.emit({"name": name, "passed": not counts["failed"], "skipped": counts["skipped"], "checks": found})
    return FAILED if counts["failed"] else 0


def task_fields(settings: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a task that the command line sets: ["--task.seq_len", "32"] gives {"seq_len": 32}."""
    fields = {}
    for key, text in parse_overrides(settings, OPTIONS).items():
        section, _, field = key.partition(".")
        if section != "task":
            raise ValueError(f"--{key}: the fields of a task are set with --task.KEY VALUE")
        fields[field] = parse_yaml(text, f"--{key}")
    return fields


def run_suite(kind: str, name: str, checks: Iterable[CheckResult], to: Output) -> list[CheckResult]:
    """Print one line per check and a summary, each message once. Return the results."""
    console = to.console()
    results: list[CheckResult] = []
    said = set[str]()
    with console.status(Text(f"checking {kind} {name} ...")) as status:
        for result in checks:
            results.append(result)
            shown = result._replace(message="as above") if result.message in said else result
            console.print(line_of(shown), soft_wrap=True)
            said |= {result.message} - {""}
            status.update(Text(f"checking {kind} {name}: {len(results)} done ..."))
    failed = any(not result.ok for result in results)
    console.print(f"{kind} {name}: {verdict(results)}", style="bold red" if failed else "bold green", highlight=False)
    return results


def verdict(results: Sequence[CheckResult]) -> str:
    """Return how many checks failed or passed, and how many were skipped."""
    counts = Counter(result.outcome for result in results)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    if counts["failed"]:
        return f"{counts['failed']} of {len(results)} checks failed{skipped}"
    return f"{'' if skipped else 'all '}{counts['passed']} checks passed{skipped}"


def line_of(result: CheckResult) -> Text:
    """Return the line for one check, with its mark in colour. The message stays on that line."""
    mark, _, rest = str(result).partition(" ")
    return Text.assemble((mark, COLOURS[result.outcome]), " ", rest)
