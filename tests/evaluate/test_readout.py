"""What can be read out of a state: pairs and questions of any sequence, forks that change nothing, and recall."""

import pytest
import torch

from rebased.evaluate import readout
from rebased.evaluate.attention_layers import attention_of
from rebased.evaluate.readout import UNREAD, Pair, Question, measure_recall, predict_next, read_out, read_pairs
from rebased.models import IGNORE, LanguageModel, LMConfig
from rebased.tasks import MQAR, ForgettingMQAR

FIRST_VALUE = 12


def build(*mixers: str, positions: str = "none") -> LanguageModel:
    torch.manual_seed(0)
    arguments = {"rebased": {"n_heads": 1, "key_width": 4}, "based": {"n_heads": 1, "key_width": 4}}
    pattern = tuple({"name": name, **arguments.get(name, {})} for name in mixers)
    config = LMConfig(vocab_size=24, d_model=16, n_layers=2, max_len=20, mixers=pattern, positions=positions)  # type: ignore[arg-type]
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that predictions differ
    return model


def test_pairs_and_questions() -> None:
    tokens = [3, 20, 5, 13, 0, 5, 0, 3, 21, 3, 7, 5]
    found = read_pairs(tokens, FIRST_VALUE)
    assert found.pairs == [Pair(3, 20, 1), Pair(5, 13, 3), Pair(3, 21, 8)]
    assert found.questions == [Question(5, 5, 13, 3), Question(9, 3, 21, 8), Question(11, 5, 13, 3)]  # 7 is unknown


@pytest.mark.parametrize("tokens", [[], [0, 0], [15], [3], [3, 5], [20, 3]])
def test_sequences_that_say_nothing(tokens: list[int]) -> None:
    assert read_pairs(tokens, FIRST_VALUE) == ([], [])


@pytest.mark.parametrize(
    "task",
    [
        MQAR(vocab_size=24, seq_len=20, kv_pairs=4),
        ForgettingMQAR(vocab_size=32, seq_len=24, kv_pairs=4, updates=2),
    ],
)
def test_what_a_task_asks_is_found_again(task: MQAR) -> None:
    examples = task.build(20, 1)
    answers = task.answer_positions(examples)
    for tokens, labels, positions in zip(*(part.tolist() for part in (*examples[:2], answers)), strict=True):
        found = read_pairs(tokens, task.first_value)
        assert {question.position: question.answer for question in found.questions} == {
            i: label for i, label in enumerate(labels) if label != IGNORE
        }
        assert all(positions[question.position] == question.answer_position for question in found.questions)


@pytest.mark.parametrize(
    "mixers", [("short_conv", "rebased"), ("short_conv", "attention"), ("mamba", "sliding_window")]
)
def test_a_fork_answers_as_the_model_does_when_it_is_asked(mixers: tuple[str, str]) -> None:
    """Reading n tokens and then a key is one sequence of n + 1 tokens."""
    model, tokens = build(*mixers), [3, 20, 5, 13, 0, 0, 3, 21, 0, 0]
    pairs = read_pairs(tokens, FIRST_VALUE).pairs
    after = [2, 3, 7, 8, 10]
    found = read_out(model, tokens, pairs, after)
    assert (found.after, found.keys) == (after, [3, 5])
    right = {2: [20, None], 3: [20, None], 7: [20, 13], 8: [21, 13], 10: [21, 13]}
    for i, n in enumerate(after):
        for k, key in enumerate(found.keys):
            value = right[n][k]
            if value is None:
                assert (found.rank[i, k], found.probability[i, k]) == (UNREAD, 0)
                continue
            with torch.no_grad():
                likely = model(torch.tensor([[*tokens[:n], key]]))[0, -1].softmax(-1)
            assert found.probability[i, k] == pytest.approx(float(likely[value]), rel=1e-4)
            assert found.rank[i, k] == int((likely > likely[value]).sum())


def test_states_whose_first_axis_is_not_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be forked into rows, so every row is read."""
    model, tokens = build("short_conv", "rebased"), [3, 20, 5, 13, 0, 0, 3, 21, 0, 0]
    pairs = read_pairs(tokens, FIRST_VALUE).pairs
    forked = read_out(model, tokens, pairs, [2, 7, 10])
    monkeypatch.setattr(readout, "has_rows", lambda mixer: False)
    read = read_out(model, tokens, pairs, [2, 7, 10])
    torch.testing.assert_close(read.probability, forked.probability)
    assert torch.equal(read.rank, forked.rank)


def test_nothing_to_read_out() -> None:
    model = build("short_conv", "rebased")
    assert read_out(model, [0, 0], [], [2]).probability.shape == (1, 0)
    assert read_out(model, [3, 20], [Pair(3, 20, 1)], []).rank.shape == (0, 1)


def test_a_mixer_without_a_state_is_named() -> None:
    model = build("short_conv", "rebased")
    model.blocks[0].mixer = torch.nn.Identity()
    with pytest.raises(ValueError, match="mixer 'Identity' has no init_state"):
        read_out(model, [3, 20], [Pair(3, 20, 1)], [2])


def test_predictions() -> None:
    model, tokens = build("short_conv", "rebased"), [3, 20, 5, 13, 3]
    found = predict_next(model, tokens, [IGNORE, IGNORE, 7, IGNORE, 20], top=3)
    with torch.no_grad():
        likely = model(torch.tensor([tokens]))[0].softmax(-1)
    assert torch.equal(found.tokens, likely.topk(3).indices)
    torch.testing.assert_close(found.probabilities, likely.topk(3).values)
    assert found.target.isnan().tolist() == [True, True, False, True, False]
    assert found.target[4] == pytest.approx(float(likely[4, 20]), rel=1e-5)
    assert found.rank.tolist() == [
        -1,
        -1,
        int((likely[2] > likely[2, 7]).sum()),
        -1,
        int((likely[4] > likely[4, 20]).sum()),
    ]
    assert predict_next(model, tokens, tokens, top=1000).tokens.shape == (5, 24)


def test_the_attention_of_one_layer() -> None:
    model, tokens = build("short_conv", "attention"), torch.tensor([3, 20, 5, 13])
    A = attention_of(model, tokens, 1)
    assert A.shape == (1, 4, 4)
    torch.testing.assert_close(A.sum(-1), torch.ones(1, 4))
    with pytest.raises(ValueError, match="there is no layer 2: the model's are 0 to 1"):
        attention_of(model, tokens, 2)
    with pytest.raises(ValueError, match=r"mixer 'short_conv' .* has no attention matrix"):
        attention_of(model, tokens, 0)


def test_recall_of_an_untrained_model_is_chance() -> None:
    task = MQAR(vocab_size=24, seq_len=20, kv_pairs=4)
    found = measure_recall(build("short_conv", "rebased"), task, 50, 1)
    assert (found.asked, found.accuracy) == (200, found.correct / 200)
    assert found.low <= found.accuracy <= found.high
    assert found.accuracy < 0.3
    assert found == measure_recall(build("short_conv", "rebased"), task, 50, 1, batch_size=7)
