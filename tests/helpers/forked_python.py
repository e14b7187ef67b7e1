"""Scripts, code and pytest in processes of their own, forked from a server that has imported torch, which saves 2 s."""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 600  # seconds; a process that takes longer is killed


class Done(NamedTuple):
    """How a process has ended."""

    returncode: int | None
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_script(path: Path, *words: str, patch: str = "") -> Done:
    """Run `python PATH WORDS`. `patch` is code that the same process runs before, to break something of the package."""
    return _run(_script, str(path), words, patch)


def run_code(code: str, cwd: Path, **environment: str) -> Done:
    """Run `python -c CODE` in the folder `cwd`."""
    return _run(_code, code, (), cwd=cwd, environment=environment)


COMMAND = "from rebased.cli import main; main()"


class Started:
    """`python -c CODE WORDS` while it runs, with the methods of subprocess.Popen. Processes that it starts in turn come
    from the same server, so what they print is not read here.

    `streams`: file descriptors here, by their number there (0, 1, 2); a pipe is read for each of 1 and 2 without one.
    """

    def __init__(
        self,
        code: str,
        *words: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        streams: Mapping[int, int] | None = None,
    ) -> None:
        given, ours = dict(streams or {}), dict[int, int]()
        for number in {1, 2} - set(given):
            ours[number], given[number] = os.pipe()
        self._process = _begin(_code, (code, words), cwd or Path.cwd(), environment, given)
        for number in ours:
            os.close(given[number])
        self.stdout, self.stderr = (os.fdopen(ours[n]) if n in ours else None for n in (1, 2))

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = TIMEOUT) -> tuple[str, str]:
        """The rest of what it prints, and its errors; waits for its end."""
        out, err = (stream.read() if stream else "" for stream in (self.stdout, self.stderr))
        assert self.wait(timeout) is not None, "it does not end"
        return out, err


def _code(code: str, words: tuple[str, ...]) -> None:
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})


def run_pytest(*arguments: str) -> Done:
    """Run `pytest ARGUMENTS`."""
    return _run(_pytest, arguments)


def _run(
    function: Callable[..., Any], *arguments: Any, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Done:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _begin(function, arguments, cwd, environment, {1: out.fileno(), 2: err.fileno()})
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        out.seek(0)
        err.seek(0)
        return Done(process.exitcode, out.read(), err.read())


def _begin(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    cwd: Path,
    environment: Mapping[str, str] | None,
    streams: Mapping[int, int],
) -> BaseProcess:
    """A process that calls the function, with these file descriptors of ours as its own 0, 1 and 2."""
    theirs = {number: Connection(os.dup(each), readable=False) for number, each in streams.items()}
    setting = (cwd, {**os.environ, **(environment or {})}, theirs)
    process = multiprocessing.get_context("forkserver").Process(target=_call, args=(setting, function, arguments))
    process.start()
    for each in theirs.values():
        each.close()
    return process


def _call(
    setting: tuple[Path, dict[str, str], dict[int, Connection]],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    cwd, environment, streams = setting
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, each in streams.items():
        os.dup2(each.fileno(), number)
        each.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a server that a sweep has started blocks Ctrl-C
    function(*arguments)


def _script(path: str, words: tuple[str, ...], patch: str) -> None:
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    exec(patch, {})
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second is its name in processes that it spawns
    exec(compile(Path(path).read_text(), path, "exec"), main.__dict__)


def _pytest(arguments: tuple[str, ...]) -> None:
    sys.exit(int(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *arguments])))
