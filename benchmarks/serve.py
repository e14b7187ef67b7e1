"""Requests per second and latencies of `rebased lm serve`'s server, over ReBased and over softmax attention.

    PYTHONPATH=src python benchmarks/serve.py --minutes 8          on a GPU; needs rebased[serve] and httpx
    PYTHONPATH=src python benchmarks/serve.py --clients 64 --prompt-tokens 4096
    PYTHONPATH=src python benchmarks/serve.py --tiny               the same at a small size, on a CPU
    PYTHONPATH=src python benchmarks/serve.py --plot benchmarks/results/serve-....json      on any machine

For each model a server is started in a process of its own, with random weights of the paper's language models, and
asked by `clients` clients at a time: streams over HTTP, prompts of random tokens (no two alike, but for the first
`--shared` tokens), greedy, exactly --max-tokens tokens each. Latency is from the request to its last chunk, first token
from the request to the first chunk with text. The clients are spread over some processes; --requests is per client.

Writes serve-<date>-<device>.json, after each case anew, the plot beside it, and prints a table. It never takes longer
than --minutes: models share them, and requests that are under way when a model's time is over are cut off.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.files import replacing
from rebased.models import LanguageModel, LMConfig, preset
from rebased.ops.backend import has_gpu

MODELS = {
    "attention": "lm-attention",
    "paper-text": "lm-paper-text-rebased",
    "based": "lm-paper-text-based",
}
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


def shape_of(model: str, context: int, device: str) -> LMConfig:
    if device == "cpu":  # for the test of this file: the same at a small size
        small = preset(MODELS[model], d_model=48, vocab_size=64, max_len=context)
        return small.model_copy(update={"n_layers": 2})
    return preset(MODELS[model], max_len=context)


def be_server(args: argparse.Namespace) -> None:
    """The other process: serve one model of random weights on a free port, which the first line of stdout tells."""
    from rebased.serve.api import build_app
    from rebased.serve.engine import Engine
    from rebased.serve.server import open_socket, serve
    from rebased.serve.service import Limits, Service

    torch.manual_seed(0)
    device, context = torch.device(args.device), args.prompt_tokens + args.max_tokens
    shape = shape_of(args.server, context, args.device)
    with torch.device(device):
        model = LanguageModel(shape).to(DTYPES[args.precision]).eval()
    engine = Engine(
        model,
        Words(shape.vocab_size),  # type: ignore[arg-type]
        slots=args.slots,
        context=context,
        max_waiting=100_000,
        prefill_chunk=args.prefill_chunk,
        cache_bytes=args.cache_mb * 2**20,
        capture=device.type == "cuda" and args.capture,
    )
    engine.warm_up()
    about = {"parameters": model.num_parameters(), "state_bytes": engine.decoder.state_bytes}
    about |= {"fusion": engine.decoder.fusion, "captured": engine.captures}
    app = build_app(Service(args.server, engine, Limits(max_tokens=args.max_tokens, seconds=3600)))
    with open_socket("127.0.0.1", 0) as sock:
        about["port"] = sock.getsockname()[1]
        with closing(engine):
            serve(app, sock, on_ready=lambda: print(json.dumps(about), flush=True), on_signal=engine.drain)


@contextmanager
def server(model: str, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A server of this model in a process of its own; yields what it tells about itself."""
    command = [sys.executable, __file__, "--server", model, *words]
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
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


