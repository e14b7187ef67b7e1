"""The HTTP interface, asked by OpenAI's own client and by clients that misbehave."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("httpx", reason="serving needs it: pip install openai httpx")
pytest.importorskip("openai", reason="serving needs it: pip install openai httpx")

import httpx
import openai
from openai import OpenAI

from live_server import Live, live_server
from rebased.data.tokenizer import ByteTokenizer
from rebased.models import GenerateOptions, LanguageModel
from rebased.models.job import Job
from rebased.serve.schema import MAX_TOP
from rebased.serve.service import Limits
from served_model import TIE, Listener, is_greedy, small_model

KEY = "a-key-of-the-test"
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model()


@pytest.fixture(scope="module")
def live(model: LanguageModel) -> Iterator[Live]:
    limits = Limits(max_tokens=2000, seconds=60, choices=16, body_bytes=100_000)
    with live_server(model, limits=limits, api_key=KEY, cache_bytes=2**20, max_waiting=64) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within 30 seconds")


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "rebased"


def test_a_completion_is_what_generate_gives(client: OpenAI, model: LanguageModel) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=20, temperature=0, logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)
    assert len(choice.logprobs.tokens or []) == 20
    for value, top in zip(choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True):
        assert value == max(top.values())
        assert len(top) == 2
    expected = model.generate("hello", max_tokens=20, temperature=0.0, tokenizer=BYTES)
    assert choice.text == expected.texts[0]
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs[0], abs=TIE)


def test_several_prompts_choices_and_a_seed(client: OpenAI, model: LanguageModel) -> None:
    settings: dict[str, Any] = {"n": 2, "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    answer = client.completions.create(
        model="tiny",
        prompt=["one", "three"],
        **settings,
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    )
    expected = model.generate(
        ["one", "three"], **settings, top_k=40, min_p=0.01, repetition_penalty=1.1, tokenizer=BYTES
    )
    assert [choice.text for choice in answer.choices] == expected.texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_what_lm_evaluation_harness_asks_for(client: OpenAI, model: LanguageModel) -> None:
    """Its `local-completions`: token ids in, the log-probabilities of all of them out."""
    prompts = [list(b"a context and its end"), list(b"another")]
    answer = client.completions.create(
        model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        found, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
        assert len(found) == len(tops) == len(prompt) + 1
        with torch.no_grad():
            expected = model(torch.tensor([prompt]))[0].log_softmax(-1)
        per_token = [expected[place, token].item() for place, token in enumerate(prompt[1:])]
        assert found[0] is None
        assert found[1:-1] == pytest.approx(per_token, abs=TIE)
        greedy = [row.argmax().item() == token for row, token in zip(expected, prompt[1:], strict=False)]
        assert [value == max(top.values()) for value, top in zip(found[1:-1], tops[1:-1], strict=True)] == greedy
        assert choice.text.startswith(bytes(prompt).decode())


def test_tokens_and_back(http: httpx.Client, live: Live) -> None:
    tokens = http.post("/tokenize", json={"prompt": "Grüße", "add_special_tokens": False}).json()
    assert tokens == {"count": 7, "max_model_len": 4096, "tokens": list("Grüße".encode())}
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Grüße"}
    info = http.get("/tokenizer_info").json()
    assert http.post("/tokenize", json={"prompt": info["eos_token"]}).json()["tokens"] == [256]
    assert http.post("/detokenize", json={"tokens": [257]}).status_code == 400
    assert http.post("/tokenize", json={"prompt": 5}).status_code == 400
    assert httpx.get(f"{live.url}/tokenizer_info").status_code == 401


def test_a_stream_has_the_pieces_of_the_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "stream", "max_tokens": 30, "temperature": 0, "echo": True}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30
    assert {chunk.id for chunk in chunks} == {last.id}


def test_a_chat_and_its_stream(client: OpenAI, model: LanguageModel) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=25, temperature=0, logprobs=True, top_logprobs=3
    )
    text = "System: Be brief.\n\nUser: Hi\n\nAssistant:"
    expected = model.generate(text, max_tokens=25, temperature=0.0, stop=["\n\nUser:"], tokenizer=BYTES)
    content = whole.choices[0].message.content
    assert content == expected.texts[0].lstrip()
    assert whole.choices[0].logprobs is not None
    for entry in whole.choices[0].logprobs.content or []:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=25, temperature=0, stream=True, n=2)
    )
    for choice in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == content
        assert [each.finish_reason for each in mine if each.finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_shared_system_prompt_is_read_once(client: OpenAI) -> None:
    system = {"role": "system", "content": "A system prompt that many requests begin with. " * 4}
    cached = []
    for question in ("What?", "Why?"):
        messages: Any = [system, {"role": "user", "content": question}]
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, len(f"System: {system['content'].strip()}\n\n")]


def test_the_stream_on_the_wire(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert [json.loads(line[6:])["object"] for line in lines[:-1]] == ["text_completion"] * (len(lines) - 1)


BAD_BODIES = {
    "not JSON": (b"{", "Invalid JSON"),
    "not an object": (b"[1]", "not a JSON object"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', "Invalid JSON"),
    "half a surrogate": (b'{"prompt": "\\ud800"}', "Invalid JSON"),
    "no prompt's type": (b'{"prompt": {"a": 1}}', "prompt: give a string"),
    "no prompts": (b'{"prompt": []}', "the list of prompts is empty"),
    "fractions": (b'{"prompt": [1.5]}', "prompt: give a string"),
    "a foreign token": (b'{"prompt": [[65, 257]]}', "the prompt has the token 257; the model's are 0 to 256"),
    "a negative token": (b'{"prompt": [-1]}', "the prompt has the token -1"),
    "a huge token": (b'{"prompt": [1' + b"0" * 30 + b"]}", "the model's are 0 to 256"),
    "a prompt beyond the context": (b'{"prompt": "' + b"a" * 4097 + b'"}', "more than the 4,096 of the context"),
    "huge max_tokens": (b'{"prompt": "a", "max_tokens": 1000000000}', "max_tokens 1,000,000,000 is more than"),
    "more than the context": (b'{"prompt": "' + b"a" * 4000 + b'", "max_tokens": 200}', "ask for at most 97"),
    "true for a number": (b'{"prompt": "a", "n": true}', "n should be a number; got true"),
    "true for a fraction": (b'{"prompt": "a", "temperature": true}', "temperature should be a number; got true"),
    "negative max_tokens": (b'{"prompt": "a", "max_tokens": -1}', "max_tokens: "),
    "nothing to do": (b'{"prompt": "a", "max_tokens": 0}', "nothing to answer"),
    "many choices": (b'{"prompt": "a", "n": 17}', "more than 16 choices"),
    "temperature": (b'{"prompt": "a", "temperature": -1}', "temperature -1.0 is out of range"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', ""),
    "top_p": (b'{"prompt": "a", "top_p": 0}', "top_p 0.0 is out of range"),
    "seed": (b'{"prompt": "a", "seed": 9223372036854775808}', "seed"),
    "logprobs": (b'{"prompt": "a", "logprobs": 100}', f"logprobs: Input should be less than or equal to {MAX_TOP}"),
    "an empty stop": (b'{"prompt": "a", "stop": ""}', "stop: give at most 16 strings"),
    "an unknown field": (b'{"prompt": "a", "temprature": 1}', "did you mean 'temperature'?"),
    "an unsupported field": (b'{"prompt": "a", "logit_bias": {"1": 5}}', "logit_bias is not supported"),
    "deep nesting": (b'{"prompt": ' + b"[" * 10_000, ""),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_bodies_are_named(http: httpx.Client, name: str) -> None:
    body, message = BAD_BODIES[name]
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages: Field required"),
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role: "),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "nothing to answer"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools is not supported"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "more than the 4,096 of the context"),
]


@pytest.mark.parametrize(("body", "message"), BAD_CHATS)
def test_bad_chats_are_named(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_other_refusals(http: httpx.Client, live: Live, client: OpenAI) -> None:
    json = {"Content-Type": "application/json"}
    assert http.post("/v1/completions", content=b"x" * 200_000, headers=json).status_code == 413
    pieces = (b" " * 50_000 for _ in range(5))  # without a length in the header
    assert http.post("/v1/completions", content=pieces, headers=json).status_code == 413
    assert http.post("/v1/completions", data={"prompt": "form"}).status_code == 415
    assert http.post("/v1/completions", content=b"{}").status_code == 415  # as a browser sends a blob for any site
    assert http.get("/v1/completions").status_code == 405
    missing = http.get("/v1/nothing")
    assert missing.status_code == 404
    assert "GET /v1/nothing" in missing.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; this is 'tiny'"):
        client.completions.create(model="gpt-9", prompt="x")
    for key in ("wrong", f"{KEY}x", "ü"):
        bare = httpx.post(
            f"{live.url}/v1/completions", json={"prompt": "x"}, headers={b"Authorization": f"Bearer {key}".encode()}
        )
        assert bare.status_code == 401
        assert bare.json()["error"]["code"] == "invalid_api_key"


def test_an_empty_prompt_begins_a_text(client: OpenAI, model: LanguageModel) -> None:
    answer = client.completions.create(model="tiny", prompt="", max_tokens=5, temperature=0)
    assert answer.choices[0].text == model.generate([256], max_tokens=5, temperature=0.0, tokenizer=BYTES).texts[0]


def test_a_client_that_leaves_frees_its_slot(http: httpx.Client, live: Live, client: OpenAI) -> None:
    body = {"prompt": "long", "max_tokens": 2000, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=0.05)
    wait_for(lambda: not live.engine.busy)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_a_client_that_sends_half_a_request_holds_nobody_up(live: Live, client: OpenAI) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        half.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
    with socket.create_connection((host, int(port))) as noise:
        noise.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert b" 400 " in noise.recv(1000)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_health_and_metrics(live: Live, client: OpenAI) -> None:
    client.completions.create(model="tiny", prompt="abc", max_tokens=2)
    health = httpx.get(f"{live.url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "model": "tiny"})
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values["rebased_slots"] == 4
    assert values["rebased_made_tokens_total"] == live.engine.stats.made_tokens > 0
    assert values['rebased_requests_total{path="/v1/completions",status="200"}'] > 0
    assert values["rebased_first_token_seconds_count"] > 0


def test_a_full_server_says_so(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with live_server(model, slots=1, max_waiting=1) as live:
        step = live.engine.decoder.step
        monkeypatch.setattr(live.engine.decoder, "step", lambda: gate.wait(60) and step())
        heard, few = [Listener(), Listener()], GenerateOptions(max_tokens=16)
        try:
            live.engine.submit(Job([[1]], few), heard[0])
            wait_for(lambda: len(live.engine.scheduler._running) == 1)
            live.engine.submit(Job([[2]], few), heard[1])
            refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "y"})
        finally:
            gate.set()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_full"
        wait_for(lambda: [listener.reasons() for listener in heard] == [["length"], ["length"]])
        assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "y"}).status_code == 200


def test_a_request_that_takes_too_long_ends(model: LanguageModel) -> None:
    with live_server(model, limits=Limits(seconds=0.2)) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 408
        assert "0.2 seconds" in answer.json()["error"]["message"]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            *_, last = [line for line in stream.iter_lines() if line.startswith("data:")]
        assert json.loads(last[5:])["error"]["code"] == "timeout"


def test_a_shutdown_lets_running_requests_end(model: LanguageModel) -> None:
    with live_server(model) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            live.server.handle_exit(15, None)
            assert live.engine.closing
            *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
        live.thread.join(30)
        assert not live.thread.is_alive()


def test_made_tokens_are_greedy(client: OpenAI, model: LanguageModel) -> None:
    """What the tests above compare with is itself what the model finds most probable."""
    expected = model.generate("hello", max_tokens=20, temperature=0.0, tokenizer=BYTES)
    assert is_greedy(model, list(b"hello"), expected.tokens[0])
