"""CUDA's MPS daemon: it lets kernels of several processes run on one GPU side by side, not one after the other."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PATIENCE = 20  # seconds for the daemon to start or to end


@contextmanager
def mps_daemon() -> Iterator[None]:
    """Run an MPS daemon of our own during the block, for processes started in it. A daemon that runs already, at the
    place that the environment names, is used instead.

    Raises ValueError if there is no such program, or it does not start.
    """
    if PIPES in os.environ:
        yield
        return
    if shutil.which(CONTROL) is None:
        raise ValueError(f"--mps needs {CONTROL}, which comes with NVIDIA's driver; leave --mps out")
    with tempfile.TemporaryDirectory(prefix="rebased-mps-") as folder:
        places = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        _control(places, "-d")
        os.environ.update(places)
        try:
            yield
        finally:
            for name in places:
                os.environ.pop(name, None)
            with suppress(ValueError):  # the results are what counts; the daemon ends with its last client too
                _control(places, text="quit\n")


def _control(places: dict[str, str], *options: str, text: str | None = None) -> None:
    """Start the daemon, or send it a command. It keeps what it inherits open, so nothing is read from it."""
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            [CONTROL, *options],
            env=os.environ | places,
            input=text,
            text=True,
            stdout=quiet,
            stderr=quiet,
            timeout=PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"the MPS daemon did not answer ({error}); leave --mps out") from error
