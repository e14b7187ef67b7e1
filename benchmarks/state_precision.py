"""What a decoding state in bf16 or fp16 would cost: in the operator, in recall by length, in perplexity by position.

    python benchmarks/state_precision.py                    on a GPU: trains an MQAR model at T = 64 to 4,096
    python benchmarks/state_precision.py --size cpu         a small MQAR model at T = 64 and 256, text up to 512 bytes
    python benchmarks/state_precision.py --only text

The state is rounded in place after every token. A step computes its output in fp32 before that, as a kernel would that
loads the state, adds a token, and stores it. States of short convolutions stay as they are.

    operator  relative error of o against fp64 for random normal q, k, v, at positions T/2 to T
    recall    a model of `rebased train` reads MQAR token by token; questions are anywhere after the pairs (alpha 1)
    text      the shipped language model reads this package's own source, which it was not trained on
    range     the largest numbers of its state in fp32 by the length of the text; fp16 ends at 65,504

A format is harmless if at every length recall falls by less than 0.5 percentage points, and in every range of positions
perplexity rises by less than 0.1 %, two standard errors of the paired difference added to both. Lengths and numbers of
pairs count of which fp32 recalls 90 %. A record speaks for the lengths that it has, not for longer ones. It is
benchmarks/results/state_precision-<time>-<machine>.json.
"""

import argparse
import hashlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.machine import write_record

from rebased.data.tokenizer import Tokenizer
from rebased.mixers import init_slots, rows_at
from rebased.mixers.polynomial import PolynomialAttention
from rebased.models import LanguageModel
from rebased.models.weights import load_model
from rebased.ops import (
    BASED,
    REBASED,
    Coefficients,
    PolyState,
    init_poly_state,
    linear_argmax,
    poly_attention,
    poly_attention_extend_,
)
from rebased.runs.load import open_text_model
from rebased.runs.provenance import describe_code
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import MQAR, find_questions
from rebased.train import train

SECTIONS = ("operator", "recall", "text", "range")
MOST_RECALL, MOST_PERPLEXITY = 0.005, 0.001  # that a harmless format may lose: share of answers, relative rise
WELL = 0.9  # recall in fp32 of the numbers of pairs that count
PACKAGE = Path(__file__).parents[1] / "src" / "rebased"
K, V = 16, 64
RANGE_WINDOWS = 5

Round = Callable[[Tensor, Generator], None]


def exact(x: Tensor, generator: Generator) -> None:
    """Leave x as it is."""


def nearest_bf16(x: Tensor, generator: Generator) -> None:
    x.copy_(x.bfloat16())


def nearest_fp16(x: Tensor, generator: Generator) -> None:
    x.copy_(x.half())


def stochastic_bf16(x: Tensor, generator: Generator) -> None:
    """Round to a neighbour in bf16, the nearer the likelier, so that the mean is x: the low 16 bits decide."""
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    x.view(torch.int32).add_(noise).bitwise_and_(-(2**16))


class Format(NamedTuple):
    """How the two tensors of a state are rounded after every token."""

    kv: Round
    z: Round

    def round_(self, state: PolyState, generator: Generator) -> None:
        self.kv(state.kv, generator)
        self.z(state.z, generator)


FORMATS = {
    "fp32": Format(exact, exact),
    "bf16": Format(nearest_bf16, nearest_bf16),
    "bf16, z fp32": Format(nearest_bf16, exact),
    "bf16 stochastic": Format(stochastic_bf16, stochastic_bf16),
    "bf16 stochastic, z fp32": Format(stochastic_bf16, exact),
    "fp16": Format(nearest_fp16, nearest_fp16),
    "fp16, z fp32": Format(nearest_fp16, exact),
}


