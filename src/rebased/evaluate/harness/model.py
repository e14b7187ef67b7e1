"""A LanguageModel as lm-evaluation-harness asks it: likelihoods of continuations and of texts, and greedy answers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rebased.data.tokenizer import Tokenizer
from rebased.evaluate.facts.episodes import Asked, Episode
from rebased.evaluate.facts.model_answers import answer_questions, to_batch
from rebased.evaluate.text import token_losses
from rebased.mixers import eval_mode
from rebased.models import LanguageModel

MAX_NEW_TOKENS = 256
"""Tokens that an answer has at most, where a task does not say."""
WINDOW = 2048
"""Tokens per window of a long text, for a model without a longest length."""

OnProgress = Callable[[str, int, int], None]
"""Called as on_progress(what is done, done, total)."""


class HarnessModel(TemplateLM):
    """A LanguageModel under the contract of lm-evaluation-harness.

    Args:
        model: the model.
        tokenizer: the tokenizer that it was trained with. It needs a token that ends texts, which begins them here.
        max_length: tokens that are read at most; earlier ones are cut off. Default: the model's positions, or for a
            model without positions no limit for continuations and windows of 2,048 for texts.
        batch_size: sequences per forward pass.
        dtype: precision of the layers (autocast). Default: that of the weights.
        on_progress: called as on_progress(what, done, total).
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        batch_size: int = 8,
        dtype: torch.dtype | None = None,
        on_progress: OnProgress = lambda what, done, total: None,
    ) -> None:
        super().__init__()
        if tokenizer.end_of_text is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has no token that ends a text, and texts begin with it here"
            )
        limit = model.config.length_limit
        if max_length is not None and not 1 <= max_length <= (limit or max_length):
            raise ValueError(f"{max_length} tokens are more than the model's {limit} positions; give 1 to {limit}")
        self.model, self._tokenizer, self._dtype = model, tokenizer, dtype
        self._limit = max_length or limit
        self._batch_size, self._on_progress = batch_size, on_progress

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        assert self._tokenizer.end_of_text is not None
        return self._tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        """Tokens per window of a long text."""
        return self._limit or WINDOW

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(ln p of the continuation, whether greedy decoding gives it) of each (_, context, continuation)."""
        episodes = [self._episode(context, continuation) for _, context, continuation in requests]
        answers = answer_questions(
            self.model,
            episodes,
            batch_size=self._batch_size,
            dtype=self._dtype,
            on_progress=lambda done, total: self._on_progress("continuations", done, total),
        )
        return [(-answer.nats, answer.correct) for answer in answers]

    def _episode(self, context: list[int], continuation: list[int]) -> Episode:
        if not continuation:
            raise ValueError("a task asks for a continuation without tokens")
        tokens = [*context, *continuation]
        if self._limit is not None:
            tokens = tokens[-(self._limit + 1) :]  # the last token is predicted, not read
        if len(tokens) <= len(continuation):
            raise ValueError(
                f"a continuation of {len(continuation)} tokens leaves no room for its context in {self._limit} tokens"
            )
        return Episode(tokens, [Asked(0, len(tokens) - len(continuation), len(tokens), 0)])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of each text, window by window: the harness's windows, each token predicted once."""
        windows = []
        for number, request in enumerate(requests):
            text = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(
                token_list=text, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, predicted in map(make_disjoint_window, pairs):
                asked = Asked(number, len(context), len(context) + len(predicted), 0)
                windows.append(Episode([*context, *predicted], [asked]))
        sums = [0.0] * len(requests)
        with torch.no_grad(), eval_mode(self.model):
            for first in range(0, len(windows), self._batch_size):
                batch = windows[first : first + self._batch_size]
                losses = token_losses(
                    self.model, *to_batch(batch, self.model.embedding.weight.device), dtype=self._dtype
                )
                for window, nats in zip(batch, losses.double().sum(1).tolist(), strict=True):
                    sums[window.asked[0].fact] -= nats
                self._on_progress("windows of text", min(first + self._batch_size, len(windows)), len(windows))
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to one of the strings that its task names."""
        answers = []
        for number, request in enumerate(requests):
            context, options = request.args
            answers.append(self._answer(context, dict(options)))
            self._on_progress("answers", number + 1, len(requests))
        return answers

    def _answer(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_NEW_TOKENS)))
        prompt = self.tok_encode(context) or [self.eot_token_id]
        if self._limit is not None:
            most = min(most, self._limit - 1)
            prompt = prompt[-(self._limit - most) :]
        drawn = bool(options.get("do_sample", False))
        made = self.model.generate(
            [prompt],
            max_tokens=most,
            temperature=float(options.get("temperature") or 1.0) if drawn else 0.0,
            top_k=int(options.get("top_k", 0)) if drawn else 0,
            top_p=float(options.get("top_p", 1.0)) if drawn else 1.0,
            stop=stop,
            tokenizer=self._tokenizer,
        )
        return made.texts[0]
