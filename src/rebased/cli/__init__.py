"""The `rebased` command. Each verb is one file, imported only when the verb is called, so --help answers at once."""

import atexit
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Never

from rebased import __version__

if TYPE_CHECKING:  # imported by `main`, where Ctrl-C ends the command without a traceback
    from cyclopts import App, MissingArgumentError, UnknownOptionError

# verb: (module:function, one line of help). The function's signature defines the options. It returns the exit code
# (None means 0). If it raises, the error is shown in one line. A verb may have two words ("lm train"); then its first
# word must be in GROUPS.
COMMANDS = {
    "train": ("rebased.cli.train:train", "Train one model on a synthetic task, from a config file."),
    "sweep": ("rebased.cli.sweep:sweep", "Train a grid of runs from one file; the same command resumes it."),
    "list mixers": ("rebased.cli.lists:mixers", "The mixers that a config can name."),
    "list tasks": ("rebased.cli.lists:tasks", "The synthetic tasks that a config can name."),
    "list presets": ("rebased.cli.lists:presets", "The paper's models by name."),
    "list models": ("rebased.cli.lists:models", "The trained models that come with the package."),
    "list configs": ("rebased.cli.lists:configs", "The configs that come with the package; with a name, its text."),
    "check": ("rebased.cli.check:check", "Test a mixer or a task, yours or ours, against its contract."),
    "paper": ("rebased.cli.paper:paper", "Compare our results with every table and figure of the paper."),
    "report": ("rebased.cli.report:report", "Make a page of tables, figures and statistics from runs."),
    "suite": ("rebased.cli.suite:suite", "Compare your mixer with ours at equal bytes of state."),
    "probe": ("rebased.cli.probe:probe", "Show where the attention of trained models looks."),
    "explore": ("rebased.cli.explore:explore", "Compare two trained models on a page: predictions, attention, state."),
    "lm train": ("rebased.cli.lm_train:lm_train", "Train a language model on prepared text, and resume it."),
    "lm eval": ("rebased.cli.lm_eval:lm_eval", "Measure perplexity: all, AR and non-AR tokens, by distance."),
    "lm compare": ("rebased.cli.lm_compare:lm_compare", "Compare trained models over seeds."),
    "lm generate": ("rebased.cli.lm_generate:lm_generate", "Write text after prompts, token by token."),
    "lm export": ("rebased.cli.lm_export:lm_export", "Write a model for Hugging Face, or in the authors' layout."),
    "lm import": ("rebased.cli.lm_import:lm_import", "Read the checkpoint that the paper's authors released."),
    "lm recall": ("rebased.cli.lm_recall:lm_recall", "Ask a model for facts that are in its context."),
    "lm serve": ("rebased.cli.lm_serve:lm_serve", "Serve a model over HTTP: OpenAI's endpoints and a page."),
    "data prepare": ("rebased.cli.data:prepare", "Turn text into tokens on disk, once, for training and evaluation."),
    "data verify": ("rebased.cli.data:verify", "Describe a prepared folder and verify every checksum."),
    "kernels ptxas": (
        "rebased.cli.kernels_ptxas:ptxas",
        "Find what ptxas miscompiled in a Triton kernel.",
    ),
    "kernels verify": (
        "rebased.cli.kernels_verify:verify",
        "Compute with every operator on this machine and compare with fp64.",
    ),
    "demo": ("rebased.cli.demo:demo", "Compare five small models on one recall task, in two to three minutes."),
}

# First words of two-word verbs, with their line in `rebased --help`. `rebased WORD` alone lists the verbs of a group.
GROUPS: dict[str, str] = {
    "lm": "Train, measure, compare, serve and export language models.",
    "data": "Prepare text for language models.",
    "kernels": "Check GPU kernels: ours on this machine, and your own.",
    "list": "List mixers, tasks, presets, trained models and configs.",
}

# The panels of `rebased --help`: what a newcomer needs comes first. A first word that is missing here goes to the last.
PANELS = {
    "Start here": ("demo", "train", "report", "explore", "list"),
    "Compare models": ("suite", "sweep", "probe", "check", "paper"),
    "Language models": ("data", "lm"),
    "More": (),
}

# Example arguments of the verbs that need some: the error about a missing one shows them.
EXAMPLES = {
    "train": "--config mqar/quick",
    "sweep": "table1-cpu",
    "check": "rebased",
    "report": "runs -o report.html",
    "suite": "quick my_mixer.py:MyMixer",
    "probe": "runs/my-run -o probe.html",
    "lm train": "--config lm/quick",
    "lm compare": "runs",
    "lm export": "runs/my-run -o exported",
    "lm import": "model.safetensors -o imported",
    "data prepare": "texts/ -o data/mine",
    "data verify": "data/mine",
}

