"""Probes of synthetic tasks and of text, against loops over single questions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rebased.analysis.attention import UNIT, soft_iou
from rebased.data.windows import Windows
from rebased.evaluate.attention_layers import MOST_CELLS, captured_inputs, sequences_at_once
from rebased.evaluate.probe import probe_task
from rebased.evaluate.probe_text import probe_text
from rebased.mixers import register_mixer
from rebased.models import LanguageModel, LMConfig
from rebased.tasks import IGNORE, MQAR, Copying, Examples, ForgettingMQAR


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(*mixers: Any, vocab_size: int = 32, max_len: int = 32) -> LanguageModel:
    return LanguageModel(LMConfig(vocab_size=vocab_size, d_model=12, max_len=max_len, mixers=mixers)).eval()


SMALL = {"name": "rebased", "n_heads": 2, "key_width": 4}


@pytest.mark.parametrize(
    "task",
    [MQAR(seq_len=16, kv_pairs=3, vocab_size=32), ForgettingMQAR(seq_len=20, kv_pairs=3, updates=2, vocab_size=32)],
)
def test_measures_are_those_of_single_questions(task: MQAR) -> None:
    model, examples = build("previous_token", SMALL), task.build(7, 0)
    found = probe_task(model, task, examples)
    (layer,) = found["layers"]
    with captured_inputs(model) as inputs, torch.no_grad():
        model(examples.inputs)
    A = model.blocks[1].mixer.attention_map(inputs[1]).detach()  # [N,H,T,T]
    masses, ious = [], []
    for i in range(7):
        at = (examples.labels[i] != IGNORE).nonzero().squeeze(1).tolist()
        context = task.context_length
        assert context == task.seq_len - 2 * task.n_slots
        # The last place before the questions that shows the label: the value that counts.
        places = [max(j for j in range(context) if examples.inputs[i, j] == examples.labels[i, t]) for t in at]
        masses.append(torch.stack([A[i, :, t, j] for t, j in zip(at, places, strict=True)]).mean(0))
        truth = torch.zeros(1, len(at), context)
        for row, j in enumerate(places):
            truth[0, row, j] = 1
        ious.append(soft_iou(A[i : i + 1, :, at, :context], truth)[0])
        for t, j in zip(at, places, strict=True):
            assert examples.inputs[i, j - 1] == examples.inputs[i, t]  # it follows the key that is asked for
    mass, iou = torch.stack(masses).mean(0), torch.stack(ious).mean(0)
    assert layer["mass"]["by_head"] == pytest.approx(mass.tolist(), abs=2e-6)
    assert layer["iou"]["by_head"] == pytest.approx(iou.tolist(), abs=2e-6)
    assert layer["best_head"] == int(iou.argmax())
    assert layer["iou"]["mean"] == pytest.approx(float(iou.mean()), rel=1e-5)
    low, high = layer["iou"]["interval"]
    assert low < layer["iou"]["mean"] < high
    asked = examples.labels != IGNORE
    right = model(examples.inputs).argmax(-1) == examples.labels
    assert found["accuracy"] == float(right[asked].double().mean())


class Uniform(nn.Module):
    """The mean of all tokens so far."""

    n_heads = 1

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_attention(self.attention_map(x), x)

    def attention_map(self, x: Tensor) -> Tensor:
        ones = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return ones / ones.sum(-1, keepdim=True)

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        return self.out(attention.squeeze(1) @ x)


def test_uniform_attention_has_the_entropy_and_noise_of_none() -> None:
    register_mixer("uniform")(Uniform)
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=32)
    found = probe_task(build("previous_token", "uniform"), task, task.build(5, 0))
    (layer,) = found["layers"]
    visible = torch.arange(9.0, 16.0, 2)  # questions at 8, 10, 12, 14 see so many tokens
    assert layer["mass"]["mean"] == pytest.approx(float((1 / visible).mean()), rel=1e-5)
    assert layer["entropy"]["mean"] == pytest.approx(float(visible.log().mean()), rel=1e-5)
    assert layer["noisy"]["mean"] == 0
    assert layer["similarity"] is None  # no function of q . k
    drawn = layer["drawn"][0]
    assert drawn["queries"] == [8, 10, 12, 14]
    assert drawn["best"][0] == [round(UNIT / 9)] * 8
    assert found["not_drawn"] is None


def test_similarity_is_the_mixers_and_never_below_its_minimum() -> None:
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=32)
    model = build("previous_token", {"name": "based", "n_heads": 2, "key_width": 4})
    part = probe_task(model, task, task.build(9, 0))["layers"][0]["similarity"]
    assert 0.5 <= part["least"] <= part["mean"]
    step = (part["scores"]["high"] - part["scores"]["low"]) / len(part["similarity"])
    s = part["scores"]["low"] + step / 2
    assert part["similarity"][0] == pytest.approx(1 + s + s * s / 2, rel=1e-4)
    assert sum(part["scores"]["density"]) * step == pytest.approx(1, abs=0.02)
    assert part["pairs"] == 9 * 2 * (9 + 11 + 13 + 15)
    assert part["learned"] is None
    assert 0 == part["small"]["0.001"] <= part["small"]["0.5"] <= 1


def test_the_learned_parabola_is_found_again() -> None:
    """With one feature per head the similarity is a function of q . k, up to beta: (g u)^2 has its root at zero."""
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=32)
    model = build("previous_token", {"name": "rebased", "n_heads": 1, "key_width": 4, "qk_transform": "scale"})
    with torch.no_grad():
        model.blocks[1].mixer.ln_q.weight.fill_(3.0)
    part = probe_task(model, task, task.build(9, 0))["layers"][0]["similarity"]
    learned = part["learned"]
    assert learned["explained"] == pytest.approx(1, abs=1e-4)
    a, *_ = learned["parabola"]
    assert a * part["mean"] == pytest.approx(9, rel=1e-3)
    assert learned["lowest"] == pytest.approx(0, abs=1e-3)


def test_what_cannot_be_probed_is_named() -> None:
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=32)
    examples = task.build(2, 0)
    with pytest.raises(
        ValueError, match=r"no layer of this model has an attention matrix: its mixers are short_conv, mamba"
    ):
        probe_task(build("short_conv", "mamba"), task, examples)
    copying = Copying(seq_len=48, vocab_size=32)
    with pytest.raises(ValueError, match=r"task 'copying' does not say where its answers stand"):
        probe_task(build("previous_token", SMALL, max_len=48), copying, copying.build(2, 0))
    mixers = {1: build("previous_token", SMALL).blocks[1].mixer}
    assert sequences_at_once(mixers, 16, "") > 1
    with pytest.raises(ValueError, match=r"the attention matrices of 100,000 tokens and 2 heads have .* give less"):
        sequences_at_once(mixers, 100_000, "give less")
    assert MOST_CELLS < 2 * 100_000**2


def test_fewer_examples_are_scored_where_they_have_more_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebased.evaluate.similarity.PAIRS", 3 * 2 * 4 * 16)
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=32)
    part = probe_task(build("previous_token", SMALL), task, task.build(9, 0))["layers"][0]["similarity"]
    assert part["pairs"] == 3 * 2 * (9 + 11 + 13 + 15)


def test_long_sequences_are_measured_and_not_drawn() -> None:
    task = MQAR(seq_len=1028, kv_pairs=257, vocab_size=1200)
    model = build("previous_token", SMALL, vocab_size=1200, max_len=1028)
    found = probe_task(model, task, task.build(1, 0))
    assert found["layers"][0]["drawn"] == []
    assert found["not_drawn"] == "257 questions x 514 positions are too many to draw: at most 131,072 cells"


def test_rows_without_a_question_count_for_nothing() -> None:
    """A row with one question, beside rows with more, gives what it gives alone."""
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=32)
    model, examples = build("previous_token", SMALL), task.build(3, 0)
    labels = examples.labels.clone()
    first = int((labels[0] != IGNORE).nonzero()[0])
    labels[0, first + 1 :] = IGNORE
    alone = probe_task(model, task, Examples(examples.inputs[:1], labels[:1]))["layers"][0]
    rest = probe_task(model, task, Examples(examples.inputs[1:], labels[1:]))["layers"][0]
    together = probe_task(model, task, Examples(examples.inputs, labels))["layers"][0]
    for name in ("iou", "mass", "entropy", "noisy"):
        assert together[name]["mean"] == pytest.approx((alone[name]["mean"] + 2 * rest[name]["mean"]) / 3, rel=1e-5)


class Stream:
    """Tokens in memory, with documents that end before these positions."""

    def __init__(self, tokens: list[int], ends: list[int]) -> None:
        self.tokens, self.ends = np.array(tokens), np.array(ends)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        return self.ends[(self.ends > start) & (self.ends <= stop)]


# "1 2 1 2": the last 2 is AR, last seen 2 tokens ago. The label of position 2 is that 2; it should look at position 1.
TEXT = [1, 2, 1, 2, 5, 6, 7, 5, 6, 9]


def windows(isolate: bool = False) -> Windows:
    return Windows(Stream(TEXT, [4, 10]), 9, isolate_documents=isolate)


@pytest.mark.parametrize("isolate", [False, True])
def test_the_token_after_the_previous_occurrence(isolate: bool) -> None:
    model = build("short_conv", {"name": "attention", "n_heads": 2, "dropout": 0.0})
    found = probe_text(model, windows(isolate), [0])
    tokens = torch.tensor([TEXT[:9]])
    with captured_inputs(model) as inputs, torch.no_grad():
        model.hidden(tokens, torch.tensor([0, 4, 9], dtype=torch.int32) if isolate else None)
    mixer = model.blocks[1].mixer.requires_grad_(False)
    if isolate:
        first, second = mixer.attention_map(inputs[1][:, :4]), mixer.attention_map(inputs[1][:, 4:])
        expected = {2: first[0, :, 2, 1], 3: second[0, :, 3, 1]}
        uniform = {2: 1 / 3, 3: 1 / 4}
    else:
        A = mixer.attention_map(inputs[1])[0]
        expected = {2: A[:, 2, 1], 3: A[:, 7, 5]}  # "5 6" comes again, 3 tokens later
        uniform = {2: 1 / 3, 3: 1 / 8}
    assert found["ar_tokens"] == 2
    (layer,) = found["layers"]
    both = torch.stack(list(expected.values())).mean(0)
    assert layer["by_head"] == pytest.approx(both.tolist(), abs=1e-5)
    assert layer["mean"] == pytest.approx(float(both.mean()), rel=1e-5)
    assert [(each["nearest"], each["farthest"], each["tokens"]) for each in found["distances"]] == [(2, 3, 2)]
    assert found["uniform"] == pytest.approx(sum(uniform.values()) / 2)
    assert found["best"] == {"layer": 1, "head": int(both.argmax())}


def test_a_text_without_repetition_is_refused() -> None:
    stream = Stream(list(range(10)), [10])
    with pytest.raises(ValueError, match="these windows have no AR token"):
        probe_text(build("short_conv", SMALL), Windows(stream, 9), [0])
