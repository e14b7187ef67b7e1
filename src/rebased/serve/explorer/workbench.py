"""The workbench: the models that an explorer shows, and the answers to its questions about them, as JSON."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from pydantic import ValidationError

from rebased.analysis.attention import UNIT
from rebased.config import did_you_mean, explain
from rebased.evaluate.attention_layers import attention_of
from rebased.evaluate.readout import Predictions, measure_recall, predict_next, read_out, read_pairs
from rebased.mixers import can_extend, has_attention_map, mixer_name
from rebased.models import IGNORE, LanguageModel
from rebased.runs.load import RecallModel, TextModel
from rebased.runs.run_names import kind_of
from rebased.serve.answers import END, TokenNames
from rebased.serve.errors import ApiError
from rebased.serve.explorer.schema import MAX_TOKENS, AttentionBody, CurveBody, RecallBody, SequenceBody, TextBody
from rebased.tasks import MQAR

EXAMPLES = 64
"""Sequences that recall is measured on, the same for every model."""
CURVE_SEED = 1
TOP = 5
MAX_READ = 2048
"""Questions that are put to states: keys times moments."""

Explorable = RecallModel | TextModel


class Workbench:
    """Models by name, and what can be asked about each. The first is shown at the left, `right` beside it."""

    def __init__(self, models: Mapping[str, Explorable], left: str, right: str | None) -> None:
        self.models, self.left, self.right = dict(models), left, right
        self._names = {name: TokenNames(each.tokenizer) for name, each in models.items() if isinstance(each, TextModel)}
        self._measured = lru_cache(maxsize=4096)(self._measure)

    def about(self) -> dict[str, Any]:
        """Return all models with their sizes, and which two are shown first."""
        models = [_describe(name, each) for name, each in self.models.items()]
        return {"models": models, "left": self.left, "right": self.right, "max_tokens": MAX_TOKENS, "unit": UNIT}

    def draw(self, body: SequenceBody) -> dict[str, Any]:
        """Return an MQAR sequence of so many pairs, always the same for a seed."""
        task = _task(self._recall(body.model), body.pairs, body.seq_len)
        return {"tokens": task.build(1, body.seed, split="test").inputs[0].tolist()}

    def recall(self, body: RecallBody) -> dict[str, Any]:
        """Return the pairs and questions of a sequence, and what is predicted at each token."""
        opened, tokens = self._recall(body.model), body.tokens
        model = opened.model
        _check_tokens(model, tokens)
        found = read_pairs(tokens, first_value(opened))
        answers = {question.position: question.answer for question in found.questions}
        labels = [answers.get(position, IGNORE) for position in range(len(tokens))]
        return {
            "tokens": tokens,
            "pairs": [pair._asdict() for pair in found.pairs],
            "questions": [question._asdict() for question in found.questions],
            "predictions": _predictions(predict_next(model, tokens, labels, TOP)),
            "state": _state(model, len(tokens)),
        }

    def readout(self, body: RecallBody) -> dict[str, Any]:
        """Return how well each key can be read out of the state after every second token, or a few of those moments.

        Every second, because pairs are two tokens long: between them a key would follow a key.
        """
        opened, tokens = self._recall(body.model), body.tokens
        _check_tokens(opened.model, tokens)
        limit = opened.model.config.length_limit or len(tokens) + 1  # a question needs one more position
        moments = list(range(2, min(len(tokens) + 1, limit), 2))
        pairs = read_pairs(tokens, first_value(opened)).pairs
        step = max(1, -(-len(moments) * len(pairs) // MAX_READ))
        try:
            found = read_out(opened.model, tokens, pairs, moments[::-1][::step][::-1])
        except ValueError as error:  # a mixer without a state
            raise ApiError(400, str(error), param="model") from error
        return found._asdict() | {"probability": _rounded(found.probability), "rank": found.rank.tolist()}

    def curve(self, body: CurveBody) -> dict[str, Any]:
        """Return the accuracy at one number of pairs, on EXAMPLES sequences, with a 95 % interval."""
        return self._measured(body.model, body.pairs, body.seq_len)

    def text(self, body: TextBody) -> dict[str, Any]:
        """Return the tokens of a text and what is predicted after each of them.

        A text begins with the end-of-text token where the tokenizer has one, so that its first token is predicted too.
        """
        opened = self._find(body.model)
        if not isinstance(opened, TextModel):
            raise ApiError(400, f"{body.model} was trained to recall, not on text; ask /api/recall", param="model")
        tokenizer, names, tokens = opened.tokenizer, self._names[body.model], opened.tokenizer.encode(body.text)
        if tokenizer.end_of_text is not None:
            tokens = [tokenizer.end_of_text, *tokens]
        _check_tokens(opened.model, tokens, "the text")
        found = predict_next(opened.model, tokens, [*tokens[1:], IGNORE], TOP)
        losses = [-math.log(max(p, 1e-30)) for p in found.target[:-1].tolist()]
        size = len(body.text.encode()) if tokenizer.end_of_text is not None else 0  # else the first is not predicted

        def name(token: int) -> str:
            return END if token == tokenizer.end_of_text else names[token]

        return {
            "tokens": tokens,
            "texts": [name(token) for token in tokens],
            "predictions": _predictions(found, name),
            "loss": sum(losses) / len(losses) if losses else None,
            "bits_per_byte": sum(losses) / math.log(2) / size if size else None,
            "state": _state(opened.model, len(tokens)),
        }

    def attention(self, body: AttentionBody) -> dict[str, Any]:
        """Return the attention of each token to those before it and itself, in units of 1 / UNIT: T rising rows."""
        model = self._find(body.model).model
        _check_tokens(model, body.tokens)
        try:
            A = attention_of(model, torch.tensor(body.tokens), body.layer)  # [H,T,T]
        except ValueError as error:
            raise ApiError(400, str(error), param="layer") from error
        if body.head is not None and body.head >= len(A):
            raise ApiError(400, f"head {body.head} is out of range: layer {body.layer} has {len(A)}", param="head")
        chosen = A.mean(0) if body.head is None else A[body.head]
        rows = (chosen * UNIT).round().int().tolist()
        return {"rows": [row[: i + 1] for i, row in enumerate(rows)]}

    def _find(self, name: str) -> Explorable:
        if name not in self.models:
            hint = did_you_mean(name[:100], list(self.models))
            raise ApiError(404, f"no model is called {name[:100]!r}; {hint}", param="model")
        return self.models[name]

    def _recall(self, name: str) -> RecallModel:
        found = self._find(name)
        if not isinstance(found, RecallModel):
            raise ApiError(400, f"{name} was trained on text, not to recall; ask /api/text", param="model")
        return found

    def _measure(self, name: str, pairs: int, seq_len: int) -> dict[str, Any]:
        opened = self._recall(name)
        task = _task(opened, pairs, seq_len)
        return {"pairs": pairs, **measure_recall(opened.model, task, EXAMPLES, CURVE_SEED)._asdict()}


def check_comparable(left: str, right: str, models: Mapping[str, Explorable]) -> None:
    """Raise ValueError if two models cannot read one sequence, or one text."""
    a, b = models[left], models[right]
    if type(a) is not type(b):
        text, other = (left, right) if isinstance(a, TextModel) else (right, left)
        raise ValueError(f"{text} was trained on text and {other} to recall; give two runs of one kind")
    if isinstance(a, RecallModel) and isinstance(b, RecallModel) and a.task.vocab_size != b.task.vocab_size:
        sizes = f"{a.task.vocab_size:,} and {b.task.vocab_size:,}"
        raise ValueError(f"{left} and {right} have {sizes} tokens, so no sequence is for both; give one of them")


def first_value(opened: RecallModel) -> int:
    """Return the smallest token that is a value."""
    return opened.task.vocab_size // 2


def longest(opened: RecallModel) -> int:
    """Return the length of the longest MQAR sequence that is drawn for a model: an even number."""
    limits = [MAX_TOKENS, opened.task.vocab_size - 1, opened.model.config.length_limit or MAX_TOKENS]
    return min(limits) // 2 * 2


def _task(opened: RecallModel, pairs: int, seq_len: int) -> MQAR:
    """The task with other sizes. Raises ApiError if they do not go together."""
    if seq_len > longest(opened):
        message = f"seq_len {seq_len} is more than this model's {longest(opened)}"
        raise ApiError(400, message, param="seq_len")
    task: Any = opened.task
    try:
        return MQAR(vocab_size=task.vocab_size, seq_len=seq_len, kv_pairs=pairs, alpha=task.alpha)
    except ValidationError as error:
        raise ApiError(400, explain(error), param="pairs") from error


def _check_tokens(model: LanguageModel, tokens: Sequence[int], what: str = "the sequence") -> None:
    """Raise ApiError if a model cannot read these tokens, or they are too many to draw."""
    limit, size = model.config.length_limit, model.config.vocab_size
    if limit is not None and len(tokens) > limit:
        raise ApiError(400, f"{what} has {len(tokens):,} tokens, more than the model's {limit:,} positions; shorten it")
    if len(tokens) > MAX_TOKENS:
        raise ApiError(400, f"{what} has {len(tokens):,} tokens, more than the {MAX_TOKENS} that are drawn; shorten it")
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise ApiError(400, f"token {wrong} is out of range; the model has tokens 0 to {size - 1}", param="tokens")


def _describe(name: str, opened: Explorable) -> dict[str, Any]:
    model = opened.model
    about: dict[str, Any] = {
        "name": name,
        "mixer": kind_of(model.config.model_dump()),
        "parameters": model.num_parameters(),
        "vocab_size": model.config.vocab_size,
        "layers": [
            {"layer": n, "mixer": mixer_name(block.mixer), "heads": int(getattr(block.mixer, "n_heads", 1))}
            for n, block in enumerate(model.blocks)
            if has_attention_map(block.mixer)
        ],
        "mixers": list(dict.fromkeys(mixer_name(block.mixer) for block in model.blocks)),
    }
    if isinstance(opened, TextModel):
        return about | {"kind": "text", "tokenizer": opened.tokenizer.name}
    pairs = [segment.settings()["kv_pairs"] for segment in opened.task.train]
    lengths = [segment.seq_len for segment in (*opened.task.train, *opened.task.test)]
    return about | {
        "kind": "recall",
        "vocab_size": opened.task.vocab_size,
        "first_value": first_value(opened),
        "trained_pairs": [min(pairs), max(pairs)],
        "seq_len": min(max(lengths), longest(opened)),
        "longest": longest(opened),
    }


def _state(model: LanguageModel, seq_len: int) -> dict[str, Any] | None:
    """The bytes of the state after so many tokens, and whether more tokens need more; None without a state."""
    if not all(can_extend(block.mixer) for block in model.blocks):
        return None
    now, later = model.state_size(seq_len), model.state_size(2 * seq_len)
    return {"bytes": now * model.embedding.weight.element_size(), "grows": later > now}


def _predictions(found: Predictions, name: Callable[[int], str] | None = None) -> list[dict[str, Any]]:
    """One per position: the likeliest tokens with their probabilities, and how likely the right one is."""
    if found.probabilities.isnan().any():
        raise ApiError(400, "the model predicts NaN here: its weights are damaged, or overflow on these tokens")
    rows, columns = (
        [],
        (found.tokens.tolist(), _rounded(found.probabilities), found.target.tolist(), found.rank.tolist()),
    )
    for tokens, likely, target, rank in zip(*columns, strict=True):
        row: dict[str, Any] = {"top": list(zip(tokens, likely, strict=True))}
        if name is not None:
            row["texts"] = [name(token) for token in tokens]
        if rank >= 0:
            row |= {"probability": round(target, 6), "rank": rank}
        rows.append(row)
    return rows


def _rounded(numbers: torch.Tensor) -> list[list[float]]:
    return [[round(number, 5) for number in row] for row in numbers.tolist()]
