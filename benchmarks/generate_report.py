"""Tables and a plot of what benchmarks/generate.py measured, from its record alone.

PYTHONPATH=src python benchmarks/generate_report.py benchmarks/results/generate-....json --plot generate.svg
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.axes import logarithmic
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]
OURS, PEER, BATCH = "paper-text", "attention", 64
WANTED_MS = {1: 0.5, 64: 0.75}  # per step, at most
WANTED_SPEED = {1024: 250_000}  # tokens per second, at least
WANTED_RATIO = {4096: 4.0, 32_768: 25.0}  # of tokens per second at BATCH over attention's, at least
NAMES = {"paper-text": "ReBased (18 layers)", "based": "Based (18 layers)", "attention": "attention (12 layers)"}


def best_rows(record: Record) -> list[Record]:
    """The fastest greedy row of each model, batch and context, over the variants that were measured."""
    best: dict[tuple[Any, ...], Record] = {}
    for row in record["steps"]:
        key = (row["model"].removesuffix("-full"), row["batch"], row["context"])
        if "ms" in row and row["sampling"] == "greedy" and row["ms"] < best.get(key, {"ms": float("inf")})["ms"]:
            best[key] = row
    return list(best.values())


def verdicts(record: Record) -> list[tuple[str, str, str]]:
    """(what, found, wanted) of everything that was wanted and measured."""
    rows = best_rows(record)
    ours = {row["batch"]: row for row in rows if row["model"] == OURS}
    found = []
    for batch, most in WANTED_MS.items():
        if batch in ours:
            found.append((f"batch {batch}: ms per step", f"{ours[batch]['ms']:.3f}", f"at most {most}"))
    for batch, least in WANTED_SPEED.items():
        if batch in ours:
            speed = f"{ours[batch]['tokens_per_second']:,.0f}"
            found.append((f"batch {batch}: tokens/s", speed, f"at least {least:,}"))
    for context, least in WANTED_RATIO.items():
        peers = [row for row in rows if row["model"] != OURS and row["context"] == context and row["batch"] == BATCH]
        for peer in (row for row in peers if row["model"].startswith(PEER)):
            if BATCH in ours:
                ratio = ours[BATCH]["tokens_per_second"] / peer["tokens_per_second"]
                what = f"batch {BATCH}, context {context:,}: times attention's tokens/s"
                found.append((what, f"{ratio:.1f}", f"at least {least:g}"))
    return found


def show(record: Record) -> None:
    """Print the tables of a record, the shortest last."""
    console = Console(width=130)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = ("model", "variant", "batch", "context", "sampling", "ms per step", "tokens/s", "state, MB", "peak, GB")
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "variant", "sampling") else "right")
    for row in sorted(record["steps"], key=lambda row: (row["model"], row["context"], row["batch"], row.get("ms", 0))):
        cells = [row["model"], row["variant"], f"{row['batch']:,}", f"{row['context']:,}", row["sampling"]]
        if "failed" in row:
            table.add_row(*cells, row["failed"][:40])
            continue
        peak = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else ""
        speed, state = f"{row['tokens_per_second']:,.0f}", f"{row['state_bytes'] / 1e6:.1f}"
        table.add_row(*cells, f"{row['ms']:.3f}", speed, state, peak)
    console.print(table)
    for row in (*record["first"], *record.get("prompts", ())):
        console.print(say(row), highlight=False)
    short = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "found", "wanted"):
        short.add_column(name, justify="left" if not name else "right")
    for cells in verdicts(record):
        short.add_row(*cells)
    console.print(short)
    if record["left_out"]:
        console.print(f"left out, since the time was over: {len(record['left_out'])} cases", highlight=False)


def say(row: Record) -> str:
    """One measured row as one line."""
    if "prompts" in row:
        found = row.get("failed") or f"{row['one_by_one']:.3f} s one by one, {row['together']:.3f} s together"
        return f"{row['model']:14} {row['prompts']} prompts of {row['shortest']} to {row['longest']} tokens: {found}"
    if "prompt" in row:
        peak = f", {row['peak_bytes'] / 1e9:.2f} GB at the peak" if row.get("peak_bytes") else ""
        found = row.get("failed") or f"{row['seconds']:.3f} s to the first token{peak}"
        return f"{row['model']:14} prompt {row['prompt']:6,} in chunks of {row['chunk']:6,}  {found}"
    found = row.get("failed") or f"{row['ms']:8.3f} ms  {row['tokens_per_second']:11,.0f} tokens/s"
    where = f"batch {row['batch']:5,}  context {row['context']:6,}  {row['sampling']:7}"
    return f"{row['model']:14} {row['variant']:12} {where} {found}"


def draw(record: Record, path: Path) -> None:
    """Tokens per second and memory against context, at one batch: a line per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = best_rows(record)
    batch = BATCH if any(row["batch"] == BATCH for row in rows) else max((row["batch"] for row in rows), default=1)
    rows = [row for row in rows if row["batch"] == batch]
    contexts = sorted({row["context"] for row in rows}) or [1]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for model in dict.fromkeys(row["model"].removesuffix("-full") for row in rows):
        own = sorted((r for r in rows if r["model"].removesuffix("-full") == model), key=lambda r: r["context"])
        if model != PEER:  # its state does not depend on the context: what was measured once holds at every one
            own = [own[0] | {"context": context} for context in contexts]
        style = {"lw": 2.5} if model == OURS else {"lw": 1.5, "ls": "--"}
        at, name = [row["context"] for row in own], NAMES.get(model, model)
        axes[0].plot(at, [row["tokens_per_second"] for row in own], marker="o", ms=4, label=name, **style)
        axes[1].plot(at, [row["state_bytes"] / 2**30 for row in own], marker="o", ms=4, label=name, **style)
    axes[0].set(ylabel="tokens per second")
    axes[1].set(ylabel="GiB of states or caches")
    for axis in axes:
        logarithmic(axis)
        axis.set(xlabel="context (tokens)")
        axis.grid(True, which="both", alpha=0.25)
    if rows:
        axes[0].legend(fontsize="small")
    figure.suptitle(f"Decoding, {batch} sequences at once, {record['machine']['device']}")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args(words)
    record = json.loads(args.record.read_text())
    if args.plot:
        draw(record, args.plot)
    show(record)


if __name__ == "__main__":
    main()