async def ask(client: Any, prompt: list[int], max_tokens: int) -> tuple[float, float, int]:
    """One request. Returns (seconds to the first text, seconds to the end, tokens)."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begin
                if '"completion_tokens"' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return first, time.perf_counter() - begin, tokens


class Played(NamedTuple):
    """What some clients saw."""

    results: list[tuple[float, float, int]]  # as `ask` returns them
    failures: list[str]
    cut_off: int
    begin: float  # on the clock of all processes
    end: float


async def play(url: str, load: Load, seeds: Sequence[int], vocab_size: int, seconds: float) -> Played:
    """Let one client per seed ask, each one request after the other, until the time is over."""
    import httpx

    shared = random.Random(load.clients).choices(range(vocab_size), k=load.shared)
    results: list[tuple[float, float, int]] = []
    failures: list[str] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:

        async def one(prompts: list[list[int]]) -> None:
            for prompt in prompts:
                try:
                    results.append(await ask(client, prompt, load.max_tokens))
                except (httpx.HTTPError, RuntimeError) as error:
                    failures.append(f"{type(error).__name__}: {error}"[:300])

        rest = load.prompt_tokens - load.shared
        drawn = [
            [shared + own.choices(range(vocab_size), k=rest) for _ in range(load.requests)]
            for own in map(random.Random, seeds)
        ]
        begin = time.time()
        asking = [asyncio.ensure_future(one(prompts)) for prompts in drawn]
        _, cut = await asyncio.wait(asking, timeout=max(0.0, seconds))
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
    return Played(results, failures, len(cut), begin, time.time())


def play_share(url: str, load: Load, seeds: Sequence[int], vocab_size: int, seconds: float) -> Played:
    return asyncio.run(play(url, load, seeds, vocab_size, seconds))


def process_id(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def wait_for_all(pool: ProcessPoolExecutor, workers: int) -> None:
    """Return when all processes of the pool have started: each imports torch first, which takes seconds."""
    while len(set(pool.map(process_id, range(2 * workers)))) < workers:
        pass


def measure(
    pool: ProcessPoolExecutor, workers: int, url: str, load: Load, vocab_size: int, seconds_left: float
) -> dict[str, Any]:
    """Let all clients ask, spread over the processes of the pool: one process could not read what a server writes."""
    end = time.monotonic() + seconds_left

    def ask_all(load: Load, first_seed: int) -> Played:
        seeds = range(first_seed, first_seed + load.clients)
        left, parts = end - time.monotonic(), min(workers, load.clients)
        shares = [pool.submit(play_share, url, load, seeds[part::parts], vocab_size, left) for part in range(parts)]
        played = [share.result() for share in shares]
        return Played(
            [result for each in played for result in each.results],
            [failure for each in played for failure in each.failures],
            sum(each.cut_off for each in played),
            min(each.begin for each in played),
            max(each.end for each in played),
        )

    ask_all(load._replace(requests=1), first_seed=10**6)  # kernels are compiled for the shapes that come
    results, failures, cut_off, begin, over = ask_all(load, first_seed=0)
    seconds, made = over - begin, sum(tokens for _, _, tokens in results)
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
        numbers = (f"{row['clients']:,}", f"{row['requests_per_second']:,.2f}", f"{row['tokens_per_second']:,.0f}")
        table.add_row(row["model"], *numbers, latency, first, str(row["failed"]), str(row.get("cut_off", 0)))
    Console(width=120).print(table)


def draw(record: dict[str, Any], path: Path) -> None:
    """Requests per second and latencies against the number of clients, a line per model."""
    import matplotlib

    matplotlib.use("Agg")
    from benchmarks.axes import logarithmic
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    rows = [row for row in record["cases"] if row["answered"]]
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        own = sorted((row for row in rows if row["model"] == model), key=lambda row: row["clients"])
        clients, colour = [row["clients"] for row in own], f"C{number}"
        axes[0].plot(clients, [row["requests_per_second"] for row in own], marker="o", color=colour, label=model)
        for p, style in (("p50", "-"), ("p99", "--")):
            latency = [row["latency"][p] for row in own]
            axes[1].plot(clients, latency, style, marker="o", color=colour, label=f"{model}, {p}")
    for axis, name in zip(axes, ("requests per second", "seconds per request"), strict=True):
        logarithmic(axis)
        axis.set(xlabel="clients at once", ylabel=name)
        axis.grid(True, which="both", alpha=0.25)
        if rows:
            axis.legend(fontsize="small")
    figure.suptitle(f"A server asked by several clients, {record['machine']['device']}")
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
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["paper-text", "attention"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64, 200], metavar="N")
    parser.add_argument("--requests", type=int, default=3, help="per client")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prefill-chunk", type=int, default=4096)
    parser.add_argument("--cache-mb", type=int, default=256)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--capture", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="it ends after so many, whatever is left")
    parser.add_argument("--tiny", action="store_true", help="a CPU, few clients and short prompts")
    parser.add_argument("--plot", type=Path, metavar="RECORD", help="only show and draw a record, as RECORD.svg")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--server", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.plot is not None:
        record = json.loads(args.plot.read_text())
        draw(record, args.plot.with_suffix(".svg"))
        return show(record)
    if args.tiny:
        args.device, args.precision, args.clients, args.requests = "cpu", "fp32", [1, 4], 2
        args.prompt_tokens, args.max_tokens, args.slots = 20, 5, 2
    if args.device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --tiny goes through the same steps at a small size")
    if args.server is not None:
        return be_server(args)
    if not 0 <= args.shared < args.prompt_tokens:
        raise SystemExit(f"--shared {args.shared}: give fewer than --prompt-tokens {args.prompt_tokens}")
    given = list(sys.argv[1:] if words is None else words)
    spoken = [word for word in given if word not in ("--out", str(args.out))]
    begin, now = time.monotonic(), datetime.now(UTC)
    about = machine(args.device, "fastapi", "uvicorn", "sse-starlette", "httpx", "triton")
    record = {
        "what": "a server of language models asked by several clients at once: requests per second and latencies",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/serve.py", *spoken]),
        "machine": about,
        "slots": args.slots,
        "precision": args.precision,
        "capture": args.capture and args.device == "cuda",
        "cases": [],
        "left_out": [],
    }
    device = "cpu" if args.device == "cpu" else about["device"].lower().removeprefix("nvidia").strip().replace(" ", "-")
    path = args.out / f"serve-{now:%Y-%m-%d-%H%M%S}-{device}.json"
    end_in_time(record, path, args.minutes)
    seconds = min(60 * args.minutes - ENDING, A_DAY)
    workers = 2 if args.tiny else min(PROCESSES, max(args.clients))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        wait_for_all(pool, workers)
        for number, model in enumerate(args.models):
            ends, left = begin + seconds * (number + 1) / len(args.models), list(args.clients)
            vocab_size = shape_of(model, 8, args.device).vocab_size
            try:
                with server(model, given) as told:
                    url = f"http://127.0.0.1:{told.pop('port')}"
                    while left and time.monotonic() < ends:
                        load = Load(left.pop(0), args.requests, args.prompt_tokens, args.shared, args.max_tokens)
                        share = (ends - time.monotonic()) / (1 + len(left))  # no case takes the time of the next ones
                        row = measure(pool, workers, url, load, vocab_size, share)
                        record["cases"].append({"model": model} | told | row)
                        save(record, path)
                        said = f"{row['requests_per_second']:.2f} requests/s, {row['tokens_per_second']:,.0f} tokens/s"
                        spent = time.monotonic() - begin
                        print(
                            f"{spent:6.0f} s  {model:12} {load.clients:4} clients  {said}", file=sys.stderr, flush=True
                        )
                reason = "the time was over"
            except (RuntimeError, OSError) as error:  # one model's server fails: the other is measured all the same
                reason = f"{type(error).__name__}: {error}"[:300]
                print(reason, file=sys.stderr, flush=True)
            record["left_out"] += [{"model": model, "clients": clients, "reason": reason} for clients in left]
    finish(record, path)
    if not record["cases"]:
        raise SystemExit("nothing was measured; the messages above say why")


if __name__ == "__main__":
    main()
