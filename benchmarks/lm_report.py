"""Tables and a plot of what benchmarks/lm.py measured, from its record alone.

PYTHONPATH=src python benchmarks/lm_report.py benchmarks/results/lm-....json --plot lm.svg
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.axes import logarithmic
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]
WANTED = {4096: 0.9, 16_384: 1.7, 65_536: 5.0}  # paper-text's tokens a second over attention's


def ratios(rows: Sequence[Record]) -> list[Record]:
    """paper-text's speed over that of attention, and of the faster of its two kernels, at each length."""
    speeds = {(row["model"], row["T"]): row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    found = []
    for T in sorted({T for _, T in speeds}):
        ours, torchs = speeds.get(("paper-text", T)), speeds.get(("attention", T))
        if ours and torchs:
            fastest = max(torchs, speeds.get(("attention-cudnn", T), 0.0))
            found.append({"T": T, "over_attention": ours / torchs, "over_fastest_attention": ours / fastest})
    return found


def draw(record: Record, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    done = sorted((row for row in record["steps"] if "seconds" in row), key=lambda row: row["T"])
    for name in dict.fromkeys(row["model"] for row in done):
        rows = [row for row in done if row["model"] == name]
        style = {"lw": 2.5} if name == "paper-text" else {"lw": 1.2, "ls": "--" if "cudnn" in name else "-"}
        lengths = [row["T"] for row in rows]
        axes[0].plot(lengths, [row["tokens_per_second"] for row in rows], marker="o", ms=3, label=name, **style)
        if all(row["peak_bytes"] for row in rows):
            axes[1].plot(lengths, [row["peak_bytes"] / 2**30 for row in rows], marker="o", ms=3, **style)
    axes[0].set(ylabel="tokens a second")
    axes[1].set(ylabel="GiB at the peak", ylim=(0, None))
    for axis in axes:
        logarithmic(axis, y=axis is axes[0])
        axis.set(xlabel="T")
        axis.grid(True, which="both", alpha=0.25)
    if done:
        axes[0].legend(fontsize="small")
    tokens, device = record["tokens"], record["machine"]["device"]
    figure.suptitle(f"One step of training, {tokens:,} tokens (T where T is longer), {device}")
    figure.savefig(path)
    pyplot.close(figure)


def speed_table(record: Record) -> None:
    rows = record["steps"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    table = Table(title="thousand tokens per second / GiB", title_justify="left")
    for column in ("T", *names, "paper-text over attention", "over the faster kernel", "wanted"):
        table.add_column(column, justify="right")
    over = {
        row["T"]: [f"{row[key]:.2f}" for key in ("over_attention", "over_fastest_attention")] for row in ratios(rows)
    }
    for T in sorted({row["T"] for row in rows}):
        at = {row["model"]: row for row in rows if row["T"] == T}
        wanted = f"{WANTED[T]}" if T in WANTED else ""
        table.add_row(f"{T:,}", *(_cell(at.get(name)) for name in names), *over.get(T, ("", "")), wanted)
    Console(width=160).print(table)


def profile_table(row: Record) -> None:
    profile = row["profile"]
    title = f"{row['model']}, T = {row['T']:,}: {profile['wall_ms']:.1f} ms per step, profiled"
    groups = Table(title=title, title_justify="left", caption="rebased::... are counted above by kernel")
    for column in ("what for", "ms", "share"):
        groups.add_column(column, justify="left" if column == "what for" else "right")
    for name, ms in (*profile["groups"].items(), *profile["operators"].items()):
        groups.add_row(name, f"{ms:.2f}", f"{ms / profile['wall_ms']:.1%}")
    kernels = Table(title="the costliest kernels", title_justify="left")
    for column in ("kernel", "ms", "calls"):
        kernels.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)
    for name, cost in list(profile["kernels"].items())[:25]:
        kernels.add_row(name, f"{cost['ms']:.2f}", f"{cost['calls']:.0f}")
    console = Console(width=160)
    console.print(groups)
    console.print(kernels)


def _cell(row: Record | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return str(row["failed"])
    memory = "" if row["peak_bytes"] is None else f" / {row['peak_bytes'] / 2**30:.0f}"
    return f"{row['tokens_per_second'] / 1e3:,.1f}{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    if args.plot:
        draw(record, args.plot)
    speed_table(record)


if __name__ == "__main__":
    main()
