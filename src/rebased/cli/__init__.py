"""The `rebased` command: one verb a file, imported only when it is called, so that --help answers at once."""

import os
import sys
from collections.abc import Sequence
from typing import Never

from cyclopts import App, CycloptsError

from rebased import __version__

# verb: (where its function stands, what it does in a line). The function's signature is the command's options; what it
# returns is the exit code (None: 0). What it raises is shown as one line. A verb may be two words, "lm train": then its
# first one stands in GROUPS.
COMMANDS = {
    "train": ("rebased.cli.train:train", "Train one model on a synthetic task as a config file says, and resume it."),
    "sweep": ("rebased.cli.sweep:sweep", "Train a grid of runs, planned and resumed by one file."),
    "params": ("rebased.cli.params:params", "Print the paper's parameter counts, ours beside theirs."),
    "report": ("rebased.cli.report:report", "Make a page of tables, figures and statistics from folders of runs."),
    "lm train": ("rebased.cli.lm_train:lm_train", "Train a language model on prepared text, and resume it."),
    "lm eval": ("rebased.cli.lm_eval:lm_eval", "Measure perplexity: all, AR and non-AR tokens, by distance."),
    "lm compare": ("rebased.cli.lm_compare:lm_compare", "Set trained models beside each other, over seeds."),
    "lm recall": ("rebased.cli.lm_recall:lm_recall", "Ask a model for facts that stand in its context."),
    "data prepare": ("rebased.cli.data:prepare", "Turn text into tokens on disk, once, for training and evaluation."),
    "data check": ("rebased.cli.data:check", "Say what a prepared folder holds, and compare every checksum."),
    "demo": ("rebased.cli.demo:demo", "Train three small models on the CPU and write a page about them."),
}

# What `rebased --help` says of verbs that share their first word; `rebased WORD` alone lists them.
GROUPS: dict[str, str] = {
    "lm": "Language models: train and measure them.",
    "data": "Text for language models.",
}

INTERRUPTED = 130  # what a shell expects of a process that Ctrl-C has ended
USER_ERROR = 2
OUR_ERROR = 1

EPILOGUE = "Errors are one line; --debug, or REBASED_TRACEBACK=1, shows where they come from."


def build_app() -> App:
    app = App(name="rebased", version=__version__, help=f"ReBased linear attention.\n\n{EPILOGUE}")
    groups = {word: App(name=word, help=summary) for word, summary in GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for verb, (function, summary) in COMMANDS.items():
        word, _, second = verb.rpartition(" ")
        (groups[word] if word else app).command(function, name=second, help=summary)
    return app


def main(tokens: Sequence[str] | None = None) -> Never:
    """Run one command and leave with its exit code."""
    words = list(sys.argv[1:] if tokens is None else tokens)
    debug = "--debug" in words or os.environ.get("REBASED_TRACEBACK", "0") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    try:
        refuse_unknown_verb(words)
        code = build_app()(words, exit_on_error=False, print_error=False, result_action="return_value")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `rebased ... | head`: nobody reads on, and Python must not try to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OUR_ERROR)
    except Exception as error:
        if debug:
            raise
        say_error(explain_error(error))
        sys.exit(USER_ERROR if is_users(error) else OUR_ERROR)
    sys.exit(code)


def refuse_unknown_verb(words: Sequence[str]) -> None:
    """Before cyclopts does, which would import every command to say what it misses."""
    known = [*COMMANDS, *GROUPS]
    group = words[0] if words and words[0] in GROUPS else None
    if group is not None:
        words, known = words[1:], [verb.split()[1] for verb in COMMANDS if verb.startswith(f"{group} ")]
    if words and not words[0].startswith("-") and words[0] not in known:
        from rebased.config import did_you_mean

        typed = f"{group} {words[0]}" if group else words[0]
        raise ValueError(f"unknown command {typed!r}; {did_you_mean(words[0], known)}")


def is_users(error: Exception) -> bool:
    """Whether the one who typed the command can mend it: bad words, bad values, files that are not there."""
    return isinstance(error, CycloptsError | ValueError | OSError | ImportError)


def explain_error(error: Exception) -> str:
    if isinstance(error, CycloptsError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ImportError):
        error = _most_helpful(error)
    if is_users(error):
        return str(error)
    return f"{type(error).__name__}: {error} (not your fault: run again with --debug and report what it shows)"


def _most_helpful(error: ImportError) -> ImportError:
    """Of an error and its causes the one that says what to install, else the innermost, which names the module: around
    a command's own imports cyclopts puts an error that only says where."""
    chain = [error]
    while isinstance(chain[-1].__cause__, ImportError):
        chain.append(chain[-1].__cause__)
    return next((each for each in chain if "pip install" in str(each)), chain[-1])


def say_error(message: str) -> None:
    """`error: ...` on stderr, the first word in red where that can be seen."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", message)
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