INTERRUPTED = 130  # what shells expect from a process that Ctrl-C ended
USER_ERROR = 2
OUR_ERROR = 1
LONGEST_ERROR = 4000  # characters

began = time.monotonic()
"""When the command began: `main` sets it before it imports a verb, which can take seconds."""
typed: list[str] = []
"""The words of the command, as `main` was given them."""

START = (
    "Train small models on tasks of recall, compare them, and train and serve language models. Begin with "
    '"rebased demo"; then "rebased train --config mqar/quick".'
)
EPILOGUE = "Errors are one line; --debug, or REBASED_TRACEBACK=1, shows where they come from."


def build_app(described: Container[str] = ()) -> "App":
    """Return the command with all its verbs. The help of those that are `described` is the whole docstring of their
    functions; of the others one line, so that no module is imported for it."""
    from cyclopts import App, Group

    *panels, more = (Group(title, sort_key=place) for place, title in enumerate(PANELS))
    panel_of = {word: panel for panel, words in zip(panels, PANELS.values(), strict=False) for word in words}
    about = f"ReBased linear attention.\n\n{START}\n\n{EPILOGUE}"
    app = App(name="rebased", version=__version__, help=about, group_commands=more)
    groups = {
        word: App(name=word, help=summary, group=panel_of.get(word, more), group_commands="Commands")
        for word, summary in GROUPS.items()
    }
    for group in groups.values():
        app.command(group)
    for verb, (function, summary) in COMMANDS.items():
        word, _, second = verb.rpartition(" ")
        said = {} if verb in described else {"help": summary}
        if word:
            groups[word].command(function, name=second, **said)
        else:
            app.command(function, name=second, group=panel_of.get(verb, more), **said)
    app.command(
        "rebased.cli.completion:install_completion",
        name="--install-completion",
        help="Let your shell complete commands and options.",
    )
    return app


def main(tokens: Sequence[str] | None = None) -> Never:
    """Run one command and exit with its code. `tokens` are the words after `rebased`; default: those of sys.argv."""
    global began, typed
    began, typed = time.monotonic(), list(sys.argv[1:] if tokens is None else tokens)
    words = typed
    debug = "--debug" in words or os.environ.get("REBASED_TRACEBACK", "0") not in ("", "0")
    try:
        words = json_target([word for word in words if word != "--debug"])
        refuse_unknown_verb(words)
        verb = " ".join(words[: 2 if words and words[0] in GROUPS else 1])
        with ctrl_c_ends_at_once():
            import_module("cyclopts")
            if verb in COMMANDS:
                import_module(COMMANDS[verb][0].partition(":")[0])
        code = build_app([verb])(words, exit_on_error=False, print_error=False, result_action="return_value")
    except KeyboardInterrupt:
        atexit.register(signal.signal, signal.SIGINT, _leave)  # a second Ctrl-C, while Python ends, is as quiet
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `rebased ... | head`: the reader is gone, so Python must not flush stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OUR_ERROR)
    except Exception as error:
        if debug:
            raise
        say_error(explain_error(error))
        sys.exit(USER_ERROR if is_users(error) else OUR_ERROR)
    sys.exit(code)


