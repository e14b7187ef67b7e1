"""Training steps of the paper's language models: tokens a second and memory as T grows, and where the time goes.

    PYTHONPATH=src python benchmarks/lm.py --minutes 9        the most telling lengths first, until the time is over
    PYTHONPATH=src python benchmarks/lm.py --lengths 4096 --models attention paper-text
    PYTHONPATH=src python benchmarks/lm.py --profile --lengths 4096 --models paper-text

A step is what `rebased lm train` does in one (train/lm/step.py), fed from the host: forward, backward, clipping and
AdamW, bf16 products and fp32 weights, 32,768 tokens (T where T is longer), compiled block by block unless --compile
says otherwise. Learned positions are as many as T. Each case is compiled and warmed up, then timed. `attention` takes
the kernel that torch chooses, `attention-cudnn` cuDNN's. `plain` is a model of torch's own layers, compiled whole and
without clipping, and `plain+...` has one part of ours (plain_lm.py).

Writes lm-<date>-<device>.json, after each case anew, and draws the same numbers beside it.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.lm_report import draw, profile_table, ratios, speed_table
from benchmarks.machine import machine
from benchmarks.plain_lm import PARTS, plain_step

from rebased.data import TextBatch
from rebased.files import replacing
from rebased.models import LanguageModel, LMConfig, preset
from rebased.ops.backend import has_gpu
from rebased.runs.lm_config import LMTrainConfig
from rebased.train.cuda_graph import own_stream
from rebased.train.lm.flops import flops_per_token, peak_flops
from rebased.train.lm.step import LMStep
from rebased.train.world import World

TOKENS = 32_768
LENGTHS = (4096, 16_384, 65_536, 1024, 8192, 2048, 32_768)  # the ones with a target first
WARM_UP, ROUNDS = 5, 5  # a step is captured the fourth time
KERNELS = {  # what a kernel is for, by a part of its name; the first that fits counts
    "norms, GELU, casts (compiled)": ("triton_",),
    "polynomial attention, backward": ("query_grad", "key_grad"),
    "polynomial attention, states": ("chunk_sums", "running_totals"),
    "attention forward, convolution, norm (ours)": ("forward_kernel", "backward_kernel"),  # one name in several files
    "cross-entropy": ("cross_entropy",),
    "softmax attention": ("flash", "fmha", "cudnn", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "mm_"),
    "AdamW and clipping": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "embedding": ("embedding", "chunks_kernel", "totals_kernel", "index", "sort", "radix", "scatter", "gather"),
    "copies and fills": ("memcpy", "memset", "fill"),
    "element-wise (eager)": ("elementwise", "layer_norm", "reduce"),
}


class Model(NamedTuple):
    preset: str
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


MODELS = {
    "attention": Model("lm-attention"),
    "paper-text": Model("lm-paper-text-rebased"),
    "based": Model("lm-paper-text-based"),
    "attention-cudnn": Model("lm-attention", partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
    "paper-checkpoint": Model("lm-paper-checkpoint-rebased"),
    "plain": Model("lm-attention"),
} | {f"plain+{part}": Model("lm-attention") for part in PARTS}


class Case(NamedTuple):
    model: str
    T: int
    tokens: int
    compile: str
    device: str
    capture: bool = False

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.T)


def shape_of(case: Case) -> LMConfig:
    name = MODELS[case.model].preset
    if case.device == "cpu":  # for the test of this file: the same steps at a small size
        return preset(name, d_model=48, vocab_size=64, max_len=case.T).model_copy(update={"n_layers": 2})
    return preset(name, max_len=case.T)


def ready_step(case: Case) -> Callable[[], None]:
    """A model, its optimiser and a batch in the host's memory; each call is one step of training."""
    torch.manual_seed(0)
    shape, device = shape_of(case), torch.device(case.device)
    name, *parts = case.model.split("+")
    if name == "plain":
        return plain_step(shape, case.batch, case.T, case.device, set(parts))
    settings: dict[str, Any] = {"compile": case.compile, "device": case.device, "capture": case.capture}
    train = LMTrainConfig(batch_size=case.batch, **settings)
    with torch.device(device):  # to draw weights on the host would take longer than all else
        model = LanguageModel(shape)
    step = LMStep(model, train, World(0, 1, device))
    tokens = torch.randint(shape.vocab_size, (case.batch, case.T))
    parts = [TextBatch(tokens, tokens.roll(-1, 1), None)]
    done = 0

    def run() -> None:
        nonlocal done
        step(parts, done)
        done += 1

    return run


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], None], times: int, device: str) -> float:
    """Of one run among several in a row, the last of which is waited for."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronise(device)
    return (time.perf_counter() - start) / times


@contextmanager
def warm(case: Case) -> Iterator[Callable[[], None]]:
    """A step that is compiled and has run, as often as one likes."""
    torch._dynamo.reset()  # a length that was compiled before would make the next one dynamic
    with MODELS[case.model].context(), own_stream(torch.device(case.device)):
        run = ready_step(case)
        seconds_of(run, WARM_UP, case.device)
        yield run


def measure(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"model": case.model, "T": case.T, "batch": case.batch, "compile": case.compile}
    row["capture"] = case.capture
    start = time.perf_counter()
    try:
        with warm(case) as run:
            row["warm_up_seconds"] = time.perf_counter() - start
            if case.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            once = seconds_of(run, 1, case.device)
            times = max(1, min(10, round(0.5 / once))) if case.device == "cuda" else 1
            row["seconds"] = statistics.median(seconds_of(run, times, case.device) for _ in range(ROUNDS))
            row["peak_bytes"] = torch.cuda.max_memory_allocated() if case.device == "cuda" else None
    except torch.OutOfMemoryError:
        return row | {"failed": "out of memory"}
    row["tokens_per_second"] = case.batch * case.T / row["seconds"]
    row["flops_per_token"] = flops_per_token(shape_of(case), case.T)
    name = torch.cuda.get_device_name() if case.device == "cuda" else None
    peak = peak_flops(name, "bf16")
    row["mfu"] = row["tokens_per_second"] * row["flops_per_token"] / peak if peak else None
    return row


def profile_of(case: Case, steps: int = 3) -> dict[str, Any]:
    """Milliseconds per step by kernel and by what kernels are for; `idle` is when the device waits for the host."""
    from torch.profiler import ProfilerActivity, profile

    on_device = case.device == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_device else [])
    with warm(case) as run, profile(activities=activities) as trace:
        wall = 1e3 * seconds_of(run, steps, case.device)
    kernels: dict[str, dict[str, float]] = {}
    operators: dict[str, float] = {}  # of ours, with all their kernels: tells apart what has one name
    for event in trace.key_averages():
        if event.key.startswith("rebased::"):
            operators[event.key] = (event.device_time_total if on_device else event.cpu_time_total) / 1e3 / steps
        if on_device and str(event.device_type) != "DeviceType.CUDA":
            continue  # an operator of the host: its kernels are counted by themselves
        ms = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3 / steps
        if ms > 0:
            kernels[event.key] = {"ms": ms, "calls": event.count / steps}
    ranked = dict(sorted(kernels.items(), key=lambda item: -item[1]["ms"]))
    groups: dict[str, float] = {}
    for name, cost in ranked.items():
        groups[purpose_of(name)] = groups.get(purpose_of(name), 0.0) + cost["ms"]
    busy = sum(groups.values())
    groups["idle"] = max(0.0, wall - busy)
    top = {name[:120]: ranked[name] for name in list(ranked)[:40]}
    return {"wall_ms": wall, "groups": _ranked(groups), "operators": _ranked(operators), "kernels": top}


def _ranked(costs: dict[str, float]) -> dict[str, float]:
    return dict(sorted(costs.items(), key=lambda item: -item[1]))


def purpose_of(kernel: str) -> str:
    name = kernel.lower()
    return next((group for group, parts in KERNELS.items() if any(part in name for part in parts)), "other")


def let_go(device: str) -> None:
    """Of what a case has left in memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def save(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:5])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a step")
    parser.add_argument("--compile", choices=("none", "blocks", "model"), default="blocks")
    parser.add_argument("--capture", action="store_true", help="replay each step as a CUDA graph")
    parser.add_argument("--profile", action="store_true", help="also say where the time of a step goes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further case after so many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if args.device == "cuda" and not has_gpu():
        raise SystemExit("no CUDA device here; --device cpu goes through the same steps at a small size")
    start, now = time.monotonic(), datetime.now(UTC)
    spoken = [word for word in (sys.argv[1:] if words is None else words) if word not in ("--out", str(args.out))]
    about = machine(args.device, "triton", "flash-linear-attention")
    record: dict[str, Any] = {
        "what": "one training step of the paper's language models: seconds, bytes at its peak, tokens a second",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/lm.py", *spoken]),
        "machine": about,
        "tokens": args.tokens,
        "steps": [],
        "left_out": [],
    }
    device = "cpu" if args.device == "cpu" else about["device"].lower().removeprefix("nvidia").strip().replace(" ", "-")
    path = args.out / f"lm-{now:%Y-%m-%d-%H%M%S}-{device}.json"
    # The first two models at every length, then the others: what matters most is there when the time is over.
    pairs = [(T, model) for group in (args.models[:2], args.models[2:]) for T in args.lengths for model in group]
    for T, model in pairs:
        if time.monotonic() - start > 60 * args.minutes:
            record["left_out"].append({"model": model, "T": T, "reason": "the time was over"})
            continue
        row = measure(Case(model, T, args.tokens, args.compile, args.device, args.capture))
        record["steps"].append(row)
        save(record, path)
        say(row, time.monotonic() - start)
        let_go(args.device)
    for row in record["steps"] if args.profile else ():  # at the end, so that no time has a profiler behind it
        if "failed" not in row and time.monotonic() - start <= 60 * args.minutes:
            row["profile"] = profile_of(
                Case(row["model"], row["T"], args.tokens, args.compile, args.device, args.capture)
            )
            save(record, path)
            let_go(args.device)
    record["ratios"] = ratios(record["steps"])
    save(record, path)
    draw(record, path.with_suffix(".svg"))
    speed_table(record)
    for row in record["steps"]:
        if "profile" in row:
            profile_table(row)
    return path


def say(row: dict[str, Any], elapsed: float) -> None:
    if "failed" in row:
        text = row["failed"]
    else:
        mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
        memory = "" if row["peak_bytes"] is None else f"  {row['peak_bytes'] / 2**30:.1f} GiB"
        text = f"{row['seconds'] * 1e3:9.2f} ms  {row['tokens_per_second']:11,.0f} tokens/s{mfu}{memory}"
        text += f"  (ready in {row['warm_up_seconds']:.0f} s)"
    print(f"{elapsed:6.0f} s  {row['model']:16} T {row['T']:6,}  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
