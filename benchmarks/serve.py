"""Tokens per second and latencies of `rebased lm serve`'s server, over ReBased and over softmax attention.

    PYTHONPATH=src python benchmarks/serve.py --minutes 9          on a GPU; needs rebased[serve]
    PYTHONPATH=src python benchmarks/serve.py --models paper-text --cases 64x4096x128
    PYTHONPATH=src python benchmarks/serve.py --tiny               the same at a small size, on a CPU
    PYTHONPATH=src python benchmarks/serve.py --models shipped --device cpu --cases 32x64x64     the shipped model
    PYTHONPATH=src python benchmarks/serve.py --plot benchmarks/results/serve-....json      on any machine

A case is CLIENTSxPROMPTxANSWER: so many clients at a time, each with prompts and answers of so many tokens. For each
model and number of slots a server is started, with random weights of the paper's language models: 64 slots for up to 64
clients, 256 for more. Requests are streams over HTTP, prompts of random tokens (no two alike, but for the first
`--shared` tokens), greedy. Latency is from the request to its end, first token from the request to the first chunk with
text. The clients are spread over some processes; --requests is per client.

Two models compute nothing, and come first. "canned" is no server of ours: a few lines that send fixed answers, which
shows what the clients can take. "nothing" is our server over a decoder that returns zeros: what the host can do.

Writes serve-<date>-<device>.json, after each case anew, the plot beside it, and prints a table. It never takes longer
than --minutes: servers share them, and requests that are under way when a server's time is over are cut off.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.data.tokenizer import ByteTokenizer
from rebased.files import replacing
from rebased.models import LanguageModel, LMConfig, LMState, preset
from rebased.models.step_graph import Stepped
from rebased.models.weights import load_model
from rebased.ops.backend import has_gpu
from rebased.runs.shipped import find_model

MODELS = {
    "attention": "lm-attention",
    "paper-text": "lm-paper-text-rebased",
    "based": "lm-paper-text-based",
}
IDLE = ("canned", "nothing")  # they compute nothing
CASES = ["64x1024x128", "200x1024x128", "64x4096x128", "200x4096x128", "64x1024x1024", "200x1024x1024"]
FEW_SLOTS, MANY_SLOTS = 64, 256
LONG_ANSWER = 512  # tokens
CANNED_CHUNK = 8  # tokens per chunk of a canned answer
VOCABULARY = 4096  # of models that compute nothing
IDLE_CHUNK = 32_768  # tokens of prompts that they read between two steps, as a GPU does
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PERCENTILES = (50, 90, 99)
ENDING = 15.0  # seconds that are left to save, draw and show
A_DAY = 86_400.0
PROCESSES = 8  # that play the clients


CHILDREN: list[subprocess.Popen[str]] = []


class Words:
    """A tokenizer for models of random weights: each token is a word, its own number."""

    name, end_of_text = "words", None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(word) % self.vocab_size for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {token}" for token in ids)


class Load(NamedTuple):
    """What clients ask for."""

    clients: int
    requests: int  # per client
    prompt_tokens: int
    shared: int
    max_tokens: int


def case_of(word: str) -> tuple[int, int, int]:
    clients, prompt, answer = map(int, word.split("x"))
    return clients, prompt, answer


def shape_of(model: str, context: int, device: str) -> LMConfig:
    if model in IDLE:
        return LMConfig(vocab_size=VOCABULARY, d_model=8, n_layers=1, mixers=("short_conv",), positions="none")
    if model == "shipped":
        return load_model(find_model(None)).config
    if device == "cpu":  # for the test of this file: the same at a small size
        small = preset(MODELS[model], d_model=48, vocab_size=64, max_len=context)
        return small.model_copy(update={"n_layers": 2})
    return preset(MODELS[model], max_len=context)


def build_engine(args: argparse.Namespace) -> Any:
    """The engine, in its own process."""
    from rebased.serve.engine import Engine

    torch.manual_seed(0)
    if args.server in IDLE:
        args.device, args.precision, args.prefill_chunk = "cpu", "fp32", args.prefill_chunk or IDLE_CHUNK
    device = torch.device(args.device)
    if args.server == "shipped":
        model = load_model(find_model(None), device).to(DTYPES[args.precision]).eval()
    else:
        with torch.device(device):
            model = LanguageModel(shape_of(args.server, args.context, args.device)).to(DTYPES[args.precision]).eval()
    engine = Engine(
        model,
        slots=args.slots,
        context=args.context,
        prefill_chunk=args.prefill_chunk,
        cache_bytes=args.cache_mb * 2**20,
        capture=device.type == "cuda" and args.capture,
    )
    engine.warm_up()
    if args.server == "nothing":
        compute_nothing(engine)
    return engine


def compute_nothing(engine: Any) -> None:
    """Let an engine read prompts and make tokens without computing."""
    zeros = Stepped(torch.zeros(engine.slots, dtype=torch.int64), torch.zeros(engine.slots))

    def read(pieces: Sequence[tuple[Any, int, int]]) -> tuple[list[Any], list[LMState]]:
        return [None] * len(pieces), [LMState(stop, reading.state.layers) for reading, _, stop in pieces]

    engine.scheduler._reader._extend = read
    engine.decoder.compute = lambda longest, mode, rows: zeros


def be_server(args: argparse.Namespace) -> None:
    """The other process: serve one model on a free port, which the first line of stdout tells."""
    if args.server == "canned":
        return asyncio.run(serve_canned(args))
    from rebased.serve.api import build_app
    from rebased.serve.client import EngineClient
    from rebased.serve.process import EngineProcess
    from rebased.serve.server import open_socket, serve
    from rebased.serve.service import Limits, Service

    with open_socket("127.0.0.1", 0) as sock, EngineProcess(partial(build_engine, args)) as process:
        known = process.about
        about = {"parameters": known.parameters, "state_bytes": known.state_bytes, "port": sock.getsockname()[1]}
        about |= {"fusion": known.fusion, "captured": known.captures}
        tokenizer: Any = ByteTokenizer() if args.server == "shipped" else Words(known.config.vocab_size)
        engine = EngineClient(known, tokenizer, process, max_waiting=100_000)
        app = build_app(Service(args.server, engine, Limits(max_tokens=args.context, seconds=3600)))
        serve(app, sock, on_ready=lambda: print(json.dumps(about), flush=True), engine=engine)


async def serve_canned(args: argparse.Namespace) -> None:
    """Answer every request with the same stream, chunk by chunk, as fast as the clients take it."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def chunk(content: dict[str, Any]) -> bytes:
        body = b"data: %b\n\n" % json.dumps(content).encode()
        return b"%x\r\n%b\r\n" % (len(body), body)

    text = chunk({"id": "cmpl-0", "choices": [{"index": 0, "text": " 1234" * CANNED_CHUNK, "finish_reason": None}]})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                tokens = json.loads(await reader.readexactly(length))["max_tokens"]
                writer.write(head)
                for _ in range(-(-tokens // CANNED_CHUNK)):
                    writer.write(text)
                    await writer.drain()
                    await asyncio.sleep(0)  # so that the clients get their chunks by turns, as from a model
                writer.write(chunk({"choices": [], "usage": {"completion_tokens": tokens}}) + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


@contextmanager
def server(model: str, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A server of this model in a process of its own; yields what it tells about itself."""
    command = [sys.executable, __file__, *words, "--server", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            CHILDREN.append(process)
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server of {model} did not start; its messages are above")
            yield json.loads(line)
        finally:
            CHILDREN.remove(process)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def body_of(prompt: list[int], max_tokens: int) -> bytes:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return json.dumps(body | {"stream_options": {"include_usage": True}}).encode()


class Client:
    """A client with one connection. It knows as much of HTTP as it needs: clients must be faster than the server."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> tuple[float, float, int]:
        """One request. Returns (seconds to the first text, seconds to the end, tokens)."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        begin, first, tail, status = time.perf_counter(), 0.0, b"", b""
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            got = await reader.read(2**16)
            status, tail = status or got[:300], (tail + got)[-2000:]
            if not got or b" 200 " not in status[:20]:
                self.close()
                raise RuntimeError(f"the answer broke off or is an error: {status!r}")
            if not first and b"data: {" in got:
                first = time.perf_counter() - begin
        found = re.search(rb'"completion_tokens": ?(\d+)', tail)
        if found is None:
            raise RuntimeError(f"an answer without its number of tokens: {tail[-300:]!r}")
        return first, time.perf_counter() - begin, int(found[1])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Played(NamedTuple):
    """What some clients saw."""

    results: list[tuple[float, float, int]]  # as `Client.ask` returns them
    failures: list[str]
    cut_off: int
    begin: float  # on the clock of all processes
    end: float


async def play(port: int, load: Load, seeds: Sequence[int], vocab_size: int, seconds: float) -> Played:
    """Let one client per seed ask, each one request after the other, until the time is over."""
    shared = random.Random(load.clients).choices(range(vocab_size), k=load.shared)
    results: list[tuple[float, float, int]] = []
    failures: list[str] = []
    rest = load.prompt_tokens - load.shared

    async def one(client: Client, bodies: list[bytes]) -> None:
        for body in bodies:
            try:
                results.append(await client.ask(body))
            except (OSError, RuntimeError) as error:
                failures.append(f"{type(error).__name__}: {error}"[:300])

    drawn = [
        [body_of(shared + own.choices(range(vocab_size), k=rest), load.max_tokens) for _ in range(load.requests)]
        for own in map(random.Random, seeds)
    ]
    clients = [Client("127.0.0.1", port) for _ in seeds]
    begin = time.time()
    asking = [asyncio.ensure_future(one(*each)) for each in zip(clients, drawn, strict=True)]
    _, cut = await asyncio.wait(asking, timeout=max(0.0, seconds))
    for task in cut:
        task.cancel()
    await asyncio.gather(*cut, return_exceptions=True)
    end = time.time()
    for client in clients:
        client.close()
    return Played(results, failures, len(cut), begin, end)


def play_share(port: int, load: Load, seeds: Sequence[int], vocab_size: int, seconds: float) -> Played:
    return asyncio.run(play(port, load, seeds, vocab_size, seconds))


def process_id(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def wait_for_all(pool: ProcessPoolExecutor, workers: int) -> None:
    """Return when all processes of the pool have started: each imports torch first, which takes seconds."""
    while len(set(pool.map(process_id, range(2 * workers)))) < workers:
        pass


def count_of_engine(port: int) -> dict[str, float]:
    """What a server's engine has counted: steps, and the seconds of the host in steps and in reading prompts."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        found = re.findall(r"^rebased_(steps|step_seconds|prefill_seconds)_total (\S+)$", answer.read().decode(), re.M)
    return {name: float(value) for name, value in found}


def measure(
    pool: ProcessPoolExecutor,
    workers: int,
    port: int,
    load: Load,
    vocab_size: int,
    seconds_left: float,
    counts: bool,
) -> dict[str, Any]:
    """Let all clients ask, spread over the processes of the pool: one process could not read what a server writes.

    `counts`: whether the server is ours, and can tell what its engine did.
    """
    end = time.monotonic() + seconds_left

    def ask_all(load: Load, first_seed: int) -> Played:
        seeds = range(first_seed, first_seed + load.clients)
        left, parts = end - time.monotonic(), min(workers, load.clients)
        shares = [pool.submit(play_share, port, load, seeds[part::parts], vocab_size, left) for part in range(parts)]
        played = [share.result() for share in shares]
        return Played(
            [result for each in played for result in each.results],
            [failure for each in played for failure in each.failures],
            sum(each.cut_off for each in played),
            min(each.begin for each in played),
            max(each.end for each in played),
        )

    ask_all(load._replace(requests=1), first_seed=10**6)  # kernels are compiled for the shapes that come
    before = count_of_engine(port) if counts else {}
    results, failures, cut_off, begin, over = ask_all(load, first_seed=0)
    seconds, made = over - begin, sum(tokens for _, _, tokens in results)
    after = count_of_engine(port) if counts else {}
    return {
        **load._asdict(),
        "seconds": seconds,
        "answered": len(results),
        "failed": len(failures),
        "cut_off": cut_off,
        "failures": failures[:3],
        "requests_per_second": len(results) / seconds,
        "tokens_per_second": made / seconds,
        "latency": percentiles([latency for _, latency, _ in results]),
        "first_token": percentiles([first for first, _, _ in results]),
        "engine": {name: after[name] - before[name] for name in after},
    }


def percentiles(values: list[float]) -> dict[str, float | None]:
    if len(values) < 2:
        return {f"p{each}": values[0] if values else None for each in PERCENTILES}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{each}": cuts[each - 1] for each in PERCENTILES}


def save(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")


def show(record: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in (
        "model",
        "clients",
        "prompt",
        "answer",
        "requests/s",
        "tokens/s",
        "latency p50, p90, p99 / s",
        "first token / s",
        "failed",
        "cut off",
    ):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in record["cases"]:
        latency, first = (
            ", ".join("-" if row[key][f"p{p}"] is None else f"{row[key][f'p{p}']:.3f}" for p in PERCENTILES)
            for key in ("latency", "first_token")
        )
        sizes = (f"{row[name]:,}" for name in ("clients", "prompt_tokens", "max_tokens"))
        numbers = (*sizes, f"{row['requests_per_second']:,.2f}", f"{row['tokens_per_second']:,.0f}")
        table.add_row(row["model"], *numbers, latency, first, str(row["failed"]), str(row.get("cut_off", 0)))
    Console(width=130).print(table)


def draw(record: dict[str, Any], path: Path) -> None:
    """Tokens per second and the time to the first token, one group of bars per case, one bar per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["cases"] if row["answered"] and row["model"] not in IDLE]
    cases = list(dict.fromkeys((row["clients"], row["prompt_tokens"], row["max_tokens"]) for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for number, model in enumerate(models):
        own = {(row["clients"], row["prompt_tokens"], row["max_tokens"]): row for row in rows if row["model"] == model}
        places = [place + 0.8 * (number - (len(models) - 1) / 2) / len(models) for place in range(len(cases))]
        for axis, value in (
            (axes[0], lambda row: row["tokens_per_second"]),
            (axes[1], lambda row: row["first_token"]["p50"]),
        ):
            heights = [value(own[case]) if case in own else 0 for case in cases]
            axis.bar(places, heights, width=0.8 / max(1, len(models)), label=model)
    names = [f"{clients} clients\n{prompt:,} + {answer:,}" for clients, prompt, answer in cases]
    for axis, name in zip(axes, ("tokens per second", "seconds to the first token, median"), strict=True):
        axis.set_xticks(range(len(cases)), names, fontsize="small")
        axis.set_ylabel(name)
        axis.grid(True, axis="y", alpha=0.25)
        if rows:
            axis.legend(fontsize="small")
    figure.suptitle(f"A server asked by several clients (prompt + answer), {record['machine']['device']}")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def finish(record: dict[str, Any], path: Path) -> None:
    save(record, path)
    draw(record, path.with_suffix(".svg"))
    show(record)
    sys.stdout.flush()


def end_in_time(record: dict[str, Any], path: Path, minutes: float) -> None:
    """End the process, and the servers that it has started, after so many minutes: something hangs."""

    def stop() -> None:
        for child in CHILDREN:
            child.kill()
        finish(record | {"cut_off": True}, path)
        os._exit(0)

    if minutes != float("inf"):
        timer = threading.Timer(60 * minutes - ENDING / 2, stop)
        timer.daemon = True
        timer.start()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*IDLE, *MODELS, "shipped"]
    parser.add_argument("--models", nargs="+", choices=every, default=[*IDLE, "paper-text", "attention"])
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CLIENTSxPROMPTxANSWER")
    parser.add_argument("--requests", type=int, help="per client; default: 4, and 2 with answers of 512 tokens or more")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--slots", type=int, help="default: 64 for up to 64 clients, 256 for more")
    parser.add_argument("--prefill-chunk", type=int, help="default: the server's")
    parser.add_argument("--cache-mb", type=int, default=256)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--capture", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="it ends after so many, whatever is left")
    parser.add_argument("--tiny", action="store_true", help="a CPU, few clients and short prompts")
    parser.add_argument("--plot", type=Path, metavar="RECORD", help="only show and draw a record, as RECORD.svg")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--server", choices=every, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.plot is not None:
        record = json.loads(args.plot.read_text())
        draw(record, args.plot.with_suffix(".svg"))
        return show(record)
    if args.tiny:
        args.device, args.requests, args.cases = "cpu", 2, ["1x20x5", "4x20x5"]
        args.slots = args.slots or 2
    if args.device == "cpu":
        args.precision = "fp32"
    if args.device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --tiny goes through the same steps at a small size")
    if args.server is not None:
        return be_server(args)
    cases = [case_of(word) for word in args.cases]
    if not 0 <= args.shared < min(prompt for _, prompt, _ in cases):
        raise SystemExit(f"--shared {args.shared}: give fewer than the tokens of a prompt")
    given = list(sys.argv[1:] if words is None else words)
    spoken = [word for word in given if word not in ("--out", str(args.out))]
    begin, now = time.monotonic(), datetime.now(UTC)
    about = machine(args.device, "fastapi", "uvicorn", "httptools", "uvloop", "orjson", "triton")
    record = {
        "what": "a server of language models asked by several clients at once: tokens per second and latencies",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/serve.py", *spoken]),
        "machine": about,
        "precision": args.precision,
        "capture": args.capture and args.device == "cuda",
        "cases": [],
        "left_out": [],
    }
    device = "cpu" if args.device == "cpu" else about["device"].lower().removeprefix("nvidia").strip().replace(" ", "-")
    path = args.out / f"serve-{now:%Y-%m-%d-%H%M%S}-{device}.json"
    end_in_time(record, path, args.minutes)
    seconds = min(60 * args.minutes - ENDING, A_DAY)
    workers = 2 if args.device == "cpu" else PROCESSES
    context = max(prompt + answer for _, prompt, answer in cases)
    by_slots: dict[int, list[tuple[int, int, int]]] = {}
    for case in cases:
        by_slots.setdefault(args.slots or (FEW_SLOTS if case[0] <= FEW_SLOTS else MANY_SLOTS), []).append(case)
    servers = [(model, slots) for model in args.models for slots in by_slots]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        wait_for_all(pool, workers)
        for number, (model, slots) in enumerate(servers):
            ends, left = begin + seconds * (number + 1) / len(servers), list(by_slots[slots])
            vocab_size = shape_of(model, 8, args.device).vocab_size
            try:
                with server(model, [*given, "--slots", str(slots), "--context", str(context)]) as told:
                    port = told.pop("port")
                    while left and time.monotonic() < ends:
                        clients, prompt, answer = left.pop(0)
                        requests = args.requests or (2 if answer >= LONG_ANSWER else 4)
                        load = Load(clients, requests, prompt, args.shared, answer)
                        share = (ends - time.monotonic()) / (1 + len(left))  # no case takes the time of the next ones
                        row = measure(pool, workers, port, load, vocab_size, share, counts=model != "canned")
                        record["cases"].append({"model": model, "slots": slots} | told | row)
                        save(record, path)
                        first = row["first_token"]["p50"]
                        said = f"{row['tokens_per_second']:10,.0f} tokens/s, first token {first or 0:.3f} s, "
                        said += f"{row['failed']} failed, {row['cut_off']} cut off"
                        spent = time.monotonic() - begin
                        case = f"{clients}x{prompt}x{answer}"
                        print(f"{spent:6.0f} s  {model:12} {case:14} {said}", file=sys.stderr, flush=True)
                reason = "the time was over"
            except (RuntimeError, OSError) as error:  # one model's server fails: the others are measured all the same
                reason = f"{type(error).__name__}: {error}"[:300]
                print(reason, file=sys.stderr, flush=True)
            record["left_out"] += [{"model": model, "case": case, "reason": reason} for case in left]
    finish(record, path)
    if not record["cases"]:
        raise SystemExit("nothing was measured; the messages above say why")


if __name__ == "__main__":
    main()
