"""Whatever one request does, only it fails: an exception in each place that works for it, while others are served."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")

from live_server import Live, live_server
from rebased.data import detokenize
from rebased.data.tokenizer import ByteTokenizer
from rebased.models import Decoder, sampling, scheduler
from rebased.models.prompt_reader import PromptReader
from rebased.serve.answers import Answer
from served_model import small_model

# What only the bad request has, as each of the places sees it.
PROMPT, TOP, STOP, SEED = "a bad one", 7, "\x01 never", 666
BAD = {"prompt": PROMPT, "logprobs": TOP, "stop": STOP, "seed": SEED}
GOOD = [
    {"prompt": f"request {n} " * (n + 1), "max_tokens": 20, "top_p": 0.9, "seed": n, "logprobs": 2, "ignore_eos": True}
    for n in range(3)
]


class Injected(Exception):
    """Raised for the bad request."""


def failing(real: Callable[..., Any], is_bad: Callable[..., bool]) -> Callable[..., Any]:
    """The function, which fails where it works for the bad request."""

    def call(*given: Any, **named: Any) -> Any:
        if is_bad(*given, **named):
            raise Injected
        return real(*given, **named)

    return call


def has_prompt(tokens: Any) -> bool:
    return bytes(tokens) == PROMPT.encode()[: len(tokens)]


def only_of_bad(part: str, method: str) -> tuple[type, str, Callable[..., Any]]:
    """TextStream, with a method of one of its parts that fails where the stop string is the bad request's."""
    real = detokenize.TextStream.__init__

    def init(self: Any, tokenizer: Any, stops: Any) -> None:
        real(self, tokenizer, stops)
        if STOP in stops:
            setattr(getattr(self, part), method, failing(lambda: None, lambda *_: True))

    return detokenize.TextStream, "__init__", init


def of(owner: Any, name: str, is_bad: Callable[..., bool]) -> tuple[Any, str, Callable[..., Any]]:
    return owner, name, failing(getattr(owner, name), is_bad)


PLACES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "tokenize": of(ByteTokenizer, "encode", lambda _, text: text == PROMPT),
    "begin to read": of(PromptReader, "begin", lambda _, job, number: has_prompt(job.prompts[number])),
    "read": of(PromptReader, "read", lambda _, some, budget: any(has_prompt(each.prompt) for each in some)),
    "take a slot": of(Decoder, "put", lambda _, slot, tokens, *__, **___: has_prompt(tokens)),
    "set the sampling": of(sampling, "stream_key", lambda seed, sequence: seed == SEED),
    "score": of(scheduler, "score_rows", lambda logits, tokens, top: top == TOP),
    "detokenize": only_of_bad("_detokenizer", "push"),
    "end the text": only_of_bad("_detokenizer", "finish"),
    "look for a stop string": only_of_bad("_stops", "push"),
    "consume events": of(Answer, "add", lambda answer, made: answer.prompt_tokens == len(PROMPT)),
}


def ask(url: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """The status and what came: one JSON object, or those of a stream."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, content = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read().decode()
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line and line != "data: [DONE]"]
    return status, [json.loads(line) for line in lines]


def ask_together(url: str, bodies: list[dict[str, Any]]) -> list[tuple[int, list[Any]]]:
    answers: dict[int, tuple[int, list[Any]]] = {}
    threads = [
        threading.Thread(target=lambda n=n, body=body: answers.update({n: ask(url, body)}))
        for n, body in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [answers[n] for n in range(len(bodies))]


def choices(answers: list[tuple[int, list[Any]]]) -> list[Any]:
    return [answer[0]["choices"] for _, answer in answers]


@pytest.fixture(scope="module", params=[False, True], ids=["together", "batch-invariant"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with live_server(small_model(), slots=3, batch_invariant=request.param) as server:
        yield server
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(live: Live) -> list[Any]:
    return choices([ask(live.url, body) for body in GOOD])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("place", PLACES)
def test_only_the_bad_request_fails(
    live: Live, expected: list[Any], place: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLACES[place])
    first, bad, *rest = ask_together(live.url, [GOOD[0], BAD | {"stream": stream}, *GOOD[1:]])
    status, events = bad
    streams = stream and place != "tokenize"  # nothing of the answer is sent before its prompt is known
    assert status == (200 if streams else 500)
    assert events[-1]["error"]["type"] == "server_error"
    answers = [first, *rest]
    assert [status for status, _ in answers] == [200] * 3
    if live.engine.scheduler.batch_invariant:
        assert choices(answers) == expected  # log-probabilities to the bit
    else:
        assert [each[0]["text"] for each in choices(answers)] == [each[0]["text"] for each in expected]
    with urllib.request.urlopen(f"{live.url}/health", timeout=60) as health:
        assert json.load(health)["status"] == "ok"
    monkeypatch.undo()
    assert ask(live.url, BAD)[0] == 200
    assert (live.engine.running, live.engine.waiting, sorted(live.engine.scheduler._free)) == (0, 0, [0, 1, 2])
