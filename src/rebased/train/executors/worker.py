"""The code of a worker process: it trains one run in one thread. Errors become an outcome."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rebased.files import FolderInUse
from rebased.runs.configs import parse_run
from rebased.train.executors.jobs import Failed, Outcome, Prepare
from rebased.train.lifecycle import train
from rebased.train.sinks import Sink

PATIENCE = 30.0  # seconds to wait until the previous process of the same run has released its folder


def limit_threads() -> None:
    """Let torch use one thread.

    Several small runs use the cores far better side by side than one after the other, and results do not depend on the
    number of cores.
    """
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # on ARM oneDNN is up to 60 times slower for small batched products


def answer(prepare: Prepare, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The return value of `function(*arguments)`, in one thread."""
    limit_threads()
    prepare()
    return function(*arguments)


def work(prepare: Prepare, config: dict[str, Any], folder: Path, sinks: Sequence[Sink] = ()) -> Outcome:
    """Train or resume one run. Returns its result, or Failed with the error.

    `config` is plain data, because its classes may be unknown before `prepare` has been called.
    """
    limit_threads()
    try:
        prepare()
        run = parse_run(config)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return train(run, folder, resume=True, sinks=sinks)
            except FolderInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
    except BrokenPipeError:  # the caller is gone
        raise
    except (ValueError, OSError) as error:  # these name the value and the remedy
        return Failed(one_line(str(error)), lacks_memory(error))
    except Exception as error:
        return Failed(one_line(f"{type(error).__name__}: {error}"), lacks_memory(error))


def lacks_memory(error: BaseException | None) -> bool:
    """True if an error, or what caused it, is that the GPU has too little free memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or re.search(r"CUDA.*(out of memory|ALLOC_FAILED)", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def one_line(text: str) -> str:
    """The text with all white space, line breaks included, replaced by single spaces."""
    return " ".join(text.split())
