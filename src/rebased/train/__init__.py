"""Training: one lifecycle for all runs, whatever is trained; sweeps of many runs and where they are executed."""

from rebased.train.lifecycle import Diverged, RunResult, train
from rebased.train.sinks import RunStart, Sink, StepReport

__all__ = ["Diverged", "RunResult", "RunStart", "Sink", "StepReport", "train"]
