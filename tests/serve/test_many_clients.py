"""Two hundred clients at once: no request is lost, no outputs are mixed, memory stays flat."""

import asyncio
import gc
import resource
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("sse_starlette", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("httpx", reason="serving needs it: pip install openai httpx")
pytest.importorskip("openai", reason="serving needs it: pip install openai httpx")

from openai import AsyncOpenAI

from live_server import live_server
from rebased.serve.answers import Answer
from rebased.serve.job import Choice, Job
from served_model import is_greedy, small_model

CLIENTS, ROUNDS = 200, 3


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


def resident_bytes() -> int:
    """The memory of this process, where the system tells it."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else 0


@pytest.mark.release
def test_two_hundred_clients() -> None:
    model = small_model()
    sizes = []
    with live_server(model, slots=32, cache_bytes=2**20) as live:
        for round_ in range(ROUNDS):
            answers = asyncio.run(ask_all(live.url, round_))
            assert len(answers) == CLIENTS
            for prompt, tokens in answers:
                assert is_greedy(model, list(prompt.encode()), tokens), prompt
            assert not live.engine.busy
            gc.collect()
            assert [each for each in gc.get_objects() if isinstance(each, Job | Choice | Answer)] == []
            sizes.append(resident_bytes())
        assert live.engine.stats.failures == 0
        assert live.engine.prefixes.bytes <= 2**20
    assert sizes[-1] - sizes[0] < 10 * 2**20, f"memory grew: {sizes}"
