"""What the shipped sweeps would cost in GPU hours, from recorded steps: arithmetic, no GPU needed.

    PYTHONPATH=src python benchmarks/sweep_hours.py
    PYTHONPATH=src python benchmarks/sweep_hours.py table1-small figure1-small

ReBased's step in TF32 at several lengths and widths (the newest train-*.json that has section `targets`) gives
nanoseconds per token as a line in D. Another model costs in proportion to its step beside ReBased's at D = 64 and the
nearest length (the newest train-*.json with section `presets`, bf16). Evaluation counts a third of training a token.
One run at a time, every epoch trained: runs side by side and early stops make it less.
"""

import argparse
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rebased.models import LMConfig, preset
from rebased.models.presets import mqar_preset_names
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import Segment
from rebased.train.sweep.grid import load_sweep

ROOT = Path(__file__).parents[1]
SWEEPS = ("table1", "heads", "figure1", "figure7", "extrapolation")


ROWS = 512  # sequences of a recorded step
EVALUATED = 1 / 3  # a forward pass, of the three that a training step costs


class Speeds(NamedTuple):
    """Recorded speeds. `records` are the names of the files that they are from."""

    shapes: Sequence[dict[str, Any]]  # ReBased in TF32: {"T", "D", "ms"} of a step of ROWS sequences
    presets: Sequence[dict[str, Any]]  # every model at D = 64: {"preset", "T", "ms"}
    records: Sequence[str]

    def nanoseconds(self, d_model: int) -> float:
        """Of ReBased per token of training: a line in D by least squares, each shape with the faster of its modes."""
        best: dict[tuple[int, int], float] = {}
        for row in self.shapes:
            at = row["T"], row["D"]
            best[at] = min(best.get(at, math.inf), 1e6 * row["ms"] / (ROWS * row["T"]))
        widths, times = [D for _, D in best], list(best.values())
        middle, level = sum(widths) / len(widths), sum(times) / len(times)
        slope = sum((D - middle) * (t - level) for D, t in zip(widths, times, strict=True))
        slope /= sum((D - middle) ** 2 for D in widths)
        return level + slope * (d_model - middle)

    def seconds(self, preset: str, d_model: int, seq_len: int, examples: float) -> float:
        """To train a model on so many examples once. It costs in proportion to its step beside ReBased's at D = 64 and
        the nearest length."""
        steps = {(row["preset"], row["T"]): row["ms"] for row in self.presets}
        near = min({T for _, T in steps}, key=lambda T: abs(math.log(T / seq_len)))
        ratio = steps[preset, near] / steps["rebased", near]
        return examples * seq_len * ratio * self.nanoseconds(d_model) * 1e-9


def read_speeds(folder: Path) -> Speeds:
    """The speeds in the newest records of a folder such as benchmarks/results."""
    shapes = newest_rows(folder, "targets", widths=2, preset="rebased", precision="tf32")  # for a line in D
    presets = newest_rows(folder, "presets", precision="bf16", mode="captured")
    return Speeds(
        picked(shapes[1], "T", "D", "ms"),
        picked(presets[1], "preset", "T", "ms"),
        list(dict.fromkeys(name for name, _ in (shapes, presets) if name)),
    )


def picked(rows: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Rows with these keys alone."""
    return [{key: row[key] for key in keys} for row in rows]


def newest_rows(folder: Path, section: str, widths: int = 1, **wanted: Any) -> tuple[str, list[dict[str, Any]]]:
    """The name of the newest record of training steps that has such rows, of so many widths D, and the rows."""
    for path in sorted(folder.glob("train-*-cuda.json"), reverse=True):
        rows = [row for row in json.loads(path.read_text())["rows"] if row["section"] == section and "ms" in row]
        rows = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        if len({row.get("D") for row in rows}) >= widths:
            return path.name, rows
    raise ValueError(f"no record in {folder} has section {section} with {wanted}")


def preset_of(model: LMConfig) -> str:
    mixers = [mixer.name for mixer in model.mixers]
    for name in mqar_preset_names():
        if [mixer.name for mixer in _preset(name).mixers] == mixers:
            return name
    raise ValueError(f"no step of a model with the mixers {', '.join(mixers)} was recorded")


@cache
def _preset(name: str) -> LMConfig:
    return preset(name, d_model=64, max_len=256)


def run_hours(run: SyntheticRunConfig, speeds: Speeds) -> float:
    name, D = preset_of(run.model), run.model.d_model

    def seconds(segments: Sequence[Segment], share: float) -> float:
        return sum(speeds.seconds(name, D, segment.seq_len, share * segment.examples) for segment in segments)

    task = run.task
    return run.train.epochs * (seconds(task.train, 1) + seconds((*task.test, *task.held_out), EVALUATED)) / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", default=SWEEPS, help="names of files in configs/sweeps")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of records")
    args = parser.parse_args()
    logging.getLogger("rebased").setLevel(logging.ERROR)  # widths that heads do not divide: runs warn about them
    print_hours(args.sweeps, args.results)


def print_hours(names: Sequence[str], results: Path) -> None:
    """One line per sweep: its runs, its hours, and their share per length."""
    try:
        speeds = read_speeds(results)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    start = speeds.nanoseconds(0)
    print(f"ReBased: {start:.1f} + {speeds.nanoseconds(1) - start:.3f} D ns per token ({', '.join(speeds.records)})")
    for name in names:
        points = [point.config for point in load_sweep(find_config(name, "sweep"), {}).points]
        lengths: Counter[int] = Counter()
        try:
            for run in points:
                lengths[max(segment.seq_len for segment in run.task.train)] += run_hours(run, speeds)
        except ValueError as error:
            print(f"{name:20} {len(points):6,} runs  {'unknown':>14}   {error}")
            continue
        hours = sum(lengths.values())
        parts = ", ".join(f"T = {T:,} {lengths[T] / hours:.0%}" for T in sorted(lengths))
        cost = f"{hours:.0f} GPU hours" if hours > 1 else f"{60 * hours:.0f} minutes"
        print(f"{name:20} {len(points):6,} runs  {cost:>14}   {parts}")


if __name__ == "__main__":
    main()
