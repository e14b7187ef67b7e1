"""One training step: gradients do not depend on micro batches; AdamW is the paper's; precision is a setting."""

from functools import partial

import pytest
import torch

from rebased.models import IGNORE, LanguageModel, preset
from rebased.models.presets import mqar_preset_names
from rebased.runs.synthetic_config import Precision
from rebased.tasks import Examples, Questions, find_questions
from rebased.train.optimiser import build_optimiser, set_lr
from rebased.train.precision import matmul_precision
from rebased.train.synthetic.step import Step
from tiny_run import tiny
from tolerances import assert_near

NO_BF16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on some CPUs
CONFIG = tiny({"model": {"embed_dropout": 0.0}})
SUMS = (8, 8, 12, 8, 8) * 2 + (8, 24)
"""Roundings of two layers and the head: norm, projection, tokens, projection, norm; logits, the vocabulary."""
BACK = (*SUMS, *SUMS, 10 * 12)
"""Roundings of gradients: forward, backward, and over all tokens."""


def make() -> tuple[LanguageModel, Examples, Questions]:
    """A batch whose rows have very different numbers of labels, so that a mean of means would differ."""
    torch.manual_seed(0)
    model = LanguageModel(CONFIG.model).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    inputs = torch.randint(24, (10, 12))
    labels = torch.where(torch.rand(10, 12) < torch.linspace(0, 1, 10)[:, None], inputs, IGNORE)
    batch = Examples(inputs, labels)
    return model, batch, find_questions(batch)


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 10, 99])
def test_accumulated_gradients_are_those_of_the_full_batch(micro_batch: int) -> None:
    model, batch, questions = make()
    reference = model.loss(batch.inputs, batch.labels)
    expected = torch.autograd.grad(reference, list(model.parameters()))
    mean, labels = Step(model, build_optimiser(model, CONFIG.train), micro_batch=micro_batch).backward(questions)
    assert_near(mean, reference, *SUMS)
    assert labels == (batch.labels != IGNORE).sum()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_near(parameter.grad, gradient, *BACK)


def test_gates_and_norms_can_be_kept_from_decay() -> None:
    model, _, _ = make()
    kept = build_optimiser(model, CONFIG.train.model_copy(update={"decay": "matrices"})).param_groups[1]
    assert kept["weight_decay"] == 0
    assert {id(p) for p in kept["params"]} == {id(p) for p in model.parameters() if p.ndim == 1}


def test_the_step_is_adamw_with_decay_on_every_parameter() -> None:
    model, _, questions = make()
    optimiser = build_optimiser(model, CONFIG.train)
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1]
    assert {id(p) for p in optimiser.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    Step(model, optimiser)(questions, torch.arange(10))
    lr = CONFIG.train.lr
    for parameter, old in zip(model.parameters(), before, strict=True):  # the first step of Adam has m = g, v = g^2
        gradient = parameter.grad
        assert gradient is not None
        new = old * (1 - lr * 0.1) - lr * gradient / (gradient.abs() + 1e-8)
        assert_near(parameter, new, 4, condition=1 / (1 - 0.999))  # the rounding of 1 - beta2


def test_gradients_do_not_pile_up_over_steps() -> None:
    model, _, questions = make()
    optimiser = build_optimiser(model, CONFIG.train)
    set_lr(optimiser, 0.0)
    Step(model, optimiser)(questions, torch.arange(10))
    first = model.embedding.weight.grad
    Step(model, optimiser)(questions, torch.arange(10))
    assert model.embedding.weight.grad is not None
    assert first is not None
    assert_near(model.embedding.weight.grad, first, *BACK)


def test_rows_are_taken_in_the_order_given() -> None:
    model, batch, questions = make()
    rows = torch.tensor([7, 2, 9])
    expected = model.loss(batch.inputs[rows], batch.labels[rows]).detach()
    mean, _ = Step(model, build_optimiser(model, CONFIG.train))(questions, rows)
    assert_near(mean, expected, *SUMS)


@NO_BF16
@pytest.mark.parametrize("name", mqar_preset_names())
def test_bf16_leaves_weights_and_gradients_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(preset(name, d_model=24, vocab_size=32, max_len=16))
    inputs = torch.randint(32, (2, 16))
    questions = find_questions(Examples(inputs, torch.where(inputs < 16, inputs, IGNORE)))
    optimiser, rows = build_optimiser(model, CONFIG.train), torch.arange(2)
    set_lr(optimiser, 0.0)
    model.eval()  # without dropout
    full, _ = Step(model, optimiser)(questions, rows)
    half, _ = Step(model, optimiser, precision="bf16")(questions, rows)
    assert half != full
    assert_near(half, full, dtype=torch.bfloat16)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize(("precision", "inside"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "highest")])
def test_matmul_precision_is_the_runs_own(precision: Precision, inside: str) -> None:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with matmul_precision(precision):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(former)


@NO_BF16
def test_the_whole_model_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With aot_eager: it traces, but does not spend a minute on generating code."""
    compile_ = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compile_(function))
    config = tiny({"model": {"embed_dropout": 0.0, "mixers": ["short_conv", "attention"]}})
    model, (_, _, questions) = LanguageModel(config.model).eval(), make()
    means = [
        Step(model, build_optimiser(model, config.train), precision="bf16", compile=compiled).backward(questions)
        for compiled in (False, True)
    ]
    assert_near(means[1][0], means[0][0], dtype=torch.bfloat16)
    assert means[1][1] == means[0][1]
