"""rebased suite: compare mixers on the same tasks with the same bytes of state, yours among them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated

from cyclopts import Parameter

from rebased.cli import INTERRUPTED, same_page
from rebased.cli.imports import import_user_code, registered_as
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.cli.sweep import Command, run_sweep
from rebased.cli.sweep_files import DEFAULT_SWEEP, SweepFiles, SweepOptions
from rebased.config import did_you_mean, plural
from rebased.evaluate.mixer_contract import run_mixer_contract
from rebased.mixers import mixer_class, mixer_names
from rebased.ops.backend import has_gpu
from rebased.report.page import check_replaceable, write_page
from rebased.report.prose import warn_about_records
from rebased.report.suite.board import Board
from rebased.report.suite.page import files_of, suite_page, to_json
from rebased.report.suite.sentences import three_sentences
from rebased.runs.collect import gather
from rebased.runs.shipped import CONFIGS, FOLDERS, MODELS, find_config
from rebased.runs.suite import Suite, SuiteMixer, load_suite, own_mixer
from rebased.train.kinds import workload_of
from rebased.train.sweep.cost import processor_of, time_steps
from rebased.train.sweep.grid import Point, Select, Sweep

ALL = "all"
ROUNDS = 3  # in which mixers are timed
DECISIVE = (
    "keeps_shape",
    "output_is_finite",
    "never_looks_ahead",
    "gradients_never_look_ahead",
    "rows_are_apart",
    "extend_is_forward",
    "state_has_declared_size",
)
"""How checks begin without which a comparison means nothing."""


@dataclass(frozen=True)
class SuiteCommand(Command):
    """The runs of a suite. The settings are the names of mixers."""

    device: str | None = None  # None: where the suite file says

    @cached_property
    def content(self) -> Suite:
        """What the suite file says."""
        return load_suite(find_config(self.file, "suite"))

    @property
    def folder(self) -> Path:
        """Where the runs and the page are written."""
        return self.out or Path("runs") / f"suite-{self.file.stem}"

    @property
    def page(self) -> Path:
        """The file of the page."""
        return self.folder / "report.html"

    def mixers(self) -> dict[str, SuiteMixer]:
        """The mixers that are to be trained, by their names on the page. The user's code has been imported."""
        suite, targets = self.content, self.settings
        return dict(suite.mixers if ALL in targets else [find_mixer(suite, target) for target in targets])

    def read(self) -> Sweep:
        """All runs of the suite; the rate is chosen on the first seeds."""
        suite = self.content
        points = [
            Point({"mixer": label}, config)
            for label, mixer in self.mixers().items()
            for config in suite.configs(self.file.stem, label, mixer, self.device)
        ]
        return Sweep(points, Select(seeds=len(suite.choose_seeds)) if len(suite.rates) > 1 else None, by_task=True)


def suite(
    file: Path,
    /,
    *mixers: str,
    out: Annotated[Path | None, OUT_OPTION] = None,
    gpu: Annotated[bool, Parameter(negative="")] = False,
    options: SweepOptions = DEFAULT_SWEEP,
    to: Output = TO_TERMINAL,
) -> int:
    """Compare mixers on the same tasks with the same bytes of state, and write a page. The same command resumes it.

    Every rate is tried with one seed and chosen on a validation split; fresh seeds at that rate are scored once on a
    held-out split. The width of a mixer is the largest with which its state fits into the bytes. Shipped results of our
    own mixers are not computed again. `rebased suite quick my.py:MyMixer` takes about six minutes on two idle
    cores if your mixer is as fast as ours. An estimate comes first. If you stop it, the page shows what is done.

    The exit code is 1 if a run has failed, 75 if the time of --for was up before all runs were done, and 130 if it was
    interrupted. The page is written in each case.

    Parameters
    ----------
    file
        YAML file of a suite, or the name of a shipped one: quick, or campaign for a GPU.
    mixers
        What to train: FILE:NAME or MODULE:NAME of your own (@register_mixer; its name or its class), the name of one in
        the suite, or all. Without any, the page shows what is known, without times of training steps.
    out
        Folder for the runs and for report.html, cells.csv and runs.csv. Default: runs/suite- and the suite's name.
    gpu
        Train on a GPU.
    """
    to.check(resumes=True)
    sources = tuple(dict.fromkeys(target.rpartition(":")[0] for target in mixers if ":" in target))
    for source in sources:
        import_user_code(source, said=source)
    shipped = shipped_results(file, out)
    files = SweepFiles(options, () if sources else shipped)
    command = SuiteCommand(file, mixers, out, files, sources, device="cuda" if gpu else None)
    check_replaceable(command.page)  # before minutes of training, not after
    code, chosen = 0, command.mixers()
    if gpu and mixers and not has_gpu():
        raise ValueError("--gpu: torch sees no GPU here; leave it out to train on the CPU")
    for target in (target for target in mixers if ":" in target):
        to.warn(check_contract(target, chosen[target.rpartition(":")[2]].mixer["name"]))
    if mixers:
        order = ", ".join(command.content.tasks)
        for name in (name for name, mixer in chosen.items() if mixer.unsized and name not in command.content.mixers):
            say(to.console(), f"{name} has no state_size: its recall is shown, and it gets no place among the others")
        say(to.console(), f"one task after the other: {order}. Stop at any time (Ctrl-C): the page shows what is done.")
        code, _ = run_sweep(command, to, retry_failed=True)
    elif options.dry_run:
        say(to.console(), "nothing would be trained: name a mixer, or all; without one, the page shows what is known")
    return code if options.dry_run else show(command, shipped, code, to)


