"""What the shipped sweeps would cost in GPU hours, from recorded steps: arithmetic, no GPU needed.

    PYTHONPATH=src python benchmarks/sweep_hours.py
    PYTHONPATH=src python benchmarks/sweep_hours.py table1-small figure1-small

ReBased's step in TF32 at several lengths and widths (the newest train-*.json that has section `targets`) gives
nanoseconds per token as a line in D. Another model costs in proportion to its step beside ReBased's at D = 64 and the
nearest length (the newest train-*.json with section `presets`, bf16). Evaluation counts a third of training a token.
One run at a time, every epoch trained: runs side by side and early stops make it less.
"""

import argparse
import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rebased.models import LMConfig, preset
from rebased.models.presets import mqar_preset_names
from rebased.paper.cost import EVALUATED, Speeds, read_speeds
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import Segment
from rebased.train.sweep import read_sweep

ROOT = Path(__file__).parents[1]
SWEEPS = ("table1", "heads", "figure1", "figure7", "extrapolation")


def preset_of(model: LMConfig) -> str:
    mixers = [mixer.name for mixer in model.mixers]
    for name in mqar_preset_names():
        if [mixer.name for mixer in _preset(name).mixers] == mixers:
            return name
    raise ValueError(f"no preset has the mixers {mixers}")


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
        points = [point.config for point in read_sweep(find_config(name, "sweep"), {})]
        lengths: Counter[int] = Counter()
        for run in points:
            lengths[max(segment.seq_len for segment in run.task.train)] += run_hours(run, speeds)
        hours = sum(lengths.values())
        parts = ", ".join(f"T = {T:,} {lengths[T] / hours:.0%}" for T in sorted(lengths))
        cost = f"{hours:.0f} GPU hours" if hours > 1 else f"{60 * hours:.0f} minutes"
        print(f"{name:20} {len(points):6,} runs  {cost:>14}   {parts}")


if __name__ == "__main__":
    main()
