"""The numbers of docs/scaling.md, from committed records and counts: nothing is measured here.

    PYTHONPATH=src python benchmarks/scale_report.py            writes them into the page
    PYTHONPATH=src python benchmarks/scale_report.py --check    fails if the page is stale

The times of one GPU are those of the record SPEED (benchmarks/lm.py). What two processes sent each other is in the
newest record of benchmarks/scale.py. Parameters and bytes are counted in the models of the presets.
docs/images/make_scaling.py draws the same numbers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.scale_counts import count, state_bytes
from benchmarks.scaling import (
    BF16,
    TRAINED,
    WAYS,
    Cluster,
    Model,
    Speed,
    Step,
    Way,
    decode_seconds,
    fit_speed,
    sequences_per_gpu,
    training_step,
)

from rebased.files import replacing
from rebased.models import LanguageModel, LMConfig, preset, shape_of
from rebased.runs.lm_config import LMTrainConfig

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "scaling.md"
SPEED = "lm-2026-11-15-171130-h200.json"
SLOWER = "lm-2026-11-15-171351-h200.json"  # the same day, all lengths, with a profiler in between
CLUSTER = Cluster(
    node=8,
    within=450e9,  # NVLink 4: 900 GB/s, both directions together
    between=50e9,  # one NDR adapter of 400 Gbit/s per GPU
    reached=0.8,
    latency=10e-6,
    memory=139 * 2**30,
    bandwidth=4.8e12,
)
NAMES = {"paper-text": "lm-paper-text-rebased", "attention": "lm-attention"}
TOKENS = LMTrainConfig().batch_size * 4096  # of a step of the paper
STEPS = LMTrainConfig().steps
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (4096, 16_384, 65_536, 262_144, 2**20, 2**22)
CONTEXTS = (1024, 4096, 32_768, 131_072, 2**20)
GOOD = 0.8  # of the speed of n GPUs that need not wait for each other


class Subject(NamedTuple):
    """A model as the cost model sees it: counted and measured."""

    shape: LanguageModel
    model: Model
    speed: Speed
    activations: float  # bytes per token that is computed at once, beside weights, gradients and moments


def records() -> Iterator[dict[str, Any]]:
    """The records of LM training speed that the page cites: SPEED, then SLOWER."""
    yield from (json.loads((RESULTS / name).read_text()) for name in (SPEED, SLOWER))


def config_of(name: str) -> LMConfig:
    """The preset without learned positions."""
    return preset(NAMES[name]).model_copy(update={"positions": "none"})


@cache
def subject(name: str, positions: int = 0) -> Subject:
    """A model with its measured times, and so many learned positions."""
    if positions:
        plain = subject(name)
        rows_of = positions * config_of(name).d_model
        return plain._replace(model=plain.model._replace(root=plain.model.root + rows_of))
    found, config = list(records()), config_of(name)
    rows = [row for row in found[0]["steps"] if row["model"] == name]
    every = [row["seconds"] for record in found for row in record["steps"] if row["model"] == name]
    speed = fit_speed({row["T"]: row["seconds"] / (row["batch"] * row["T"]) for row in rows}, min(every))
    model = count(config)
    activations = max(  # learned positions, as many as T, were measured too
        (row["peak_bytes"] - TRAINED * (model.parameters + row["T"] * config.d_model)) / (row["batch"] * row["T"])
        for row in rows
    )
    return Subject(shape_of(config), model, speed, activations)


def step(name: str, way: Way, n: int, T: int, *, positions: bool = False) -> Step | None:
    """A step of the paper's number of tokens; None if n GPUs cannot share it so."""
    of = subject(name, T if positions else 0)
    batch = {"n": n, "sequences": TOKENS // T, "T": T}
    return training_step(of.model, of.speed, CLUSTER, way, **batch, activations=of.activations)


def efficiency(name: str, made: Step, T: int) -> float:
    """The speed over that of n GPUs that never wait and never run out of memory."""
    return subject(name).speed.seconds_per_token(T) * made.tokens / (made.n * made.seconds)


# Tables: each is a list of rows of cells, the head first.

Rows = list[list[str]]


def paper_table() -> Rows:
    """Hours of the paper's training."""
    rows = [["GPUs", "ReBased, `ddp`", "`fsdp`", "attention, `ddp`"]]
    for n in (1, 8, 64, 128, 256, 512, 1024):
        made = [step("paper-text", way, n, 4096, positions=True) for way in WAYS]
        made.append(step("attention", "ddp", n, 4096, positions=True))
        names = ["paper-text", "paper-text", "attention"]
        rows.append([f"{n:,}", *(_hours(name, each) for name, each in zip(names, made, strict=True))])
    return rows


def _hours(name: str, made: Step | None) -> str:
    if made is None:
        return "–"
    hours = STEPS * made.seconds / 3600
    time = f"{_number(hours)} h" if hours >= 1 else f"{_number(60 * hours)} min"
    return f"{time} ({efficiency(name, made, 4096):.0%})"


def stops_table() -> Rows:
    """From how many to how many GPUs a way of sharing works well, and what ends it."""
    columns: list[tuple[str, str, Way]] = [
        ("ReBased, `ddp`", "paper-text", "ddp"),
        ("ReBased, `fsdp`", "paper-text", "fsdp"),
        ("attention, `ddp`", "attention", "ddp"),
    ]
    rows = [["T", "sequences", *(title for title, _, _ in columns)]]
    for T in LENGTHS:
        rows.append([f"{T:,}", f"{TOKENS // T:,}", *(stop(name, way, T) for _, name, way in columns)])
    return rows


def stop(name: str, way: Way, T: int) -> str:
    """A cell of the table: the numbers of GPUs that work well, and why the next one does not."""
    good = [n for n in GPUS if why_not(name, way, n, T) is None]
    if not good:
        reasons = [why_not(name, way, n, T) for n in GPUS]
        return "none: " + ", ".join(dict.fromkeys(reason for reason in reasons if reason))
    span = f"{good[0]:,} to {good[-1]:,}" if good[0] < good[-1] else f"{good[0]:,}"
    after = [n for n in GPUS if n > good[-1]]
    return f"{span}; then {why_not(name, way, after[0], T)}" if after else span


def why_not(name: str, way: Way, n: int, T: int) -> str | None:
    """Why n GPUs are not well used; None if they are."""
    made = step(name, way, n, T)
    if made is None:
        return "too few sequences"
    if made.memory > CLUSTER.memory:
        return "memory"
    if efficiency(name, made, T) >= GOOD:
        return None
    ideal = subject(name).speed.seconds_per_token(T) * made.tokens / n
    if made.waiting > made.compute - ideal:
        return "the links"
    return "the host"


class Served(NamedTuple):
    """One GPU full of sequences that have read the same number of tokens."""

    state: float  # bytes per sequence
    moved: float  # bytes per sequence and step
    sequences: int
    tokens_per_second: float  # at most: what its memory's bandwidth allows


def serve(name: str, T: int) -> Served:
    """One GPU full of sequences that have read T tokens."""
    weights, state = BF16 * subject(name).model.parameters, state_bytes(subject(name).shape, T)
    moved = 2 * state if name == "paper-text" else state  # a state is read and written; of a cache one token is written
    full = sequences_per_gpu(CLUSTER.memory, weights, state)
    rate = full / decode_seconds(full, weights, moved, CLUSTER.bandwidth) if full else 0.0
    return Served(state, moved, full, rate)


def serving_table() -> Rows:
    """Sequences that one GPU holds, and the most tokens per second that its memory lets it decode."""
    rows = [["context", "bytes per sequence: ReBased", "attention", "sequences per GPU: ReBased", "attention"]]
    rows[0] += ["tokens per second at most: ReBased", "attention"]
    for T in CONTEXTS:
        both = [serve(name, T) for name in NAMES]
        cells = [_bytes(each.state) for each in both] + [f"{each.sequences:,}" for each in both]
        rows.append([f"{T:,}", *cells, *(_number(each.tokens_per_second) for each in both)])
    return rows


def gloo_table() -> Rows:
    """What two processes did here."""
    record = json.loads(newest_check().read_text())
    rows = [["model", "`train.parallel`", "T", "bytes sent", "the model's", "ratio", "seconds", "the model's", "ratio"]]
    for row in record["steps"]:
        expected = row["seconds_alone"] + row["expected_bytes"] / record["gloo_bytes_per_second"]
        cells = [row["model"], f"`{row['way']}`", f"{row['T']}"]
        cells += [f"{row['sent_bytes']:,}", f"{row['expected_bytes']:,}"]
        cells += [f"{row['sent_bytes'] / row['expected_bytes']:.3f}"]
        cells += [f"{row['seconds']:.3f}", f"{expected:.3f}", f"{row['seconds'] / expected:.2f}"]
        rows.append(cells)
    return rows


def newest_check() -> Path:
    """The newest record of benchmarks/scale.py."""
    paths = sorted(RESULTS.glob("scale-*.json"))
    if not paths:
        raise SystemExit("error: there is no record of the two processes; run python benchmarks/scale.py first")
    return paths[-1]


def inputs_table() -> Rows:
    """The numbers that everything is computed from."""
    rows = [["", "ReBased (`paper-text`)", "attention"]]
    ours, theirs = (subject(name) for name in NAMES)
    rows.append(["parameters without positions", *(f"{each.model.parameters:,}" for each in (ours, theirs))])
    for T in ours.speed.measured:
        rows.append(
            [f"measured, T = {T:,}", *(f"{1e6 * each.speed.measured[T]:.2f} µs per token" for each in (ours, theirs))]
        )
    fitted = [
        f"{1e6 * each.speed.per_token:.2f} µs"
        + (f" + {1e12 * each.speed.per_length:.0f} ps × T" if each.speed.per_length else "")
        for each in (ours, theirs)
    ]
    rows.append(["at other lengths, per token", *fitted])
    rows.append(
        ["shortest step that was measured", *(f"{1e3 * each.speed.shortest:.0f} ms" for each in (ours, theirs))]
    )
    rows.append(["activations per token", *(_bytes(each.activations) for each in (ours, theirs))])
    return rows


SHORT = """
- **The paper's training** ({steps:,} steps, {tokens:.1f} billion tokens) takes {hours} hours of one H200 at the
  speed of one record ({other} at that of another). The attention model takes {attention_hours}.
- **DDP and FSDP work well up to {most} GPUs**: {minutes} minutes for the whole training. The {sent} that a GPU
  sends per step take {communication} ms and hide behind the backward pass. More GPUs change nothing: each has
  fewer than 32,768 tokens then, and its host needs {launch} ms to launch a step, however small. For longer T
  the number of sequences per step is the limit.
- **A GPU holds one sequence of {longest:,} tokens** ({activations} of activations per token), or a longer one
  with `train.recompute`.
- **Serving**: one H200 holds {served:,} sequences of any length; with attention {cached:,} of 4,096 tokens.
  State and cache are equally large at {equal} tokens, and move equally many bytes per step at {equal_moved};
  below that, the cache is the smaller one.
"""


def short() -> str:
    """What the tables say, in sentences."""
    ours, all_tokens = subject("paper-text"), STEPS * TOKENS
    (slower,) = (row for row in list(records())[1]["steps"] if (row["model"], row["T"]) == ("paper-text", 4096))
    most = max(n for n in GPUS if why_not("paper-text", "ddp", n, 4096) is None)
    made = _made(step("paper-text", "ddp", most, 4096, positions=True))
    per_token, state = serve("attention", 1).state, serve("paper-text", 4096)
    numbers = {
        "steps": STEPS,
        "tokens": all_tokens / 1e9,
        "hours": _number(all_tokens * ours.speed.measured[4096] / 3600),
        "other": _number(all_tokens / slower["tokens_per_second"] / 3600),
        "attention_hours": _number(all_tokens * subject("attention").speed.measured[4096] / 3600),
        "most": most,
        "minutes": _number(STEPS * made.seconds / 60),
        "sent": _bytes(made.sent),
        "communication": _number(1e3 * made.communication),
        "launch": _number(1e3 * ours.speed.shortest),
        "activations": _bytes(ours.activations),
        "longest": max(T for T in LENGTHS if _made(step("paper-text", "ddp", 1, T)).memory <= CLUSTER.memory),
        "served": state.sequences,
        "cached": serve("attention", 4096).sequences,
        "equal": round(state.state / per_token),
        "equal_moved": round(state.moved / per_token),
    }
    return SHORT.strip().format(**numbers)


def _made(step: Step | None) -> Step:
    assert step is not None
    return step


BLOCKS: dict[str, Callable[[], str]] = {
    "short": short,
    "inputs": lambda: markdown(inputs_table()),
    "paper": lambda: markdown(paper_table()),
    "stops": lambda: markdown(stops_table()),
    "serving": lambda: markdown(serving_table()),
    "gloo": lambda: f"{markdown(gloo_table())}\n\n[Record](../benchmarks/results/{newest_check().name})",
}


def markdown(rows: Rows) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def with_blocks(page: str) -> str:
    """The page with what is generated made anew, between its markers."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}: benchmarks/scale_report.py writes this -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"error: the page must have one line {begin!r} and one {end!r}")
        before, rest = page.split(begin)
        after = rest.split(end)[1]
        page = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return page


def _number(x: float) -> str:
    """Three digits, with commas: 54.1, 0.42, 627,000."""
    digits = float(f"{x:.3g}")
    return f"{digits:,.0f}" if digits >= 100 else f"{digits:g}"


def _bytes(size: float) -> str:
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= pair[0]), (1, "bytes"))
    return f"{_number(size / unit)} {name}"


def write(page: Path = PAGE) -> None:
    """Write the numbers of the page anew."""
    text = with_blocks(page.read_text())
    with replacing(page) as file:
        file.write(text.encode())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the markers")
    args = parser.parse_args(words)
    if args.check:
        if with_blocks(args.page.read_text()) != args.page.read_text():
            print(f"{args.page.name} is stale: run `make figures`", file=sys.stderr)
            return 1
        return 0
    write(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