def same_page(*without: str) -> str:
    """Return the command that makes the same page again: what was typed, `without` these options, each with a value."""
    words, found = iter(json_target(typed)), ["rebased"]
    for word in words:
        name, equals, _ = word.partition("=")
        if name in without and not equals:
            next(words, None)
        elif name not in ("--json", "--quiet", "--replace", *without):
            found.append(word)
    return shlex.join(found)


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process without a word: while modules are imported, nothing is begun yet.

    A KeyboardInterrupt in the middle of an import would be a traceback, or whatever a C extension makes of it.
    """
    ours = threading.current_thread() is threading.main_thread()  # only this one may set handlers
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a caller's
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def json_target(words: Sequence[str]) -> list[str]:
    """Return the words with a value for each --json: the word after it if that names a .json file, else - for stdout.

    So --json may stand before a folder: ["--json", "runs"] becomes ["--json=-", "runs"].
    """
    found: list[str] = []
    for word in words:
        if found and found[-1] == "--json" and (word == "-" or os.path.splitext(word)[1].startswith(".json")):
            found[-1] = f"--json={word}"
        else:
            found.append(word)
    return ["--json=-" if word == "--json" else word for word in found]


def refuse_unknown_verb(words: Sequence[str]) -> None:
    """Raise a ValueError that names the nearest verb. cyclopts would import every command before it complains."""
    known = [*COMMANDS, *GROUPS]
    group = words[0] if words and words[0] in GROUPS else None
    if group is not None:
        words, known = words[1:], [verb.split()[1] for verb in COMMANDS if verb.startswith(f"{group} ")]
    if words and not words[0].startswith("-") and words[0] not in known:
        from rebased.config import did_you_mean

        # one that lacks its first word ("export"), else the most similar one, else a list that is not too long
        meant = next((verb for verb in COMMANDS if not group and verb.endswith(f" {words[0]}")), words[0])
        near = did_you_mean(meant, known)
        if not group and near.startswith("known: "):
            near = f"known: {', '.join(dict.fromkeys(verb.split()[0] for verb in COMMANDS))}"
        raise ValueError(f"unknown command {' '.join(filter(None, (group, words[0])))!r}; {near}")


def is_users(error: Exception) -> bool:
    """Return True if the user can fix it: wrong options or values, missing files or packages, too little memory."""
    from cyclopts import CycloptsError

    return isinstance(error, CycloptsError | ValueError | OSError | ImportError) or is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if Python, numpy or torch could not get memory on the CPU."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def explain_error(error: Exception) -> str:
    """Return what a user reads of an error of cyclopts, or of any other."""
    from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnknownOptionError

    from rebased.config import SYNONYMS

    if isinstance(error, MissingArgumentError):
        return explain_missing(error)
    if isinstance(error, CycloptsError):
        text = " ".join(str(error).split())
        meant = SYNONYMS.get(error.token.value) if isinstance(error, CoercionError) and error.token else None
        if isinstance(error, UnknownOptionError) and text.endswith("."):  # without a near miss
            text += explain_unknown(error)
        return re.sub(r'(Did you mean )".*"', rf'\1"{meant}"', text) if f'"{meant}"' in text else text
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ImportError):
        error = _most_helpful(error)
    if is_out_of_memory(error):
        reason = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)  # torch adds where it is in its sources
        return f"out of memory: {_first_line(reason) or 'Python could get no more'}; choose smaller sizes"
    if is_users(error):
        return str(error)
    what = f"{type(error).__name__}: {_first_line(str(error))}"
    return f"{what} (not your fault: run again with --debug and report what it shows)"


def explain_missing(error: "MissingArgumentError") -> str:
    """Return the message about an argument, or the value of an option, that is not there."""
    argument, verb = error.argument, " ".join(error.command_chain or ())
    if argument is None or error.keyword or argument.tokens:
        return f"{error.keyword or (argument and argument.name)} needs a value"
    name = argument.name.lstrip("-").upper() if argument.field_info.is_positional else argument.name
    typed = [word for word in error.root_input_tokens or () if word.startswith("--")]
    if name.startswith("--") and (near := get_close_matches(name, typed, n=1, cutoff=0.7)):
        return f"unknown option {near[0]!r}; did you mean {name!r}?"
    example = f"; for example: rebased {verb} {EXAMPLES[verb]}" if verb in EXAMPLES else ""
    return f"rebased {verb} needs {name}{example}"


def explain_unknown(error: "UnknownOptionError") -> str:
    """Return what helps with an option that a command does not have."""
    verb = " ".join(error.command_chain or ())
    names = {name for argument in error.argument_collection for name in argument.names}
    if (error.token.keyword or error.token.value).partition("=")[0] in ("-o", "--out") and "--json" in names:
        return f" rebased {verb} prints its result: append > FILE to keep it, or --json FILE.json"
    return f" Options are listed by: rebased {verb} --help"


def _first_line(text: str) -> str:
    """Return the first line of a text. In messages of torch a trace of C++ follows it."""
    return text.strip().partition("\n")[0]


def _most_helpful(error: ImportError) -> ImportError:
    """Return the error among this one and its causes that says what to install, else the innermost, which names the
    missing module. cyclopts wraps the import errors of a command in one that names only the command."""
    chain = [error]
    while isinstance(chain[-1].__cause__, ImportError):
        chain.append(chain[-1].__cause__)
    return next((each for each in chain if "pip install" in str(each)), chain[-1])


def say_error(message: str) -> None:
    """Print `error: ...` on stderr. The first word is red in a terminal."""
    from rich.text import Text

    from rebased.cli.output import Terminal
    from rebased.config import plain

    shown = message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]}..."
    line = Text.assemble(("error:", "bold red"), " ", plain(shown))
    Terminal(stderr=True).print(line, soft_wrap=True, highlight=False)
