"""Scripts, code and pytest in processes of their own, forked from a server that has imported torch, which saves 2 s."""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
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
    return _run(exec, code, {"__name__": "__main__"}, cwd=cwd, environment=environment)


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
        given = dict(streams or {})
        ours = {}
        for number in {1, 2} - set(given):
            ours[number], given[number] = os.pipe()
        connections = {number: Connection(os.dup(each), readable=False) for number, each in given.items()}
        for number in ours:
            os.close(given[number])
        arguments = (code, words, cwd or Path.cwd(), {**os.environ, **(environment or {})}, connections)
        self._process = multiprocessing.get_context("forkserver").Process(target=_start, args=arguments)
        self._process.start()
        for each in connections.values():
            each.close()
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


def _start(
    code: str, words: tuple[str, ...], cwd: Path, environment: dict[str, str], streams: dict[int, Connection]
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, each in streams.items():
        os.dup2(each.fileno(), number)
        each.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a server that a sweep has started blocks Ctrl-C
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})


def run_pytest(*arguments: str) -> Done:
    """Run `pytest ARGUMENTS`."""
    return _run(_pytest, arguments)


def _run(
    function: Callable[..., Any], *arguments: Any, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Done:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        setting = (cwd, {**os.environ, **(environment or {})}, outputs)
        process = multiprocessing.get_context("forkserver").Process(target=_call, args=(setting, function, arguments))
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        return Done(process.exitcode, *(path.read_text() for path in outputs))


def _call(
    setting: tuple[Path, dict[str, str], list[Path]], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    cwd, environment, outputs = setting
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
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
