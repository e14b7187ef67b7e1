"""Decoding: milliseconds per step by batch and context, time to the first token, reading many prompts, and memory.

    PYTHONPATH=src python benchmarks/generate.py --minutes 8      all cases, the most telling first
    PYTHONPATH=src python benchmarks/generate.py --models paper-text --variants fused graph --batches 1 64
    PYTHONPATH=src python benchmarks/generate.py --tiny           the same steps at a small size, on a CPU
    PYTHONPATH=src python benchmarks/generate.py --plot benchmarks/results/generate-....json      on any machine

`paper-text` is ReBased with the paper's 12 heads of 16 (145 million parameters), `attention` the softmax model with 12
layers (127 million), both with bf16 weights. A step is Decoder.step (models/decoder.py): one token for every slot,
chosen on the device. Its variants:

- `fused`: our kernels (models/fused_step.py), replayed as a CUDA graph;
- `fused-torch`: the same with all products of more than one row by torch;
- `graph`: the model's own operations, replayed as a CUDA graph;
- `compiled`: these compiled by torch.compile, replayed as a CUDA graph;
- `eager`: the model's own operations, launched one by one.

Attention has a static KV cache of `context` tokens, which are all there: `attention` masks it per row, as a ragged
batch needs; `attention-full` reads it without a mask, which lets torch take its fastest kernel and is right only if all
rows are equally long. ReBased's state does not depend on the context: it is measured at the shortest one.

The time to the first token is that of reading a prompt of --first tokens, one sequence, and one step. Attention reads
it in one piece, where it is fastest; ReBased in chunks, as `generate` does, and in one piece.

Writes generate-<date>-<device>.json, after each case anew, and the plot beside it. It never takes longer than
--minutes: a case that is under way then is left out.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.generate_report import draw, say, show
from benchmarks.machine import machine

from rebased.files import replacing
from rebased.mixers.attention import FusedKVSlots
from rebased.models import Decoder, LanguageModel, LMState, Sampling, preset
from rebased.models.decoder import PREFILL_CHUNK
from rebased.ops.backend import has_gpu

MODELS = {
    "paper-text": "lm-paper-text-rebased",
    "attention": "lm-attention",
    "attention-full": "lm-attention",
    "based": "lm-paper-text-based",
}
BATCHES, CONTEXTS, FIRST = (1, 64, 1024, 256, 16), (4096, 32_768), 32_768
VARIANTS = {"fused": "kernels", "fused-torch": "kernels", "graph": "none", "compiled": "compile", "eager": "none"}
FULL_BATCHES = (1, 64)  # of attention at contexts beyond the first, where more rarely fit
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "draw": Sampling(),
    "filter": Sampling(temperature=0.8, top_k=50, top_p=0.95),
}
STEPS, ROUNDS, WARM_UP, SPARE = 20, 5, 5, 3  # SPARE: steps that are left for a profile
ENDING = 15.0  # seconds before the end in which no case is begun


class Case(NamedTuple):
    model: str
    variant: str
    batch: int
    context: int
    sampling: str
    device: str


class FullSlots(FusedKVSlots):
    """KV caches in which every row has read the same number of tokens: attention needs no mask."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int) -> Tensor:
        self.k[self._rows, :, lengths], self.v[self._rows, :, lengths] = k[:, :, 0], v[:, :, 0]
        return functional.scaled_dot_product_attention(q, self.k[:, :, :longest], self.v[:, :, :longest])


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
    begin = max(0, case.context - WARM_UP - rounds * STEPS - SPARE)
    fill(decoder, begin, SAMPLINGS[case.sampling])
    milliseconds(decoder.step, WARM_UP, case.device)  # compiled, and captured
    steps = min(STEPS, (case.context - begin - WARM_UP - SPARE) // rounds)
    return statistics.median(milliseconds(decoder.step, steps, case.device) for _ in range(rounds))


def make_decoder(model: LanguageModel, case: Case) -> Decoder:
    capture = case.device == "cuda" and case.variant != "eager"
    fusion: Any = VARIANTS[case.variant]
    decoder = Decoder(model, case.batch, capacity=case.context, grows=False, capture=capture, fusion=fusion)
    if case.model == "attention-full":
        decoder.layers = [FullSlots(layer._mixer, layer.k, layer.v) for layer in decoder.layers]  # type: ignore[attr-defined]
    return decoder


def multiply_rows(case: Case) -> None:
    """Let our kernels multiply as many rows as they do, or one, as the variant says."""
    if case.device == "cuda":
        from rebased.ops.decoding.gpu import convolution, linear

        for module in (convolution, linear):
            usual = MAX_ROWS.setdefault(module.__name__, module.MAX_ROWS)
            module.MAX_ROWS = 1 if case.variant == "fused-torch" else usual


MAX_ROWS: dict[str, int] = {}


@torch.no_grad()
def measure(case: Case, profiled: bool) -> dict[str, Any]:
    row: dict[str, Any] = {key: value for key, value in case._asdict().items() if key != "device"}
    multiply_rows(case)
    model = build(case.model, case.context, case.device)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    decoder = make_decoder(model, case)
    row["state_bytes"] = decoder.state_bytes
    row["state_bytes_per_sequence"] = decoder.state_bytes // case.batch
    row["ms"] = time_steps(decoder, case, ROUNDS if case.variant != "eager" else 2)
    row["peak_bytes"] = torch.cuda.max_memory_allocated() if case.device == "cuda" else None
    row["tokens_per_second"] = 1e3 * case.batch / row["ms"]
    if profiled:
        row["profile"] = profile(decoder, case.device)
    return row


def profile(decoder: Decoder, device: str) -> list[tuple[str, float, float]]:
    """(kernel, microseconds per step, calls per step) of a few steps, the costliest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record_activity

    activity, steps = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU, 3
    with record_activity(activities=[activity]) as found:
        milliseconds(decoder.step, steps, device)
    rows = []
    for event in found.key_averages():
        spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        rows.append((event.key[:80], round(spent / steps, 2), round(event.count / steps, 1)))
    rows = sorted(rows, key=lambda row: -row[1])[:20]
    for name, spent, calls in rows:
        print(f"          {spent:9.2f} us {calls:6.1f} calls  {name}", file=sys.stderr)
    return rows


@torch.no_grad()
def measure_first(name: str, length: int, chunk: int, device: str) -> dict[str, Any]:
    """Seconds from a prompt of `length` tokens, read in chunks, to its first token: the median of three."""
    model = build(name, length, device)
    prompt = torch.randint(model.config.vocab_size, (length,)).tolist()
    decoder = Decoder(model, 1, capacity=length, grows=False)

    def run() -> None:
        *_, state = decoder.prefill_chunks(prompt[:-1], chunk=chunk)
        decoder.put(0, prompt, state, SAMPLINGS["greedy"])
        decoder.step().tokens.tolist()
        decoder.free(0)

    run()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(milliseconds(run, 1, device) for _ in range(3)) / 1e3
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"model": name, "prompt": length, "chunk": chunk, "seconds": seconds, "peak_bytes": peak}


@torch.no_grad()
def measure_prompts(name: str, count: int, longest: int, device: str) -> dict[str, Any]:
    """Seconds to read `count` prompts of different lengths: one by one, and together in as few passes as may be."""
    model = build(name, longest, device)
    lengths = [max(1, longest // 4 + (n * 7919) % (3 * longest // 4)) for n in range(count)]
    prompts = [torch.randint(model.config.vocab_size, (length,)).tolist() for length in lengths]
    decoder = Decoder(model, 1, capacity=longest)
    passes: list[list[list[int]]] = [[]]
    for prompt in prompts:
        if sum(map(len, passes[-1])) + len(prompt) > decoder.prefill_chunk:
            passes.append([])
        passes[-1].append(prompt)

    def one_by_one() -> None:
        for prompt in prompts:
            decoder.prefill(prompt)

    def together() -> None:
        for some in passes:
            model.extend_documents(some, [model.init_state(1) for _ in some])

    row: dict[str, Any] = {"model": name, "prompts": count, "shortest": min(lengths), "longest": max(lengths)}
    row |= {"tokens": sum(lengths)}
    for run in (one_by_one, together):
        run()
        row[run.__name__] = statistics.median(milliseconds(run, 1, device) for _ in range(3)) / 1e3
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
    """All cases, the most telling first: the first variant of all models, then the others.

    ReBased and Based are measured at the first context only; `fused-torch` only where it may differ.
    """
    cases = []
    for variant in args.variants:
        for context in args.contexts:
            for batch in args.batches:
                for model in args.models:
                    is_peer = model.startswith("attention")
                    if not is_peer and context != args.contexts[0]:
                        continue
                    if is_peer and context != args.contexts[0] and batch not in FULL_BATCHES and args.device == "cuda":
                        continue
                    if variant == "fused-torch" and (is_peer or batch == 1):
                        continue
                    if model == "attention-full" and variant != args.variants[0]:
                        continue
                    if variant == "compiled" and (is_peer or batch != 64):  # a compilation takes a minute
                        continue
                    cases += [Case(model, variant, batch, context, each, args.device) for each in args.sampling]
    return cases


class Run:
    """The record of a run, saved after each case, and its deadline: then it is saved, shown, and the process ends."""

    def __init__(self, record: dict[str, Any], path: Path, minutes: float) -> None:
        self.record, self.path, self.begin = record, path, time.monotonic()
        self.end, self._lock = self.begin + 60 * minutes, threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        if minutes != float("inf"):
            timer = threading.Timer(60 * minutes, self._stop)
            timer.daemon = True
            timer.start()

    def work(self, cases: list[tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]], device: str) -> None:
        """Measure all cases. What goes wrong in one, such as too little memory, is its result."""
        self._waiting = [what for _, _, what in cases]
        for kind, measure_case, what in cases:
            if time.monotonic() > self.end - ENDING:
                break
            try:
                row = measure_case()
            except torch.OutOfMemoryError:
                row = what | {"failed": "out of memory"}
            except Exception as error:
                row = what | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            with self._lock:
                self._waiting.pop(0)
                self.record[kind].append(row)
                self._save()
            print(f"{time.monotonic() - self.begin:6.0f} s  {say(row)}", file=sys.stderr, flush=True)
            let_go(device)
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        self.record["left_out"] = [what | {"reason": "the time was over"} for what in self._waiting]
        self._save()
        draw(self.record, self.path.with_suffix(".svg"))
        show(self.record)

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(json.dumps(self.record, indent=1).encode() + b"\n")

    def _stop(self) -> None:
        with self._lock:
            self._finish()
            sys.stdout.flush()
            os._exit(0)  # a case is under way, and only the process can be ended


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["paper-text", "attention", "attention-full"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="B")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="T")
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=["greedy"])
    parser.add_argument("--first", type=int, default=FIRST, help="tokens of the prompt for the time to the first token")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="it ends after so many, whatever is left")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", action="store_true", help="also say which kernels a step takes its time for")
    parser.add_argument("--tiny", action="store_true", help="a CPU, small batches and short contexts")
    parser.add_argument("--plot", type=Path, metavar="RECORD", help="only show and draw a record, as RECORD.svg")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if args.tiny:
        args.device, args.batches, args.contexts, args.first = "cpu", [1, 64], [32, 48], 24
        args.variants = [variant for variant in args.variants if variant != "compiled"]
    if args.plot is None and args.device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --tiny goes through the same steps at a small size")
    if min(args.contexts) < 16:
        raise SystemExit("a context has at least 16 tokens")
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    if args.plot is not None:
        record = json.loads(args.plot.read_text())
        draw(record, args.plot.with_suffix(".svg"))
        return show(record)
    now = datetime.now(UTC)
    spoken = [word for word in (sys.argv[1:] if words is None else words) if word not in ("--out", str(args.out))]
    about = machine(args.device, "triton")
    record = {
        "what": "decoding: milliseconds per step by batch and context; seconds to the first token; bytes",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/generate.py", *spoken]),
        "machine": about,
        "first": [],
        "prompts": [],
        "steps": [],
        "left_out": [],
    }
    device = "cpu" if args.device == "cpu" else about["device"].lower().removeprefix("nvidia").strip().replace(" ", "-")
    run = Run(record, args.out / f"generate-{now:%Y-%m-%d-%H%M%S}-{device}.json", args.minutes)
    cases: list[tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = []
    for case in list_cases(args):
        what = {key: value for key, value in case._asdict().items() if key != "device"}
        cases.append(("steps", lambda case=case: measure(case, args.profile), what))  # type: ignore[misc]
    firsts: list[Any] = []
    for model in dict.fromkeys(name.removesuffix("-full") for name in args.models):
        for chunk in {args.first: None} if model == "attention" else {PREFILL_CHUNK: None, args.first: None}:
            what = {"model": model, "prompt": args.first, "chunk": chunk}
            sizes = (args.first, chunk, args.device)
            firsts.append(("first", lambda model=model, sizes=sizes: measure_first(model, *sizes), what))
        count, longest = (3, 16) if args.device == "cpu" else (64, 512)
        what = {"model": model, "prompts": count, "shortest": 1, "longest": longest}
        read_many = lambda model=model, some=(count, longest): measure_prompts(model, *some, args.device)  # noqa: E731
        firsts.append(("prompts", read_many, what))
    of_first_variant = sum(what["variant"] == args.variants[0] for _, _, what in cases)
    run.work([*cases[:of_first_variant], *firsts, *cases[of_first_variant:]], args.device)


if __name__ == "__main__":
    main()
