"""An answer is correct where greedy decoding gives it: compared with decoding token by token."""

import pytest
import torch

from rebased.evaluate.facts.episodes import Asked, Episode, build_recall
from rebased.evaluate.facts.model_answers import answer_questions
from rebased.evaluate.facts.sources import Fact
from rebased.models import LanguageModel, LMConfig
from tolerances import TRAINED

VOCAB = 6


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    mixers = ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]
    model = LanguageModel(
        LMConfig.model_validate({"vocab_size": VOCAB, "d_model": 16, "max_len": 40, "mixers": mixers})
    )
    with torch.no_grad():
        model.embedding.weight.mul_(40)
    return model


def episodes() -> list[Episode]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for length in range(12, 40):
        tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        made.append(Episode(tokens, [Asked(length, 4, 6, 3), Asked(length + 100, length - 1, length, 1)]))
    return made


@torch.no_grad()
def test_equal_to_greedy_decoding(model: LanguageModel) -> None:
    model.eval()
    answers = answer_questions(model, episodes(), batch_size=5)
    want = []
    for episode in episodes():
        for asked in episode.asked:
            said = list(episode.tokens[: asked.begin])
            nats = 0.0
            for token in episode.tokens[asked.begin : asked.end]:
                nats -= float(model(torch.tensor([episode.tokens[: len(said)]]))[0, -1].log_softmax(-1)[token])
                said.append(int(model(torch.tensor([said]))[0, -1].argmax()))
            right = said[asked.begin :] == episode.tokens[asked.begin : asked.end]
            want.append((asked.fact, asked.distance, right, nats, asked.end - asked.begin))
    assert [answer[:3] for answer in answers] == [entry[:3] for entry in want]
    assert [answer.tokens for answer in answers] == [entry[4] for entry in want]
    assert [answer.nats for answer in answers] == pytest.approx([entry[3] for entry in want], rel=TRAINED)
    assert {answer.correct for answer in answers} == {True, False}
    assert any(answer.correct and answer.tokens == 2 for answer in answers)


def test_mode_and_progress(model: LanguageModel) -> None:
    model.train()
    seen: list[tuple[int, int]] = []
    found = answer_questions(
        model, episodes(), batch_size=10, on_progress=lambda done, total: seen.append((done, total))
    )
    assert model.training
    assert found == answer_questions(model.eval(), episodes(), batch_size=10)
    assert seen == [(10, 28), (20, 28), (28, 28)]
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        answer_questions(model, episodes(), batch_size=0)


class Copier(LanguageModel):
    """A model with perfect recall: it predicts what followed the last occurrence of the past two tokens."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        says = torch.zeros(*tokens.shape, self.config.d_model)
        for row, read in enumerate(tokens.tolist()):
            for t in range(1, len(read)):
                seen = [i for i in range(1, t) if read[i - 1 : i + 1] == read[t - 1 : t + 1]]
                says[row, t, read[seen[-1] + 1] if seen else 0] = 1.0
        return says


def test_perfect_recall_is_told_from_guessing() -> None:
    facts = [Fact("", f"{i:03} is", f" {i * 37 % 101:03}", "\n", "\n", i) for i in range(30)]
    names: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [names.setdefault(word, len(names) + 1) for word in text.replace("\n", " \n").split(" ") if word]

    def run(condition: str) -> float:
        found = answer_questions(model, recall.episodes[condition])  # type: ignore[index]
        return sum(answer.correct for answer in found) / len(found)

    recall = build_recall(facts, encode, length=60, questions=30)
    config = {"vocab_size": 128, "d_model": 128, "max_len": 60, "mixers": ["short_conv"], "n_layers": 1}
    model = Copier(LMConfig.model_validate(config))
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(128))
    assert (run("present"), run("absent"), run("alone")) == (1.0, 0.0, 0.0)
