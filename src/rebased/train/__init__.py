"""Training: one lifecycle for all runs, whatever is trained; sweeps of many runs and where they are executed."""

from rebased.train.sinks import RunStart, Sink, StepReport
from rebased.train.synthetic.loop import Diverged, RunResult, train

__all__ = ["Diverged", "RunResult", "RunStart", "Sink", "StepReport", "train"]
