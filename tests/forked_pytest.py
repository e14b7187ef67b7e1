"""pytest in a process of its own, forked from a server that has imported torch: a second, not four."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    returncode: int | None
    output: str  # what it wrote to stdout and stderr


def run_pytest(*arguments: str) -> Done:
    with tempfile.NamedTemporaryFile("r") as shown:
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=(shown.name, arguments))
        process.start()
        process.join()
        return Done(process.exitcode, shown.read())


def _run(shown: str, arguments: tuple[str, ...]) -> None:
    os.chdir(ROOT)
    to = os.open(shown, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, sys.stdout.fileno())
    os.dup2(to, sys.stderr.fileno())
    code = pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *arguments])
    sys.stdout.flush()
    sys.exit(int(code))
