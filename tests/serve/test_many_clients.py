"""Two hundred clients at once: no request is lost, no outputs are mixed, memory stays flat."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("openai", reason="the clients need it: pip install openai")

from openai import AsyncOpenAI

from rebased.models.weights import save_model
from served_model import is_greedy, small_model

CLIENTS, ROUNDS = 200, 4


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """`rebased lm serve` in a process of its own: its address and its process id."""
    words = ["lm", "serve", str(folder), "--name", "tiny", "--tokenizer", "bytes", "--port", "0", "--device", "cpu"]
    words += ["--slots", "32", "--cache-mb", "1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "rebased", *words]
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.stdout.readline().split()[1].rstrip("/"), process.pid
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


async def ask_all(url: str, round_: int) -> list[tuple[str, list[int]]]:
    """What each client asked and got; half of them as a stream."""

    async def one(client: AsyncOpenAI, number: int) -> tuple[str, list[int]]:
        prompt = f"client {number} in round {round_}: " + "abc " * (number % 9)
        asked: dict[str, Any] = {
            "model": "tiny", "prompt": prompt, "max_tokens": 5 + number % 20, "temperature": 0, "logprobs": 0,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        if number % 2:
            chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
            found = [chunk.choices[0].logprobs for chunk in chunks]
        else:
            found = [(await client.completions.create(**asked)).choices[0].logprobs]
        names = [name for part in found if part is not None for name in part.tokens or []]
        assert len(names) == 5 + number % 20
        return prompt, [token_of(name) for name in names]

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(one(client, number) for number in range(CLIENTS)))


def token_of(name: str) -> int:
    """The token that a name in log-probabilities means, with one token per byte."""
    if name.startswith("token_id:"):
        return int(name.removeprefix("token_id:"))
    return int(name.removeprefix("bytes:\\x"), 16) if name.startswith("bytes:") else ord(name)


def resident_bytes(pid: int) -> int:
    """The memory of a process, where the system tells it."""
    status = Path(f"/proc/{pid}/statm")
    return int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else 0


@pytest.mark.release
def test_two_hundred_clients(tmp_path: Path) -> None:
    model, sizes = small_model(), []
    save_model(model, tmp_path)
    with server(tmp_path) as (url, pid):
        for round_ in range(ROUNDS):
            answers = asyncio.run(ask_all(url, round_))
            assert len(answers) == CLIENTS
            for prompt, tokens in answers:
                assert is_greedy(model, list(prompt.encode()), tokens), prompt
            sizes.append(resident_bytes(pid))
    assert sizes[-1] - sizes[1] < 10 * 2**20, f"memory grew: {sizes}"  # 25 KB per request