class Size(NamedTuple):
    """How much is measured."""

    operator_lengths: tuple[int, ...]
    seeds: int
    run: Mapping[str, Any]  # the config of the MQAR model
    recall: Mapping[int, tuple[int, ...]]  # pairs by length T
    rows: int  # sequences per length and number of pairs
    text_bounds: tuple[int, ...]  # where ranges of positions begin and end
    windows: int
    range_lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768)


def mqar_run(segments: Mapping[tuple[int, int], int], d_model: int, mixer: dict[str, Any], **settings: Any) -> Any:
    """The config of ReBased on MQAR. `segments`: training examples by (T, pairs)."""
    longest = max(T for T, _ in segments)

    def split(examples: Callable[[int], int]) -> list[dict[str, int]]:
        return [{"seq_len": T, "kv_pairs": n, "examples": examples(count)} for (T, n), count in segments.items()]

    return {
        "task": {"vocab_size": longest + longest // 8, "alpha": 1.0, "train": split(int), "test": split(lambda _: 64)},
        "model": {
            "preset": "rebased",
            "d_model": d_model,
            "positions": "none",
            "embed_dropout": 0,
            "mixers": {1: {"value_width": None, **mixer}},
        },
        "train": {"stop_above": 0.999, **settings},
    }


FULL_RUN = mqar_run(
    {(64, 16): 20_000, (256, 16): 10_000, (256, 64): 20_000, (1024, 64): 8000, (4096, 16): 2000, (4096, 64): 4000},
    d_model=96,
    mixer={},
    epochs=32,
    batch_size=256,
    lr=1e-3,
    precision="tf32",
)
CPU_RUN = mqar_run(
    {(64, 4): 6000, (64, 8): 6000, (64, 16): 6000, (256, 8): 3000, (256, 16): 3000},
    d_model=32,
    mixer={"n_heads": 1, "key_width": 8},
    epochs=12,
    batch_size=32,
    lr=3e-3,
)
TINY_RUN = mqar_run({(32, 4): 64}, d_model=32, mixer={"n_heads": 1, "key_width": 8}, epochs=1, batch_size=32)

LENGTHS = (64, 256, 1024, 4096, 16_384)
BOUNDS = (0, 64, 256, 512, 1024, 2048, 4096)
FULL_RECALL = {64: (16,), 256: (16, 64), 1024: (16, 64), 4096: (16, 64)}
SIZES = {
    "full": Size(LENGTHS, 5, FULL_RUN, FULL_RECALL, 256, BOUNDS, 128),
    "cpu": Size(LENGTHS, 5, CPU_RUN, {64: (4, 8, 16), 256: (4, 8, 16)}, 256, BOUNDS[:4], 32),
    "tiny": Size((32, 64), 2, TINY_RUN, {32: (4,)}, 8, (0, 16, 32), 2, (32, 64)),
}


def measure_operator(size: Size, device: torch.device) -> list[dict[str, Any]]:
    """The relative error of o in each format, by coefficients and T: the mean over seeds, and their range."""
    rows = []
    for name, coefficients in (("rebased", REBASED), ("based", BASED)):
        q, k, v = normal_inputs(size.seeds, max(size.operator_lengths), device)
        wanted = poly_attention(*(x.double() for x in (q, k, v)), coefficients=coefficients, backend="chunked")
        for label, format in FORMATS.items():
            o = torch.cat(list(attend_by_tokens(q, k, v, coefficients, format)), 1).double()
            for T in size.operator_lengths:
                late = slice(T // 2, T)
                off, whole = (x[:, late].flatten(1).norm(dim=1) for x in (o - wanted, wanted))
                errors = (off / whole).tolist()
                row = {"kernel": name, "format": label, "T": T, "error": finite(sum(errors) / len(errors))}
                rows.append(row | {"least": finite(min(errors)), "most": finite(max(errors))})
        print(f"operator: {name} done", file=sys.stderr, flush=True)
    return rows


def normal_inputs(seeds: int, T: int, device: torch.device) -> list[Tensor]:
    """q, k [B,T,1,K] and v [B,T,1,V] in fp32, one row per seed, the same on every device."""
    generators = [Generator().manual_seed(seed) for seed in range(seeds)]
    return [
        torch.stack([torch.randn(T, 1, width, generator=each) for each in generators]).to(device) for width in (K, K, V)
    ]


def attend_by_tokens(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, format: Format) -> Iterator[Tensor]:
    """o [B,1,H,V] of each token in turn."""
    B, T, H, width = q.shape
    state = init_poly_state(B, H, width, v.shape[3], coefficients, device=q.device)
    generator = Generator(q.device).manual_seed(0)
    for t in range(T):
        now = slice(t, t + 1)
        yield poly_attention_extend_(q[:, now], k[:, now], v[:, now], state, coefficients=coefficients)
        format.round_(state, generator)


class Reader:
    """A model that reads sequences token by token, by the decoder's step without its fused kernels."""

    def __init__(self, model: LanguageModel, format: Format) -> None:
        self.model, self.format = model, format
        self.states: list[PolyState] = []  # of the polynomial mixers, after the last token

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Iterator[Tensor]:
        """The features [B,D] after each of the tokens [B,T] in turn."""
        B, T = tokens.shape
        layers = [init_slots(block.mixer, B, T) for block in self.model.blocks]
        self.states = [
            PolyState(*slots.tensors())
            for block, slots in zip(self.model.blocks, layers, strict=True)
            if isinstance(block.mixer, PolynomialAttention)
        ]
        lengths = torch.zeros(B, dtype=torch.int64, device=tokens.device)
        generator = Generator(tokens.device).manual_seed(0)
        for t in range(T):
            yield self.model.step(tokens[:, t], layers, lengths, T)
            lengths += 1
            for state in self.states:
                self.format.round_(state, generator)


def largest(states: Sequence[PolyState]) -> dict[str, float | None]:
    """The largest magnitudes in kv and z of all layers."""
    return {name: finite(max(getattr(each, name).abs().max().item() for each in states)) for name in ("kv", "z")}


def measure_recall(size: Size, device: torch.device, folder: Path) -> dict[str, Any]:
    """Train the MQAR model, or take the one that is in the folder, and count its right answers in each format."""
    settings = {**size.run, "train": {**size.run["train"], "device": device.type}}
    config = SyntheticRunConfig.model_validate(settings)
    result = train(config, folder, resume=folder.exists())
    print(f"recall: trained to {result.accuracy} at epoch {result.epoch}", file=sys.stderr, flush=True)
    model, rows = load_model(folder, device), []
    for T, every in size.recall.items():
        for pairs in every:
            task = MQAR(seq_len=T, kv_pairs=pairs, vocab_size=config.task.vocab_size, alpha=1.0)
            questions = find_questions(task.build(size.rows, seed=7, device=device, split="held_out"))
            right: dict[str, Tensor] = {}
            for label, format in FORMATS.items():
                reader = Reader(model, format)
                features = torch.stack(list(reader.read(questions.inputs)), 1)  # [B,T,D]
                answers = linear_argmax(rows_at(features, questions.positions), model.embedding.weight)
                right[label] = (answers.view_as(questions.targets) == questions.targets).double().mean(1)  # [B]
                change = right[label] - right["fp32"]
                row = {"T": T, "pairs": pairs, "format": label, "accuracy": right[label].mean().item()}
                row |= {"change": change.mean().item(), "standard_error": standard_error(change)}
                rows.append(row | {"largest": largest(reader.states)})
        print(f"recall: T = {T} done", file=sys.stderr, flush=True)
    about = {"accuracy": result.accuracy, "epoch": result.epoch, "digest": config.digest()}
    return {"run": about | {"config": config.model_dump(mode="json")}, "sequences": size.rows, "rows": rows}


def measure_text(size: Size, device: torch.device) -> dict[str, Any]:
    """The perplexity of the shipped model by position, in each format."""
    model, tokenizer = open_text_model(None, device=device)
    windows = source_windows(size.windows, size.text_bounds[-1] + 1, tokenizer, device)
    tokens, labels = windows[:, :-1], windows[:, 1:]
    rows, losses, ends = [], dict[str, Tensor](), {}
    for label, format in FORMATS.items():
        reader = Reader(model, format)
        found = [
            functional.cross_entropy(model.logits(features).float(), labels[:, t], reduction="none")
            for t, features in enumerate(reader.read(tokens))
        ]
        losses[label] = torch.stack(found, 1).double()  # [B,T]
        for begin, end in pairwise(size.text_bounds):
            here, plain = (losses[name][:, begin:end].mean(1) for name in (label, "fp32"))
            change = (here - plain).mean().item()
            row = {"begin": begin, "end": end, "format": label, "perplexity": finite(here.mean().exp().item())}
            row["change"] = finite(math.expm1(change) if change < 700 else math.inf)  # relative
            rows.append(row | {"standard_error": standard_error(here - plain)})
        ends[label] = largest(reader.states)
        print(f"text: {label} done", file=sys.stderr, flush=True)
    return {"windows": size.windows, "rows": rows, "largest": ends, **about_text()}


@torch.no_grad()
def measure_range(size: Size, device: torch.device) -> dict[str, Any]:
    """The largest magnitudes in the shipped model's fp32 state after T tokens, one number per window."""
    model, tokenizer = open_text_model(None, device=device)
    windows = source_windows(RANGE_WINDOWS, max(size.range_lengths), tokenizer, device)
    rows: list[dict[str, Any]] = [{"T": T, "kv": [], "z": []} for T in size.range_lengths]
    for window in windows:
        state = model.init_state(1)
        for row in rows:
            _, state = model.extend(window[None, state.position : row["T"]], state)
            for name, value in largest([each for each in state.layers if isinstance(each, PolyState)]).items():
                row[name].append(value)
    return {"windows": RANGE_WINDOWS, "rows": rows, **about_text()}


def source_windows(count: int, length: int, tokenizer: Tokenizer, device: torch.device) -> Tensor:
    """[count,length] int64: windows of the package's source, evenly spaced over its files in order."""
    text = [token for path in source_files() for token in (tokenizer.end_of_text, *path.read_bytes())]
    starts = torch.linspace(0, len(text) - length, count).long().tolist()
    return torch.tensor([text[start : start + length] for start in starts], device=device)


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def about_text() -> dict[str, Any]:
    """The model and the text of a section, for its record."""
    source = b"".join(path.read_bytes() for path in source_files())
    about = {"what": "*.py of src/rebased", "bytes": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    return {"model": "lm/stdlib-bytes", "text": about | {"commit": describe_code()["commit"]}}


def standard_error(each: Tensor) -> float | None:
    """Of the mean of paired differences [B]."""
    return finite(each.std().item() / math.sqrt(len(each)))


def finite(x: float) -> float | None:
    """None where x is not finite, because an fp16 state has overflowed: JSON has no such numbers."""
    return x if math.isfinite(x) else None


def verdicts(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By format: the largest fall of recall and rise of perplexity, with two standard errors, and if they are harmless.

    None where nothing was measured or, of perplexity, where the state has overflowed.
    """
    recall, text = (record.get(section, {}).get("rows", []) for section in ("recall", "text"))
    well = {(row["T"], row["pairs"]) for row in recall if row["format"] == "fp32" and row["accuracy"] >= WELL}
    found = {}
    for label in FORMATS:
        rows = [row for row in recall if row["format"] == label and (row["T"], row["pairs"]) in well]
        falls = max((2 * row["standard_error"] - row["change"] for row in rows), default=None)
        rises = [
            math.inf if row["change"] is None else row["change"] + 2 * row["standard_error"]
            for row in text
            if row["format"] == label
        ]
        known = falls is not None and falls < MOST_RECALL and bool(rises)
        found[label] = {
            "recall_falls": falls,
            "perplexity_rises": finite(max(rises, default=math.nan)),
            "harmless": known and max(rises) < MOST_PERPLEXITY,
        }
    return found


def show(record: Mapping[str, Any]) -> None:
    """Tables with one row per format, and the verdicts."""
    for kernel in ("rebased", "based"):
        rows = [row for row in record.get("operator", ()) if row["kernel"] == kernel]
        table(f"error of o, {kernel}", {(row["format"], f"T {row['T']}"): row["error"] for row in rows}, "{:.1e}")
    rows = record.get("recall", {}).get("rows", ())
    cells = {(row["format"], f"T {row['T']}, {row['pairs']} pairs"): row["accuracy"] for row in rows}
    table("recall", cells, "{:.4f}")
    rows = record.get("text", {}).get("rows", ())
    places = [(row, (row["format"], f"{row['begin'] + 1}-{row['end']}")) for row in rows]
    table("perplexity", {place: row["perplexity"] for row, place in places}, "{:.4f}")
    table("rise of perplexity", {place: row["change"] for row, place in places}, "{:+.3%}")
    rows = record.get("range", {}).get("rows", ())
    table(
        "largest in fp32",
        {(x, f"T {row['T']}"): statistics.median(row[x]) for x in ("kv", "z") for row in rows},
        "{:,.0f}",
    )
    reach = [f"T {max(row['T'] for row in record['recall']['rows'])}"] if "recall" in record else []
    reach += [f"position {max(row['end'] for row in record['text']['rows'])}"] if "text" in record else []
    if reach:
        print(f"up to {' and '.join(reach)}:")
    for label, verdict in record["verdicts"].items() if reach else ():
        falls, rises = verdict["recall_falls"], verdict["perplexity_rises"]
        said = [f"recall falls by at most {100 * falls:.2f} points"] if falls is not None else []
        said += [f"perplexity rises by at most {rises:.3%}"] if rises is not None else []
        print(f"  {label:24} {', '.join(said)}: {'harmless' if verdict['harmless'] else 'not shown to be harmless'}")


def table(title: str, cells: Mapping[tuple[str, str], float | None], number: str) -> None:
    """Print cells by (format, column); nothing if there are none. None is an overflow."""
    columns = list(dict.fromkeys(column for _, column in cells))
    if columns:
        print(f"{title:26}" + "".join(f"{column:>18}" for column in columns))
    for label in dict.fromkeys(label for label, _ in cells):
        values = (cells[label, column] for column in columns)
        words = ("overflow" if value is None else number.format(value) for value in values)
        print(f"  {label:24}" + "".join(f"{word:>18}" for word in words))
    print(end="\n" if columns else "")


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--run", type=Path, help="folder of the MQAR run; a finished one is not trained again")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(words)
    size, device, record = SIZES[args.size], torch.device(args.device), dict[str, Any]()
    if "operator" in args.only:
        record["operator"] = measure_operator(size, device)
    if "recall" in args.only:
        with tempfile.TemporaryDirectory() as folder:
            record["recall"] = measure_recall(size, device, args.run or Path(folder) / "run")
    if "text" in args.only:
        record["text"] = measure_text(size, device)
    if "range" in args.only:
        record["range"] = measure_range(size, device)
    record["limits"] = {"recall_falls": MOST_RECALL, "perplexity_rises": MOST_PERPLEXITY}
    record["verdicts"] = verdicts(record)
    options = f"--size {args.size}" + ("" if args.only == SECTIONS else f" --only {' '.join(args.only)}")
    what = "a decoding state rounded after every token: error of o, recall by length, perplexity by position"
    path = write_record(args.out, "state_precision", options, what, device=args.device, **record)
    show(record)
    return path


if __name__ == "__main__":
    main()
