"""The step as a CUDA graph: when a shape is captured, and that captured steps give the same results."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_lm_run
from rebased.models import LanguageModel
from rebased.runs.run_config import Precision
from rebased.tasks import Questions, find_questions
from rebased.train import train
from rebased.train.cuda_graph import WARM_UP, own_stream
from rebased.train.optimiser import build_optimiser, set_lr
from rebased.train.synthetic.step import CapturedStep, Step
from tiny_run import AtStep, tiny, without_timings

CPU = torch.device("cpu")


class FakeGraph:
    """Replays like a CUDA graph: the same work, on what the buffers contain at that time."""

    recording: Any = None

    def replay(self) -> None:
        self.recorded()

    def pool(self) -> str:
        return "pool"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces torch's CUDA graphs by FakeGraph. The list receives the memory pool of each capture."""
    pools: list[Any] = []

    @contextmanager
    def capture(graph: FakeGraph, pool: Any, stream: Any) -> Iterator[None]:
        FakeGraph.recording = graph
        pools.append(pool)
        try:
            yield
        finally:
            FakeGraph.recording = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return pools


def make_questions(N: int, T: int) -> Questions:
    return Questions(
        torch.zeros(N, T, dtype=torch.int64), torch.zeros(N, 1, dtype=torch.int64), torch.arange(N)[:, None]
    )


def test_a_shape_is_captured_when_it_comes_the_fourth_time(captures: list[Any]) -> None:
    eager = 0

    def step(questions: Questions, rows: Tensor) -> Tensor:
        nonlocal eager
        outcome = torch.zeros(2)

        def work() -> None:
            outcome[0] = questions.targets[rows].sum()

        if FakeGraph.recording is None:
            eager += 1
            work()
        else:
            FakeGraph.recording.recorded = work
        return outcome

    captured, sets = CapturedStep(step, CPU), [make_questions(20, 4), make_questions(20, 6)]
    for questions, size in ((sets[0], 3), (sets[0], 2), (sets[1], 3)):
        for i in range(WARM_UP + 3):
            rows = torch.arange(i, i + size)
            assert captured(questions, rows)[0] == rows.sum(), (size, i)
    assert eager == 3 * WARM_UP
    assert captures == [None, "pool", "pool"]  # graphs share their memory


def test_a_step_that_cannot_be_captured_says_so(captures: list[Any]) -> None:
    def step(questions: Questions, rows: Tensor) -> Tensor:
        if FakeGraph.recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        return torch.zeros(2)

    captured, questions = CapturedStep(step, CPU), make_questions(4, 4)
    for _ in range(WARM_UP):
        captured(questions, torch.arange(2))
    with pytest.raises(
        ValueError, match=r"\(CUDA error: operation not permitted .* capturing\).*--train.capture false"
    ):
        captured(questions, torch.arange(2))


def gpu_losses(capture: bool, precision: Precision, micro_batch: int | None, steps: int = 12) -> list[list[float]]:
    """The losses of `steps` steps with dropout, two alternating shapes and a changing learning rate."""
    config = tiny({"train": {"micro_batch": micro_batch}, "model": {"embed_dropout": 0.3}})
    torch.manual_seed(0)
    device = torch.device("cuda")
    with own_stream(device):
        model = LanguageModel(config.model).to(device)
        optimiser = build_optimiser(model, config.train, capturable=True)
        step: Any = Step(model, optimiser, micro_batch=micro_batch, precision=precision)
        step = CapturedStep(step, device) if capture else step
        sets = [find_questions(examples) for examples in config.task.build(0, device).train]
        outcomes = []
        for i in range(steps):
            set_lr(optimiser, 0.01 / (i + 1))
            rows = torch.arange(8, device=device) if i % 3 else torch.arange(3, device=device)
            outcomes.append(step(sets[i % 2], rows).clone())
        torch.cuda.synchronize()
    return torch.stack(outcomes).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_captured_steps_are_the_steps(precision: Precision, micro_batch: int | None) -> None:
    eager, captured = (gpu_losses(capture, precision, micro_batch, steps=60) for capture in (False, True))
    torch.testing.assert_close(torch.tensor(captured), torch.tensor(eager), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_resumes(tmp_path: Path, precision: str) -> None:
    import os
    import signal

    config = tiny({"train": {"device": "cuda", "precision": precision}})
    train(config, tmp_path / "whole")
    stopped = train(config, tmp_path / "cut", sinks=[AtStep(11, lambda: os.kill(os.getpid(), signal.SIGINT))])
    assert stopped.status == "interrupted"
    train(config, tmp_path / "cut", resume=True)
    whole, cut = ([line["loss"] for line in without_timings(tmp_path / name)[1:-1]] for name in ("whole", "cut"))
    assert cut == pytest.approx(whole, rel=1e-4)  # the same batches and the same dropout


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{}, {"micro_batch": 3}, {"precision": "fp32"}, {"compile": "blocks"}, {"clip_norm": None}], ids=str
)
def test_a_language_model_learns_the_same_from_captured_steps(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With dropout, whose seed changes with each step, and a changing learning rate."""
    text = tiny_lm_run.write_text(tmp_path / "text")
    losses = []
    for capture in (False, True):
        settings = {"device": "cuda", "capture": capture, "steps": 30, "checkpoint_every": 10} | changes
        config = tiny_lm_run.tiny(text, {"train": settings, "model": {"embed_dropout": 0.2}})
        train(config, tmp_path / f"run-{capture}")
        losses.append(tiny_lm_run.losses(tmp_path / f"run-{capture}"))
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_captured_language_model_resumes(tmp_path: Path) -> None:
    import os
    import signal

    text = tiny_lm_run.write_text(tmp_path / "text")
    config = tiny_lm_run.tiny(
        text, {"train": {"device": "cuda", "capture": True, "steps": 20, "checkpoint_every": 100}}
    )
    train(config, tmp_path / "whole")
    stop = AtStep(11, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(config, tmp_path / "cut", sinks=[stop]).status == "interrupted"
    assert train(config, tmp_path / "cut", resume=True).status == "done"
    whole, cut = (torch.tensor(tiny_lm_run.losses(tmp_path / name)) for name in ("whole", "cut"))
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-3)