def show(command: SuiteCommand, shipped: Sequence[Path], code: int, to: Output) -> int:
    """Write the page and print its sentences. `code` is the exit code of the training; Ctrl-C here changes it."""
    options, mixers = command.files.options, command.settings
    places = [path for path in (command.folder, *shipped, *options.known, options.bundle) if path and path.exists()]
    found = gather(places)
    asked = [] if ALL in mixers else list(command.mixers())
    board = Board(command.content, [run for run in found.runs if run.settings.get("suite")], asked)
    as_planned = replace(found, repeated=0, asked=set())  # bundles repeat runs of the folder, and stages leave runs out
    to.warn(warn_about_records(as_planned, board.runs))
    in_a_hurry = options.time_limit is not None or code == INTERRUPTED
    complete, speeds = code == 0, dict[str, list[float]]()
    if board.cells and mixers and not in_a_hurry:
        try:
            speeds = measure(command, board, to)
        except KeyboardInterrupt:
            code = INTERRUPTED
    where = processor_of(command.device or "cpu")
    write_page(suite_page(board, command.file.stem, same_page(), speeds, where), command.page)
    for name, content in files_of(board, speeds).items():
        (command.folder / name).write_bytes(content)
    for sentence in three_sentences(board):
        say(to.result_console(), sentence)
    say(to.console(), f"wrote {command.page}: open it in a browser")
    times = {name: median(each) for name, each in speeds.items()}
    about = {"page": command.page, "complete": complete, "milliseconds_per_1000_tokens": times}
    to.emit(to_json(board) | about)
    return code


def shipped_results(file: Path, out: Path | None) -> list[Path]:
    """The bundle that comes with a shipped suite, if there is one. A user's file of the same name has none, and needs a
    folder of its own: ValueError without `out`."""
    if not find_config(file, "suite").resolve().is_relative_to(CONFIGS.resolve()):
        if out is None and (CONFIGS / FOLDERS["suite"] / f"{file.stem}.yaml").exists():
            raise ValueError(
                f"{file} has the name of a suite that comes with the package, whose folder is runs/suite-{file.stem}; "
                "rename the file, or choose another folder with --out"
            )
        return []
    return [path for path in [MODELS / f"suite-{file.stem}.jsonl.gz"] if path.exists()]


def find_mixer(suite: Suite, target: str) -> tuple[str, SuiteMixer]:
    """The name and the settings of a mixer that the command line names. The user's code has been imported."""
    source, _, name = target.rpartition(":")
    labels = {label.casefold(): label for label in suite.mixers}
    if not source:
        if name.endswith(".py"):
            raise ValueError(f"{name}: which mixer in this file? write {name}:NAME")
        if name.casefold() not in labels:
            raise ValueError(f"the suite has no mixer {name!r}; {did_you_mean(name, [*suite.mixers])} (or FILE:NAME)")
        return labels[name.casefold()], suite.mixers[labels[name.casefold()]]
    registered = registered_as(name)
    if registered is None:
        classes = map(mixer_class, mixer_names())
        own = [each.__name__ for each in classes if not each.__module__.startswith("rebased.")]
        known = did_you_mean(name, own) if own else f"decorate your class with @register_mixer({name!r})"
        raise ValueError(f"{source} registers no mixer {name!r}; {known}")
    if name.casefold() in labels:
        raise ValueError(f"{name} is the name of a mixer of the suite; give yours another name")
    heads = next((mixer.mixer["n_heads"] for mixer in suite.mixers.values() if "n_heads" in mixer.mixer), 1)
    return name, own_mixer(registered, heads)


def check_contract(target: str, name: str) -> list[str]:
    """Run the contract of a user's mixer. ValueError if it looks ahead or holds more than it declares, because it would
    lead for that. Warnings about other checks that fail are returned."""
    logging.disable(logging.WARNING)  # about methods that a suite does not need
    try:
        failed = [result for result in run_mixer_contract(name) if not result.ok]
    finally:
        logging.disable(logging.NOTSET)
    for check, _, why in failed:
        if check.startswith(DECISIVE) and "float64" not in check:  # models of a suite are trained in fp32
            raise ValueError(f"{target} fails its contract: {check}: {why}. All checks: rebased check {target}")
    many = plural(len(failed), "check")
    return [f"{target} fails {many} that matter elsewhere: rebased check {target}"] if failed else []


def measure(command: SuiteCommand, board: Board, to: Output) -> dict[str, list[float]]:
    """Milliseconds of a training step per 1,000 tokens, one per round, on the last task with the largest state: for the
    mixers of this command and those that figures draw as lines; for `all`, those with factors too.

    Mixers take turns, so that other programs on the machine slow all of them. KeyboardInterrupt after Ctrl-C.
    """
    suite = board.suite
    last = {"tasks": dict([*suite.tasks.items()][-1:]), "rates": suite.rates[:1], "state_bytes": suite.state_bytes[-1:]}
    single = suite.model_copy(update=last)
    asked = {name: mixer for name, mixer in command.mixers().items() if name in board.own}
    compared = {name for name, mixer in suite.mixers.items() if mixer.factors} if ALL in command.settings else set()
    mixers = {name: mixer for name, mixer in suite.mixers.items() if name in {*suite.drawn, *compared}} | asked
    configs = {
        name: single.configs(command.file.stem, name, mixer, command.device)[0] for name, mixer in mixers.items()
    }
    found = {name: list[float]() for name in mixers}
    what = f"a training step of {plural(len(mixers), 'mixer')}, in {ROUNDS} rounds"
    say(to.console(), f"timing {what}; Ctrl-C leaves it out ...")
    for name, config in ROUNDS * [*configs.items()]:
        if not (times := time_steps(config.model_dump())):
            raise KeyboardInterrupt  # it ended the short run
        step = min(times) * workload_of(config).step_work(config)  # seconds, undisturbed
        found[name].append(1e6 * step / (config.train.batch_size * config.task.train[0].seq_len))
    return found
