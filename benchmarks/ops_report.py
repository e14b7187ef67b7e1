"""Tables and a plot of what benchmarks/ops.py measured, from its record alone.

PYTHONPATH=src python benchmarks/ops_report.py benchmarks/results/ops-....json --plot ops.svg
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


def best_mode(row: Record, part: str) -> float | None:
    """Milliseconds without launch overhead where there is such a number."""
    return row.get(f"graph_{part}_ms", row.get(f"eager_{part}_ms"))


def draw(record: Record, path: Path) -> None:
    """Nanoseconds per token over T, log-log, from the record alone: flat is linear."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharex=True)
    for axis, part, title in zip(axes, ("forward", "both"), ("forward", "forward + backward"), strict=True):
        for name in dict.fromkeys(row["way"] for row in record["lengths"]):
            points = [
                (row["T"], 1e6 * ms / (row["B"] * row["T"]))
                for row in record["lengths"]
                if row["way"] == name and (ms := best_mode(row, part))
            ]
            style = {"lw": 2.5} if name == "ours" else {"lw": 1, "ls": "--" if name.startswith("ours,") else "-"}
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=name, **style)
        logarithmic(axis)
        axis.set(xlabel="T", ylabel="ns per token", title=title)
        axis.grid(True, which="both", alpha=0.25)
    if axes[0].lines:  # none where every way was wrong
        axes[0].legend(fontsize="small")
    figure.suptitle(
        f"{record['shape']['tokens']:,} tokens (T where it is longer), {record['machine']['device']}, CUDA graphs"
    )
    figure.savefig(path)
    pyplot.close(figure)


def show(record: Record) -> None:
    console = Console(width=160)
    if record.get("lengths"):
        for mode in ("eager", "graph"):
            console.print(lengths_table(record["lengths"], mode))
        console.print(floor_table(record["lengths"]))
    if "decode" in record:
        console.print(decode_line(record["decode"]))
    if record.get("regimes"):
        console.print(regimes_table(record["regimes"]))
    for name, reason in record["left_out"].items():
        console.print(f"left out: {name} ({reason})", markup=False)


def table_of(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def lengths_table(rows: Sequence[Record], mode: str) -> Table:
    names = list(dict.fromkeys(row["way"] for row in rows))
    how = {"eager": "called from Python", "graph": "replayed in a CUDA graph"}[mode]
    table = table_of(f"ms, forward / forward+backward, {how}", ["T", *names])
    for T in dict.fromkeys(row["T"] for row in rows):
        at = {row["way"]: row for row in rows if row["T"] == T}
        table.add_row(f"{T:,}", *(cell(at.get(name, {}), mode) for name in names))
    return table


def floor_table(rows: Sequence[Record]) -> Table:
    """The floor is the time of moving all inputs and outputs once."""
    columns = ("T", "ms", "share of the floor", "ns per token", "MB", "error")
    table = table_of("ours as it chooses, in a CUDA graph", columns)
    for row in (row for row in rows if row["way"] == "ours" and "graph_both_ms" in row):
        shares = [f"{row[f'floor_{part}_ms'] / row[f'graph_{part}_ms']:.0%}" for part in ("forward", "both")]
        per_token = 1e6 * row["graph_both_ms"] / (row["B"] * row["T"])
        numbers = [f"{per_token:.1f}", f"{row['peak_bytes'] / 1e6:,.0f}", f"{row['error']:.1e}"]
        table.add_row(f"{row['T']:,}", cell(row, "graph"), " / ".join(shares), *numbers)
    return table


def decode_line(row: Record) -> str:
    if "wrong" in row:
        return f"decode: [red]{row['wrong']}[/red]"
    copy, ms = row["copy_ms"], row.get("graph_ms", row["eager_ms"])
    times = f"{ms:.3f} ms, {ms / copy:.1f} times a copy of the state ({copy:.3f} ms)"
    return f"decode, B = {row['B']}: {times}; eager {row['eager_ms']:.3f} ms"


def regimes_table(rows: Sequence[Record]) -> Table:
    widths = list(dict.fromkeys(row["K"] for row in rows))
    title = "forward+backward ms, quadratic | chunked, in a CUDA graph"
    table = table_of(title, ["T", *(f"K {width}" for width in widths)])
    for T in dict.fromkeys(row["T"] for row in rows):
        cells = [[row for row in rows if row["T"] == T and row["K"] == width] for width in widths]
        table.add_row(f"{T:,}", *(" | ".join(map(regime_cell, pair)) for pair in cells))
    return table


def regime_cell(row: Record) -> str:
    return f"{row['graph_both_ms']:.2f}" if "graph_both_ms" in row else cell(row, "graph")


def cell(row: Record, mode: str) -> str:
    if "wrong" in row or "failed" in row:
        return "[red]wrong[/red]" if "wrong" in row else "failed"
    ms = [row.get(f"{mode}_{part}_ms") for part in ("forward", "both")]
    return " / ".join(f"{x:.3f}" for x in ms if x is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    if args.plot:
        draw(record, args.plot)
    show(record)


if __name__ == "__main__":
    main()
