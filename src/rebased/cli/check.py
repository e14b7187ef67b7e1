"""rebased check: the contract suite for one mixer or task, without a checkout and without pytest."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from rebased.cli.imports import import_user_code
from rebased.config import did_you_mean
from rebased.evaluate.checks import CheckResult

FAILED = 1


class Suite(NamedTuple):
    """A register and the contract suite for what is in it, both as module:function."""

    names: str  # () -> list[str]
    run: str  # (name) -> iterable of CheckResults


SUITES = {
    "mixer": Suite("rebased.mixers:mixer_names", "rebased.evaluate.mixer_contract:run_mixer_contract"),
    "task": Suite("rebased.tasks:task_names", "rebased.evaluate.task_contract:run_task_contract"),
}


def check(target: str) -> int:
    """Run the contract suite for a mixer or a task: one line per check.

    The exit code is 1 if a check failed, 2 if there is nothing to check (no such file, no such name).

    Parameters
    ----------
    target
        FILE:NAME, for example my_mixers.py:running_mean: the file is imported, and what it registers under that name is
        checked. MODULE:NAME works too. NAME alone checks a mixer or a task of this package.
    """
    source, _, name = target.rpartition(":")
    if source:
        import_user_code(source, said=source)
    elif name.endswith(".py"):
        raise ValueError(f"{name}: which mixer or task in this file? write {name}:NAME")
    registered = {kind: load(suite.names)() for kind, suite in SUITES.items()}
    kinds = [kind for kind, names in registered.items() if name in names]
    if not kinds:
        raise ValueError(unknown(source, name, registered))
    failed = [run_suite(kind, name, load(SUITES[kind].run)) for kind in kinds]
    return FAILED if any(failed) else 0


def unknown(source: str, name: str, registered: dict[str, list[str]]) -> str:
    """Return the error about a name that neither register has."""
    known = sorted(name for names in registered.values() for name in names)
    where = f"{source} registers neither a mixer nor a task" if source else "there is neither a mixer nor a task"
    return f"{where} named {name!r}; {did_you_mean(name, known)} (@register_mixer and @register_task register your own)"


def run_suite(kind: str, name: str, run: Callable[[str], Iterable[CheckResult]]) -> int:
    """Print one line per check and a summary. Return the number of checks that failed."""
    console = Console()
    done = failed = 0
    with console.status(f"checking {kind} {name} ...") as status:
        for result in run(name):
            done, failed = done + 1, failed + (not result.ok)
            console.print(line_of(result), soft_wrap=True)
            status.update(f"checking {kind} {name}: {done} done ...")
    verdict = f"{failed} of {done} checks failed" if failed else f"all {done} checks passed"
    console.print(f"{kind} {name}: {verdict}", style="bold red" if failed else "bold green", highlight=False)
    return failed


def line_of(result: CheckResult) -> Text:
    """Return the line for one check. The message of a failed check stays on that line."""
    mark = ("✓", "green") if result.ok else ("✗", "red")
    message = f": {' '.join(result.message.split())}" if result.message else ""
    return Text.assemble(mark, f" {result.name}{message}")


def load(reference: str) -> Any:
    """Return the function that "module:function" names."""
    module, _, function = reference.partition(":")
    return getattr(import_module(module), function)
