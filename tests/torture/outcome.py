"""One command in a forked child of a warm process, and the judgement of how it ended."""

import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ALLOWED = (0, 1, 2)
INTERRUPTED = 130
FORBIDDEN = re.compile(
    r"Traceback|not your fault|Exception ignored|frame #\d|terminate called|\x1b(?!\[[\d;?]*[A-Za-z])"
)
GRACE = 10.0  # seconds in which a command that was interrupted must end


class Limits(NamedTuple):
    """What a command may take."""

    seconds: float = 10.0  # of a processor; on the clock six times as many, since others may use the machine
    memory: int = 3 * 2**30  # bytes: the address space that the child may add, and its largest resident size


class Outcome(NamedTuple):
    """How a command ended."""

    code: int | None  # None: a signal ended it
    signal: int | None
    seconds: float
    memory: int  # the largest resident size, in bytes, with what the child shares with its parent
    interrupted: bool  # it was still running when its time was over, and was sent SIGINT
    output: str  # stdout and stderr


def run_forked(
    words: Sequence[str],
    folder: Path,
    limits: Limits = Limits(),  # noqa: B008, a constant
    *,
    prepare: Callable[[], None] | None = None,
    kill_after: float | None = None,
    victim: Callable[[int], int | None] | None = None,
) -> Outcome:
    """Run `rebased WORDS` in a child, in `folder`. The parent must never have computed with torch: threads do not fork.

    A child that takes too long is sent SIGINT, and GRACE seconds later SIGKILL. `prepare` is called in the child first.
    After `kill_after` seconds the child is killed with all that it started; or only the process that `victim` chooses,
    which is given the child's number.
    """
    read, write = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_command(words, folder, limits, write, prepare)
    os.close(write)
    shown, interrupted, deadline = bytearray(), False, started + 6 * limits.seconds
    while True:  # until the child and all that it started have closed their output
        wait = 0.2
        if kill_after is not None:
            wait = max(0.0, min(wait, started + kill_after - time.monotonic()))
        ready, _, _ = select.select([read], [], [], wait)
        if kill_after is not None and time.monotonic() >= started + kill_after:
            kill_after = None
            _kill(child, victim)
        if not ready and time.monotonic() < deadline and (interrupted or _cpu_seconds(child) < limits.seconds):
            continue
        if ready:
            if not (chunk := os.read(read, 2**16)):
                break
            shown += chunk[: max(0, 2**20 - len(shown))]
            continue
        os.kill(child, signal.SIGKILL if interrupted else signal.SIGINT)
        if interrupted:
            break
        interrupted, deadline = True, time.monotonic() + 6 * GRACE
    os.close(read)
    _, status, usage = os.wait4(child, 0)
    return Outcome(
        os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        time.monotonic() - started,
        usage.ru_maxrss * 1024,
        interrupted,
        shown.decode(errors="replace"),
    )


def _kill(child: int, victim: Callable[[int], int | None] | None) -> None:
    try:
        if victim is None:
            os.killpg(child, signal.SIGKILL)
        elif (chosen := victim(child)) is not None:
            os.kill(chosen, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        pass


def _cpu_seconds(process: int) -> float:
    """The processor time that a process has taken so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _be_command(
    words: Sequence[str], folder: Path, limits: Limits, output: int, prepare: Callable[[], None] | None
) -> None:
    """Become the command: never returns."""
    code = 99
    try:
        os.setsid()  # a group of its own, which can be killed as a whole
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, used + limits.memory))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from rebased.cli import main

        if prepare is not None:
            prepare()
        main(list(words))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def judge(outcome: Outcome, limits: Limits = Limits()) -> str | None:  # noqa: B008, a constant
    """What is wrong with how a command ended; None if nothing is.

    It may succeed, or end with 1 or 2 and an error of few lines. It may be interrupted if it was training by then.
    """
    if found := FORBIDDEN.search(outcome.output):
        return f"it shows {found.group()!r}"
    if outcome.signal is not None:
        return f"signal {outcome.signal} ended it after {outcome.seconds:.1f} s"
    if outcome.memory > limits.memory:
        return f"it took {outcome.memory / 2**30:.1f} GiB"
    if outcome.interrupted:
        began = "parameters on" in outcome.output or "shard" in outcome.output
        return None if outcome.code == INTERRUPTED and began else f"it was not done after {limits.seconds:.0f} s"
    if outcome.code not in ALLOWED:
        return f"it ended with {outcome.code}"
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    if outcome.code and len(errors) != 1 and "failed" not in outcome.output:  # a sweep, or a check, names what failed
        return f"it ended with {outcome.code} and shows {len(errors)} errors"
    return None
