"""Training: a run is data, one loop trains it, and it can be ended and resumed at any moment."""

from rebased.train.config import RunConfig, TrainConfig
from rebased.train.evaluate import evaluate
from rebased.train.loop import Diverged, RunResult, train
from rebased.train.protocol import Protocol, Reported, reported
from rebased.train.record import read_record
from rebased.train.sinks import RunStart, Sink, StepReport
from rebased.train.weights import load_model, save_model

__all__ = [
    "Diverged",
    "Protocol",
    "Reported",
    "RunConfig",
    "RunResult",
    "RunStart",
    "Sink",
    "StepReport",
    "TrainConfig",
    "evaluate",
    "load_model",
    "read_record",
    "reported",
    "save_model",
    "train",
]
