"""A language model's run of at most a second on generated text, and how to start it in several processes."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from rebased.config import merge
from rebased.data import write_corpus
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.train import RunResult, train

TIMINGS = ("seconds", "tokens_per_second", "code", "processes")
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")

TINY: dict[str, Any] = {
    "data": {"folder": "text", "seq_len": 16},
    "model": {
        "vocab_size": 257,
        "d_model": 8,
        "n_layers": 2,
        "mixers": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}],
        "mlp_ratio": 2,
        "embed_dropout": 0,
    },
    "train": {
        "steps": 12,
        "batch_size": 4,
        "lr": 0.01,
        "warmup_steps": 3,
        "log_every": 3,
        "eval_every": 6,
        "checkpoint_every": 4,
        "device": "cpu",
    },
}


def write_text(folder: Path, seed: int = 0) -> Path:
    """Prepare a text: 61 windows of 16 bytes to train on and 11 to evaluate on; the last of each is padded."""
    words = random.Random(seed)
    text = " ".join(words.choice(WORDS) for _ in range(200))
    write_corpus(folder, {"train": [text[:500], text[500:970]], "valid": [text[-170:]]})
    return folder


def tiny(text: Path, changes: dict[str, Any] | None = None) -> LMRunConfig:
    return LMRunConfig.model_validate(merge(TINY | {"data": {"folder": text, "seq_len": 16}}, changes or {}))


def curve(folder: Path) -> list[dict[str, Any]]:
    """The record without what may differ between two equal runs: times, code version and resumptions."""
    lines = [line for line in read_record(folder) if line["type"] != "resume"]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in curve(folder) if "loss" in line]


def everything(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The record without times, and the weights: equal for two runs that are the same."""
    return curve(folder), (folder / "model.safetensors").read_bytes()


# The fork server has imported torch but never computed with it, so it starts processes in milliseconds (conftest.py).
_processes = multiprocessing.get_context("forkserver")
_stores: list[TCPStore] = []
"""A store ends with the last reference to it. These live as long as the tests."""


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    process = _processes.Process(target=function, args=arguments)
    process.start()
    return process


def start_world(size: int, function: Callable[..., Any], *arguments: Any) -> list[BaseProcess]:
    """Start the function in `size` processes, each with the environment variables that torchrun sets.

    As with torchrun, the process that starts them owns the store they meet at. Its port is taken from the beginning. If
    rank 0 opened it, another program could take the port first, and the other ranks would wait for minutes.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    return [start(_as_rank, rank, size, store.port, function, arguments) for rank in range(size)]


def wait(processes: list[BaseProcess], seconds: float = 300) -> list[int | None]:
    """The exit codes of the processes; None for one that is still running after `seconds`, which is then killed."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    return codes


def _as_rank(rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    function(*arguments)


def run(config: LMRunConfig, folder: Path, resume: bool = False) -> RunResult:
    return train(config, folder, resume=resume)
