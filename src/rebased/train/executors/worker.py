"""What happens in a worker's process: one run, alone with one thread, and never an exception on the way out."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rebased.files import FolderInUse
from rebased.runs.configs import parse_run
from rebased.train.executors.jobs import Failed, Outcome, Prepare
from rebased.train.lifecycle import train
from rebased.train.sinks import Sink

PATIENCE = 30.0  # seconds for the process that had the run before to notice that it is no longer wanted


def limit_threads() -> None:
    """One thread a run: small models use several cores far better side by side, and results do not depend on them."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # on ARM its small batched products take up to 60 times as long


def work(prepare: Prepare, config: dict[str, Any], folder: Path, sinks: Sequence[Sink] = ()) -> Outcome:
    """Train or resume one run. The config comes as data: its classes may be known only after `prepare`."""
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
    except BrokenPipeError:  # nobody listens any more
        raise
    except (ValueError, OSError) as error:  # these name the value and the remedy
        return Failed(one_line(str(error)))
    except Exception as error:
        return Failed(one_line(f"{type(error).__name__}: {error}"))


def one_line(text: str) -> str:
    return " ".join(text.split())
