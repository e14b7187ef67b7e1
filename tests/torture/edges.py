"""Inputs at the edges that no command line names: requests, headers, pipes, names, exported folders, and autocast.

A case is a command with what its process does first: send requests to it, say, from a thread.
"""

import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.torture.inputs import TEXTS, hostile_value, mutate_json, mutate_text, write

COMPLETION = {"prompt": "the quick", "max_tokens": 4, "temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
COMPLETION |= {
    "n": 2,
    "seed": 1,
    "stop": ["x"],
    "logprobs": 2,
    "echo": True,
    "repetition_penalty": 1.1,
    "stream": False,
}
CHAT = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/tokenize": {"prompt": "the"}}
PATHS |= {"/detokenize": {"tokens": [116, 104]}}
SURE = {"prompt": "the quick", "max_tokens": 4, "temperature": 0, "logprobs": 1}  # always has the same answer
REQUESTS = 20  # per trial: a server takes a second to start
MISSING = {"requests": "serve", "headers": "serve", "exported": "hf"}  # kinds that need an extra


class Case(NamedTuple):
    """A command, and what its process does before."""

    words: list[str]
    prepare: Callable[[], None] | None = None


def is_installed(kind: str) -> bool:
    """Whether the packages are there that a kind of trial needs."""
    needed = {"serve": ("fastapi", "uvicorn", "prometheus_client"), "hf": ("transformers",)}
    return all(importlib.util.find_spec(name) for name in needed.get(MISSING.get(kind, ""), ()))


def names(random: Random, folder: Path) -> Case:
    """Control characters and other hostile text in the names of a record."""
    path = folder / "done" / "record.jsonl"
    first, *lines = (json.loads(line) for line in path.read_text().splitlines())
    text = "".join(random.choice((*TEXTS, chr(random.randrange(0xA0)), chr(random.randrange(0x10000)))) for _ in "abc")
    text = text.encode("utf-8", "replace").decode()[:100]
    config = first["config"]
    for holder, key in random.sample(
        [(config["model"]["mixers"][0], "name"), (config["task"], "name"), (config["model"]["mixers"][0], text),
         (config["model"], "own"), (first["machine"], "cpu"), (first["code"], "version"), (first, "digest")], 3
    ):  # fmt: skip
        holder[key] = text
    lines[-1].pop("sha256", None)
    write(path, "".join(json.dumps(line) + "\n" for line in (first, *lines)))
    options = random.choice((["-o", "out.html"], ["--tables", "out", "--formats", "md,tex,csv,svg"]))
    return Case(random.choice((["report", "done", *options], ["suite", "suite.yaml", "--known", "done", "-o", "out"])))


def pipes(random: Random, folder: Path) -> Case:
    """A named pipe, which never ends, in place of a file that a command wrote. Text may come from a pipe."""
    command, path = random.choice(
        (
            (["report", "done", "-o", "out.html"], "done/record.jsonl"),
            (["train", "--config", "run.yaml", "--out", "out"], "run.yaml"),
            (["train", "--config", "run.yaml", "--out", "begun", "--resume"], "begun/checkpoint.json"),
            (["lm", "generate", "lm-run", "--max-tokens", "2"], "lm-run/model.safetensors"),
            (["lm", "export", "lm-run", "-o", "out", "--layout", "authors"], "lm-run/model.safetensors"),
            (["lm", "import", "lm-run", "-o", "out"], "lm-run/model.safetensors"),
            (["probe", "probes.json", "-o", "out.html"], "probes.json"),
            (["paper", "bundle.jsonl.gz", "-o", "out.html"], "bundle.jsonl.gz"),
            (["data", "check", "text"], "text/manifest.json"),
        )
    )
    (folder / path).unlink(missing_ok=True)
    os.mkfifo(folder / path)
    return Case(command)


def exported(random: Random, folder: Path) -> Case:
    """One bit of an exported model flipped: it is refused, or it is the same model."""
    path = random.choice(sorted((folder / "exported").glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    at = random.randrange(len(content))
    content[at] ^= 1 << random.randrange(8)
    write(path, bytes(content))

    def load() -> None:
        from rebased.models.hf import RebasedForCausalLM

        try:
            RebasedForCausalLM.from_pretrained("exported")
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise RuntimeError(f"bit flipped at {at}, and the folder was loaded")

    return Case([], load)


def autocast(random: Random, folder: Path) -> Case:
    """Polynomial attention with and without autocast: the same numbers on every path."""
    backend = random.choice(("reference", "recurrent", "chunked"))
    dtype, seed = random.choice(("bfloat16", "float16")), random.randrange(2**31)
    B, T, H, K, V = (random.randint(1, most) for most in (3, 150, 3, 16, 16))

    def compare() -> None:
        import torch

        from rebased.ops import BASED, REBASED, poly_attention, poly_attention_at, poly_attention_extend, poly_state

        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(B, T, H, width, generator=generator) for width in (K, K, V))
        given: dict[str, Any] = {"coefficients": BASED if seed % 2 else REBASED, "backend": backend}

        def compute() -> list[torch.Tensor]:
            state = poly_state(k, v, coefficients=given["coefficients"])
            o, after = poly_attention_extend(q, k, v, state, **given)
            at = poly_attention_at(q[:, :1], k, v, torch.full((B, 1), T - 1), **given)
            return [poly_attention(q, k, v, **given), o, *after, at]

        want = compute()
        with torch.autocast("cpu", getattr(torch, dtype)):
            found = compute()
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, want, strict=True)):
            raise RuntimeError(f"autocast to {dtype} changes {backend} at {(B, T, H, K, V)}, seed {seed}")
        raise SystemExit(0)

    return Case([], compare)


