"""Decoding: milliseconds per step by batch and context, time to the first token, and memory.

    PYTHONPATH=src python benchmarks/generate.py --minutes 9      all cases, the most telling first
    PYTHONPATH=src python benchmarks/generate.py --models paper-text attention --batches 1 64 --contexts 4096
    PYTHONPATH=src python benchmarks/generate.py --device cpu --batches 1 2 --contexts 16 --first 32    a tiny form

`paper-text` is ReBased with the paper's 12 heads of 16 (145 million parameters), `attention` the softmax model with 12
layers (127 million), both with bf16 weights. A step is Decoder.step (models/decoder.py): one token for every slot,
chosen on the device, replayed as a CUDA graph; `eager` is the same step launched kernel by kernel. Attention has a
static KV cache of `context` tokens, which are all there: `attention` masks it per row, as a ragged batch needs;
`attention-full` reads it without a mask, which lets torch take its fastest kernel and is right only if all rows are
equally long. ReBased's state does not depend on the context: it is measured at the shortest one.

The time to the first token is that of reading a prompt of --first tokens, one sequence, and one step.

Writes generate-<date>-<device>.json, after each case anew.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.files import replacing
from rebased.mixers.attention import KVSlots
from rebased.models import Decoder, LanguageModel, LMState, Sampling, preset
from rebased.ops.backend import has_gpu

MODELS = {
    "paper-text": "lm-paper-text-rebased",
    "attention": "lm-attention",
    "attention-full": "lm-attention",
    "based": "lm-paper-text-based",
}
BATCHES, CONTEXTS, FIRST = (1, 64, 256, 1024), (4096, 32_768), 32_768
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "draw": Sampling(),
    "filter": Sampling(temperature=0.8, top_k=50, top_p=0.95),
}
STEPS, ROUNDS, WARM_UP = 20, 5, 5


class Case(NamedTuple):
    model: str
    batch: int
    context: int
    sampling: str
    device: str


class FullSlots(KVSlots):
    """KV caches in which every row has read the same number of tokens: attention needs no mask."""

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self._mixer._project(x))
        self.k[self._rows, :, lengths], self.v[self._rows, :, lengths] = k[:, :, 0], v[:, :, 0]
        o = functional.scaled_dot_product_attention(q, self.k[:, :, :longest], self.v[:, :, :longest])
        return self._mixer.out_proj(o.transpose(1, 2).flatten(-2))


def build(model: str, length: int, device: str) -> LanguageModel:
    torch.manual_seed(0)
    config = preset(MODELS[model], max_len=length)
    if device == "cpu":  # for the test of this file: the same steps at a small size
        config = preset(MODELS[model], d_model=48, vocab_size=64, max_len=length).model_copy(update={"n_layers": 2})
        return LanguageModel(config).eval()
    with torch.device(device):
        return LanguageModel(config, dtype=torch.bfloat16).eval()


def fill(decoder: Decoder, length: int, sampling: Sampling) -> None:
    """Let every slot have read `length` tokens: with states of zeros, since only the time of a step is asked."""
    state = LMState(length, tuple(layer.get(0, length) for layer in decoder.layers))
    for slot in range(decoder.slots):
        decoder.put(slot, [0] * (length + 1), state, sampling, sequence=slot)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], Any], steps: int, device: str) -> float:
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    return 1e3 * (time.perf_counter() - start) / steps


def time_steps(decoder: Decoder, case: Case, rounds: int) -> float:
    """The median over rounds of the milliseconds per step, at a context that ends near case.context."""
    begin = max(0, case.context - WARM_UP - rounds * STEPS)
    fill(decoder, begin, SAMPLINGS[case.sampling])
    milliseconds(decoder.step, WARM_UP, case.device)  # compiled, and captured
    steps = min(STEPS, (case.context - begin - WARM_UP) // rounds)
    return statistics.median(milliseconds(decoder.step, steps, case.device) for _ in range(rounds))


def make_decoder(model: LanguageModel, case: Case, capture: bool) -> Decoder:
    decoder = Decoder(model, case.batch, capacity=case.context, grows=False, capture=capture)
    if case.model == "attention-full":
        decoder.layers = [FullSlots(layer._mixer, layer.k, layer.v) for layer in decoder.layers]  # type: ignore[attr-defined]
    return decoder


@torch.no_grad()
def measure(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {key: value for key, value in case._asdict().items() if key != "device"}
    try:
        model = build(case.model, case.context, case.device)
        if case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        decoder = make_decoder(model, case, capture=case.device == "cuda")
        row["state_bytes"] = decoder.state_bytes
        row["state_bytes_per_sequence"] = decoder.state_bytes // case.batch
        row["ms"] = time_steps(decoder, case, ROUNDS)
        row["peak_bytes"] = torch.cuda.max_memory_allocated() if case.device == "cuda" else None
        if case.device == "cuda":
            decoder._graphs = None
            row["eager_ms"] = time_steps(decoder, case, rounds=2)
    except torch.OutOfMemoryError:
        return row | {"failed": "out of memory"}
    row["tokens_per_second"] = 1e3 * case.batch / row["ms"]
    return row


@torch.no_grad()
def measure_first(name: str, length: int, device: str) -> dict[str, Any]:
    """Seconds from a prompt of `length` tokens to its first token: the median of three, after one to warm up."""
    row: dict[str, Any] = {"model": name, "prompt": length}
    try:
        model = build(name, length, device)
        prompt = torch.randint(model.config.vocab_size, (length,)).tolist()
        chunk = length if name.startswith("attention") else 4096  # attention reads a prompt fastest in one piece
        decoder = Decoder(model, 1, capacity=length, grows=False)

        def run() -> None:
            *_, state = decoder.prefill_chunks(prompt[:-1], chunk=chunk)
            decoder.put(0, prompt, state, SAMPLINGS["greedy"])
            decoder.step().tokens.tolist()
            decoder.free(0)

        run()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row["seconds"] = statistics.median(milliseconds(run, 1, device) for _ in range(3)) / 1e3
        row["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    except torch.OutOfMemoryError:
        return row | {"failed": "out of memory"}
    return row


def let_go(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def save(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")


def list_cases(args: argparse.Namespace) -> list[Case]:
    """All cases, each model at every batch before the next context. ReBased and Based only at the first context."""
    cases = []
    for context in args.contexts:
        for batch in args.batches:
            for model in args.models:
                if model.startswith("attention") or context == args.contexts[0]:
                    cases += [Case(model, batch, context, sampling, args.device) for sampling in args.sampling]
    return cases


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["paper-text", "attention", "attention-full"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="B")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="T")
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=["greedy"])
    parser.add_argument("--first", type=int, default=FIRST, help="tokens of the prompt for the time to the first token")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further case after so many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if args.device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --device cpu goes through the same steps at a small size")
    if min(args.contexts) < 16:
        raise SystemExit("a context has at least 16 tokens")
    start, now = time.monotonic(), datetime.now(UTC)
    spoken = [word for word in (sys.argv[1:] if words is None else words) if word not in ("--out", str(args.out))]
    about = machine(args.device, "triton")
    record: dict[str, Any] = {
        "what": "decoding: milliseconds per step by batch and context; seconds to the first token; bytes",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/generate.py", *spoken]),
        "machine": about,
        "first": [],
        "steps": [],
        "left_out": [],
    }
    device = "cpu" if args.device == "cpu" else about["device"].lower().removeprefix("nvidia").strip().replace(" ", "-")
    path = args.out / f"generate-{now:%Y-%m-%d-%H%M%S}-{device}.json"
    work: list[tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = []
    for model in dict.fromkeys(name.removesuffix("-full") for name in args.models):
        work.append(
            ("first", lambda model=model: measure_first(model, args.first, args.device), {"model": model})  # type: ignore[misc]
        )
    for case in list_cases(args):
        work.append(("steps", lambda case=case: measure(case), case._asdict()))  # type: ignore[misc]
    for kind, run, what in work:
        if time.monotonic() - start > 60 * args.minutes:
            record["left_out"].append(what | {"reason": "the time was over"})
            continue
        row = run()
        record[kind].append(row)
        save(record, path)
        print(f"{time.monotonic() - start:6.0f} s  {say(row)}", file=sys.stderr, flush=True)
        let_go(args.device)
    save(record, path)
    show(record)
    return path


def say(row: dict[str, Any]) -> str:
    if "prompt" in row:
        found = row.get("failed") or f"{row['seconds']:.3f} s to the first token"
        return f"{row['model']:16} prompt {row['prompt']:6,}  {found}"
    found = row.get("failed") or f"{row['ms']:8.3f} ms  {row['tokens_per_second']:11,.0f} tokens/s"
    return f"{row['model']:16} batch {row['batch']:5,}  context {row['context']:6,}  {row['sampling']:7} {found}"


def show(record: dict[str, Any]) -> None:
    """Print the tables of a record."""
    table = Table(box=SIMPLE_HEAD)
    names = ("model", "batch", "context", "sampling", "ms per step", "eager ms", "tokens/s", "state, MB", "peak, GB")
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "sampling") else "right")
    for row in record["steps"]:
        cells = [row["model"], f"{row['batch']:,}", f"{row['context']:,}", row["sampling"]]
        if "failed" in row:
            table.add_row(*cells, row["failed"])
            continue
        eager = f"{row['eager_ms']:.3f}" if "eager_ms" in row else ""
        peak = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else ""
        speed, state = f"{row['tokens_per_second']:,.0f}", f"{row['state_bytes'] / 1e6:.1f}"
        table.add_row(*cells, f"{row['ms']:.3f}", eager, speed, state, peak)
    console = Console()
    console.print(table)
    for row in record["first"]:
        console.print(say(row), highlight=False)


if __name__ == "__main__":
    main()
