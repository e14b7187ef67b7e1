"""Shared by all tests: the options --mixer, --task and --all, and which tests this machine can run."""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

from mixer_option import MIXER, find_mixer
from registers import registers_kept
from task_option import TASK, find_task

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # before the first product: tests of batch invariance need it
TORCH_ALONE = find_spec("pydantic") is None
"""True on a GPU machine with torch alone, without pydantic: `python3 -m pytest -m gpu` then runs only tests/ops."""
collect_ignore = [path.name for path in Path(__file__).parent.iterdir() if path.name != "ops"] if TORCH_ALONE else []

CONTRACTS = {MIXER: "test_contract.py", TASK: "test_task_contract.py"}
MEMORY, ENOUGH = "/dev/shm", 4 * 2**30  # a file system in memory, and the bytes that must be free there
SERVER_HAS = (
    *("pytest", "safetensors.torch", "torch._dynamo", "rebased.data.preparation", "rebased.train.executors.local"),
    *("rebased.train.lm.workload", "rebased.train.synthetic.workload"),
)  # pytest, because a process imports the file of the test that its function is of


def _can_hold_files(folder: str) -> bool:
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return False
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize >= ENOUGH and not about.f_flag & os.ST_NOEXEC


if "TMPDIR" not in os.environ and _can_hold_files(MEMORY):
    # A run waits for the disk after each line and checkpoint (fsync): for a tiny one that is a third of its time.
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mixer",
        metavar="NAME",
        help="run the contract suite alone, for one mixer: a registered name, path/to/file.py:name, or module:name",
    )
    parser.addoption("--task", metavar="NAME", help="the same for one task")
    parser.addoption("--all", action="store_true", help="also run the tests marked `release`, as `make test-all` does")


def pytest_report_header() -> str | None:
    return "pydantic is not installed: only tests/ops is collected" if TORCH_ALONE else None


def pytest_configure(config: pytest.Config) -> None:
    # Once: pytest's option log_level sets the level in each phase of each test, which clears the caches of all loggers.
    logging.getLogger().setLevel(logging.INFO)
    logging.disable(logging.DEBUG)  # torch.distributed logs hundreds of lines per checkpoint
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):  # pytest in the background ignores it, and so would its commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if wanted := config.getoption("--mixer"):
        config.stash[MIXER] = find_mixer(wanted)
    if wanted := config.getoption("--task"):
        config.stash[TASK] = find_task(wanted)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # of the modules and tests that now come nothing is garbage
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        _let_torch_propagate()


def _let_torch_propagate() -> None:
    """Else pytest would add a handler to each of torch's 40 loggers, in each phase of each test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if suites := [file for option, file in CONTRACTS.items() if option in config.stash]:
        others = [item for item in items if item.path.name not in suites]
        items[:] = [item for item in items if item.path.name in suites]
        config.hook.pytest_deselected(items=others)
    items[:] = _slow_first(items)
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("release"):
                item.add_marker(pytest.mark.skip(reason="takes long: `make test-all` runs it"))
        _skip_recorded(items)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in needs_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _skip_recorded(items: list[pytest.Item]) -> None:
    """Skip all cases but `keep` (1) of each test marked `recorded`, as long as its kernels are those of the records."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("recorded"))]
    if not marked or find_spec("triton") is None:
        return
    from kernels.records import unchanged_operators

    unchanged, kept = unchanged_operators(), Counter[str]()
    for item, marker in marked:
        name = item.nodeid.partition("[")[0]
        if marker.args[0] in unchanged and kept[name] >= marker.kwargs.get("keep", 1):
            reason = "a GPU has computed these kernels (tests/kernels/computed.json): `make test-all` runs it"
            item.add_marker(pytest.mark.skip(reason=reason))
        kept[name] += 1


def _slow_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items in another order: each worker begins with its share of those marked slow. At the end of all tests the
    others would wait for a worker that runs one of them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    ordered = []
    for worker in range(workers):  # `--dist worksteal` gives each worker as many items, in this order
        begins = slow[worker::workers]
        many = len(items) // workers - len(begins)
        ordered += [*begins, *rest[:many]]
        rest = rest[many:]
    return ordered + rest


@pytest.fixture(scope="session", autouse=True)
def _one_server_forks_every_process() -> Iterator[None]:
    """The first caller decides what the fork server imports. Each process would import the rest itself, which takes
    seconds (torch._dynamo). So the server imports everything that any test needs."""
    forkserver.set_forkserver_preload([*SERVER_HAS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_stack_is_kept_per_seed() -> Iterator[None]:
    """torch.manual_seed formats the stack for each kind of GPU that is not in use yet, to show it if that fails. Below
    pytest this takes milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
            if hasattr(module := sys.modules.get(name), "traceback"):
                patch.setattr(module, "traceback", SimpleNamespace(format_stack=list))
        yield


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep asks a process how fast each model is, as always, and gets an answer without any training."""
    from tiny_run import known_times

    monkeypatch.setattr("rebased.train.sweep.cost.time_steps", known_times)


@pytest.fixture(scope="session", autouse=True)
def _a_home_for_compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Triton caches kernels below HOME. If HOME cannot be written, it gets a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        home = Path(os.path.expanduser("~"))
        if not os.access(home, os.W_OK) and "TRITON_CACHE_DIR" not in os.environ:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_terminal_of_80_columns() -> Iterator[None]:
    """Tables depend on the width of the terminal and on settings for colours, so tests fix both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test the process is as it was. In one fixture: there are 6,600 tests, and each fixture takes time in all.

    - Mixers and tasks that it registered are forgotten.
    - oneDNN is on again: on CPUs without bf16 a bf16 product turns it off, which changes the bits of later tests.
    - Memory that torch keeps of a GPU is given back: one test takes more than 100 GB, which other processes need.
    """
    with registers_kept():
        yield
    if torch := sys.modules.get("torch"):
        torch.backends.mkldnn.enabled = True
        on_gpu = request.node.get_closest_marker("gpu") and torch.cuda.is_available()
        if on_gpu and torch.cuda.memory_reserved() > 4 * 2**30:
            torch.cuda.empty_cache()
