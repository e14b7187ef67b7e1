"""What batch invariance costs: tokens per second of `generate`, with and without `batch_invariant`.

    PYTHONPATH=src python benchmarks/invariant.py                  a GPU if there is one, else a CPU
    PYTHONPATH=src python benchmarks/invariant.py --tiny           the same steps at a small size

Each sequence has a prompt of its own, --prompt tokens long on average, and gets --tokens greedy ones. The time is that
of reading the prompts and of all steps, the median of --rounds; both ways take turns. On a CPU the model is the one
that comes with the package. On a GPU it is `paper-text` (145 million parameters, bf16), and steps are replayed as CUDA
graphs.

Writes invariant-<date>-<device>.json.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import machine

from rebased.files import replacing
from rebased.models import LanguageModel, preset
from rebased.ops.backend import has_gpu
from rebased.runs.load import open_text_model

BATCHES = (1, 16, 64)


def build(device: str) -> tuple[str, LanguageModel]:
    """The name of the model, and the model."""
    if device == "cpu":
        return "shipped", open_text_model(None)[0].eval()
    torch.manual_seed(0)
    with torch.device(device):
        return "paper-text", LanguageModel(preset("lm-paper-text-rebased"), dtype=torch.bfloat16).eval()


def seconds(model: LanguageModel, prompts: list[list[int]], tokens: int, invariant: bool) -> tuple[float, float]:
    """The time to the first token of all sequences, and to the last."""
    on_gpu = model.embedding.weight.device.type == "cuda"
    start = time.perf_counter()
    stream = model.stream(prompts, max_tokens=tokens, temperature=0.0, slots=len(prompts), batch_invariant=invariant)
    if on_gpu:
        stream.capture()
    stream.advance()
    first = time.perf_counter() - start
    stream.run()
    return first, time.perf_counter() - start


def measure(model: LanguageModel, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    lengths = [max(1, args.prompt // 2 + n * 7919 % args.prompt) for n in range(batch)]
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(args.rounds + 1):
        for invariant, found in times.items():
            spent = seconds(model, prompts, args.tokens, invariant)
            if number:  # the first round compiles kernels and fills caches
                found.append(spent)
    rows = []
    for invariant, found in times.items():
        first, last = (statistics.median(each) for each in zip(*found, strict=True))
        row = {"batch": batch, "batch_invariant": invariant, "seconds_to_first": first, "seconds": last}
        rows.append(row | {"tokens_per_second": batch * args.tokens / last})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("batch  tokens/s  with batch_invariant  ratio  first token, s  with")
    for plain, fixed in zip(rows[::2], rows[1::2], strict=True):
        ratio = plain["tokens_per_second"] / fixed["tokens_per_second"]
        print(
            f"{plain['batch']:5}  {plain['tokens_per_second']:8,.0f}  {fixed['tokens_per_second']:20,.0f}  {ratio:5.2f}"
            f"  {plain['seconds_to_first']:14.3f}  {fixed['seconds_to_first']:.3f}"
        )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="B")
    parser.add_argument("--prompt", type=int, default=64, metavar="T", help="tokens of a prompt, on average")
    parser.add_argument("--tokens", type=int, default=64, metavar="T", help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="few tokens, one round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    if args.tiny:
        args.batches, args.prompt, args.tokens, args.rounds = (1, 3), 4, 3, 1
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    name, model = build(args.device)
    rows = [row for batch in args.batches for row in measure(model, batch, args)]
    show(rows)
    now, about = datetime.now(UTC), machine(args.device, "triton")
    spoken = [word for word in (sys.argv[1:] if words is None else words) if word not in ("--out", str(args.out))]
    record = {
        "what": "generate with and without batch_invariant: tokens per second, seconds to the first token of all",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/invariant.py", *spoken]),
        "machine": about | {"threads": torch.get_num_threads()},
        "model": name,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "rows": rows,
    }
    device = "cpu" if args.device == "cpu" else "h200" if "H200" in about["device"] else "cuda"
    path = args.out / f"invariant-{now:%Y-%m-%d-%H%M%S}-{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")
    print(path)


if __name__ == "__main__":
    main()
