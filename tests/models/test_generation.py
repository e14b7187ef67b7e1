"""Generation: what sequences get, when they end, and how they take slots."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from rebased.data.tokenizer import ByteTokenizer
from rebased.models import GenerateOptions, LanguageModel, LMConfig, decoder
from rebased.models.job import Job
from rebased.models.scheduler import Scheduler
from tolerances import assert_near

VOCAB, D = 257, 24
END = 256
BYTES = ByteTokenizer()
MIXERS = (
    "short_conv",
    {"name": "rebased", "n_heads": 3, "key_width": 4},
    {"name": "attention", "n_heads": 3},
    {"name": "sliding_window", "window": 4},
    "attention",
)
PROMPTS = [[1, 2, 3], [4], [5] * 17, [6, 7], [8] * 9]
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
SUMS = (D, D, 60, 10, D, 2 * D) * len(MIXERS) + (D, D, VOCAB)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    config = LMConfig(vocab_size=VOCAB, d_model=D, n_layers=len(MIXERS), max_len=64, mixers=MIXERS, positions="none")
    model = LanguageModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


@pytest.fixture(scope="module")
def bounded() -> LanguageModel:
    """With 16 learned positions."""
    torch.manual_seed(1)
    return LanguageModel(LMConfig(vocab_size=VOCAB, d_model=D, max_len=16, mixers=("short_conv",))).eval()


class Scripted(LanguageModel):
    """A model that always writes the same bytes, whatever it reads: after position p comes script[p + 1]."""

    def __init__(self, script: bytes) -> None:
        super().__init__(LMConfig(vocab_size=VOCAB, d_model=VOCAB, max_len=64, mixers=("short_conv",), n_layers=1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        assert self.positions is not None
        for place, token in enumerate([*script[1:], END]):
            self.positions.weight.data[place, token] = 10.0
        self.embedding.weight.data.copy_(torch.eye(VOCAB))
        self.norm.weight.data.fill_(1.0)
        self.blocks[0].norm2.weight.data.zero_()  # type: ignore[union-attr]
        self.eval()


def test_greedy_is_teacher_forcing_in_a_ragged_batch(model: LanguageModel) -> None:
    made = model.generate(PROMPTS, temperature=0.0, max_tokens=8)
    for prompt, tokens, logprobs, reason in zip(PROMPTS, made.tokens, made.logprobs, made.finish_reasons, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == scores.argmax(-1).tolist()
        assert_near(torch.tensor(logprobs), scores.amax(-1).float(), *SUMS, condition=8.0)
        assert (len(tokens), reason) == (8, "length")
    alone = [model.generate(prompt, temperature=0.0, max_tokens=8).tokens[0] for prompt in PROMPTS]
    assert alone == made.tokens
    assert model.generate(torch.tensor(PROMPTS[2]), temperature=0.0, max_tokens=8).tokens == [made.tokens[2]]


def test_slots_change_nothing_but_the_order_of_work(model: LanguageModel) -> None:
    wanted = model.generate(PROMPTS, max_tokens=6, seed=5, n=2, **DRAWN)
    for slots in (1, 3):
        stream = model.stream(PROMPTS, max_tokens=6, seed=5, n=2, slots=slots, **DRAWN)
        order = [token.sequence for token in stream]
        assert stream.result().tokens == wanted.tokens
        assert sorted(order) == sorted(i for i, tokens in enumerate(wanted.tokens) for _ in tokens)
    assert wanted.tokens[0] != wanted.tokens[1]  # two samples of one prompt
    assert wanted.tokens != model.generate(PROMPTS, max_tokens=6, seed=6, n=2, **DRAWN).tokens
    assert wanted == model.generate(PROMPTS, max_tokens=6, seed=5, n=2, **DRAWN)


def test_a_longer_generation_begins_like_a_shorter_one(model: LanguageModel) -> None:
    """Far beyond max_len: there are no positions that could run out."""
    short, long = (model.generate([3, 1], max_tokens=n, seed=2).tokens[0] for n in (10, 80))
    assert long[:10] == short
    assert len(long) == 80


def test_log_probabilities_are_the_models_own(model: LanguageModel) -> None:
    """Not those after temperature, filters and penalty."""
    made = model.generate([PROMPTS[0]], max_tokens=15, seed=1, **DRAWN)
    with torch.no_grad():
        scores = model(torch.tensor([PROMPTS[0] + made.tokens[0]]))[0, 2:-1].log_softmax(-1)
    wanted = scores.gather(1, torch.tensor(made.tokens[0]).unsqueeze(1)).squeeze(1)
    assert_near(torch.tensor(made.logprobs[0]), wanted.float(), *SUMS, condition=8.0)


def test_text_ends_at_the_end_of_text() -> None:
    model = Scripted(b"?Gr\xc3\xbc\xc3\x9fe")
    stream = model.stream("?", temperature=0.0, tokenizer=BYTES)
    assert [token.text for token in stream] == ["G", "r", "", "ü", "", "ß", "e", ""]
    made = stream.result()
    assert made.texts == ["Grüße"]
    assert made.finish_reasons == ["stop"]
    assert made.tokens[0][-1] == END
    cut = model.generate("?", temperature=0.0, tokenizer=BYTES, max_tokens=3)
    assert (cut.texts, cut.finish_reasons) == (["Gr\ufffd"], ["length"])
    assert len(model.generate([63], temperature=0.0, end_of_text=END, max_tokens=30).tokens[0]) == 8
    on = model.generate("?", temperature=0.0, tokenizer=BYTES, ignore_end_of_text=True, max_tokens=30)
    assert len(on.tokens[0]) == 30
    assert on.texts[0].startswith("Grüße")


def test_stop_strings() -> None:
    model = Scripted(b"?one, two, three")
    stream = model.stream("?", temperature=0.0, tokenizer=BYTES, stop=[", t", "zzz"])
    assert "".join(token.text for token in stream) == "one"
    made = stream.result()
    assert (made.texts, made.finish_reasons, len(made.tokens[0])) == (["one"], ["stop"], 6)
    assert model.generate("?", temperature=0.0, tokenizer=BYTES, stop=["three!"]).texts == ["one, two, three"]


def test_an_empty_prompt_begins_with_the_end_of_text(model: LanguageModel) -> None:
    made = model.generate("", tokenizer=BYTES, max_tokens=5)
    assert made.tokens == model.generate([END], max_tokens=5, end_of_text=END).tokens
    with pytest.raises(ValueError, match="prompt 2 of 2 is empty, and there is no end-of-text token"):
        model.generate([[1], []])


def test_learned_positions_end_a_sequence(bounded: LanguageModel) -> None:
    made = bounded.generate([[1] * 10, [2] * 16], max_tokens=100)
    assert [len(tokens) for tokens in made.tokens] == [7, 1]  # the last one is written, not read
    assert made.finish_reasons == ["length", "length"]
    with pytest.raises(ValueError, match="prompt 2 of 2 has 17 tokens, more than the model's 16 positions; shorten it"):
        bounded.generate([[1], [2] * 17])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], [257]]}, "prompt 2 of 2 has the token 257; the model's are 0 to 256"),
        ({"prompts": [[-1]]}, "the prompt has the token -1; the model's are 0 to 256"),
        ({"prompts": [[1.5]]}, "the prompt has the token 1.5"),
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": "text"}, "a prompt of text needs a tokenizer"),
        ({"prompts": [1], "stop": ["x"]}, "stop strings need a tokenizer"),
        ({"prompts": "x", "stop": "x", "tokenizer": BYTES}, r"stop 'x' should be a list of strings; write \['x'\]"),
        ({"prompts": "x", "stop": [""], "tokenizer": BYTES}, "a stop string is empty"),
        ({"prompts": [1], "max_tokens": 0}, "max_tokens 0 is not a number of tokens; give 1 or more"),
        ({"prompts": [1], "n": 0}, "n 0 is not a number of sequences per prompt"),
        ({"prompts": [1], "slots": 0}, "slots 0 is not a number of sequences at a time"),
        ({"prompts": [[1]] * 300, "n": 400}, r"120,000 sequences \(prompts times n\) are more than the 100,000"),
        ({"prompts": [1], "temperature": -1.0}, "temperature -1.0 is out of range"),
    ],
    ids=itertools.count(),
)
def test_wrong_arguments(model: LanguageModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(**arguments)


def test_a_tokenizer_that_does_not_fit() -> None:
    small = LanguageModel(LMConfig(vocab_size=100, d_model=D, mixers=("short_conv",))).eval()
    with pytest.raises(ValueError, match="the tokenizer bytes has 257 tokens and the model 100: it is not the one"):
        small.generate("x", tokenizer=BYTES)


def test_a_diverged_model_is_named(bounded: LanguageModel) -> None:
    broken = LanguageModel(bounded.config).eval()
    broken.embedding.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the model's logits are not finite after 2 tokens"):
        broken.generate([1, 2])


def test_a_huge_max_tokens_takes_no_memory_in_advance(model: LanguageModel) -> None:
    stream = model.stream([1, 2], max_tokens=10**12)
    assert len([next(stream) for _ in range(5)]) == 5
    assert stream.state_bytes < 2**21


def test_prefill_tells_how_far_it_is(model: LanguageModel) -> None:
    told: list[tuple[int, int]] = []
    stream = model.stream([[1] * 20], max_tokens=2)
    stream.advance(on_prefill=lambda done, total: told.append((done, total)))
    assert told == [(19, 20)]


def test_which_prompts_are_read_together(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "PREFILL_CHUNK", 100)

    def count_together(prompts: list[list[int]], slots: int) -> int:
        scheduler = Scheduler(decoder.Decoder(model, slots))
        scheduler.add(Job(prompts))
        scheduler._begin_together()
        return sum(len(reading.numbers) for reading in scheduler._reading)

    short, other, long = [1] * 10, [2] * 10, [3] * 100
    prompts = [short, short, other, long, short, other, [4], [5]]
    assert [count_together(prompts[begin:], 2) for begin in (0, 3, 4, 6)] == [3, 1, 2, 2]
    assert count_together(prompts, 1) == 2
    assert count_together([[0] * 50] * 3 + [[1]] * 2, 9) == 5  # the first is one prompt, thrice
    assert count_together([[n] * 50 for n in range(3)], 9) == 2


def test_options_are_an_object_or_words(model: LanguageModel) -> None:
    options = GenerateOptions(max_tokens=6, seed=5, n=2, **DRAWN)
    wanted = model.generate(PROMPTS, max_tokens=6, seed=5, n=2, **DRAWN)
    assert model.generate(PROMPTS, options) == wanted
    assert model.generate(PROMPTS, options, max_tokens=4).tokens == [tokens[:4] for tokens in wanted.tokens]
    with pytest.raises(TypeError, match="temprature"):
        model.generate(PROMPTS, temprature=0.5)


def test_several_prompts_are_one_pass(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    extend = model.extend_documents
    monkeypatch.setattr(model, "extend_documents", lambda some, states: read.append(len(some)) or extend(some, states))
    model.generate(PROMPTS, temperature=0.0, max_tokens=2, n=2)
    different = {tuple(prompt) for prompt in PROMPTS if len(prompt) > 1}
    assert read == [len(different)]