def requests(random: Random, folder: Path) -> Case:
    """Mutated bodies: each gets JSON, and a good request has the same answer before and after."""
    bodies = []
    for _ in range(REQUESTS):
        path = random.choice(list(PATHS))
        body = PATHS[path]
        changed = {random.choice(list(body)): hostile_value(random)}
        mutated = (
            json.dumps(body | changed, default=str).encode() if random.random() < 0.6 else mutate_json(random, body)
        )
        bodies.append((path, mutated))

    def ask(url: str) -> None:
        sure = _post(url, "/v1/completions", json.dumps(SURE).encode())[1]["choices"]
        for path, body in bodies:
            status, answer = _post(url, path, body)
            if status != 200 and not (400 <= status < 500 and answer["error"]["message"]):
                raise RuntimeError(f"status {status} for {path} {body[:300]!r}")
        if _post(url, "/v1/completions", json.dumps(SURE).encode())[1]["choices"] != sure:
            raise RuntimeError("a good request has another answer afterwards")

    return _served(ask)


def headers(random: Random, folder: Path) -> Case:
    """Mutated heads and heads that never end: the server stays well, and the log short."""
    whole = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    )
    heads = []
    for _ in range(REQUESTS):
        text = mutate_text(random, whole + "\r\n{}") if random.random() < 0.7 else whole
        heads.append(text.encode("utf-8", "surrogatepass") * random.choice((1, 1, 1, 50)))

    def hold(url: str) -> None:
        held = []
        for head in heads:
            sock = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20)
            sock.sendall(head[: 2**16])
            held.append(sock)
        for sock in held:
            sock.close()

    return _served(hold)


def _served(use: Callable[[str], None]) -> Case:
    """`lm serve`, with a thread of its process that uses it and then ends it. It must be well at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def run() -> None:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=20).close()
                    break
                except OSError:
                    time.sleep(0.05)
            use(url)
            urllib.request.urlopen(f"{url}/health", timeout=20).close()
        except Exception:
            traceback.print_exc()  # which no command may show
            sys.stderr.flush()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def prepare() -> None:
        threading.Thread(target=run, daemon=True).start()

    words = ["lm", "serve", "lm-run", "--port", str(port), "--device", "cpu", "--context", "200", "--batch-invariant"]
    return Case([*words, "--grace", "5"], prepare)


def _post(url: str, path: str, body: bytes) -> tuple[int, Any]:
    """The status and the JSON of an answer; of a stream nothing."""
    request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, content, kind = answer.status, answer.read(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            status, content, kind = error.code, error.read(), error.headers["Content-Type"]
    return status, None if "event-stream" in kind else json.loads(content)


EDGES = (names, pipes, exported, autocast, requests, headers)
