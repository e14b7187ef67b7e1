"""Answers in OpenAI's shape: whole ones, chunks of a stream, log-probabilities and usage."""

import time
import uuid
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rebased.data.tokenizer import ByteTokenizer, Tokenizer
from rebased.models import FinishReason
from rebased.models.job import Job, Made, PromptRead, Scored

END = "<|endoftext|>"  # how clients write the end-of-text token, whatever the tokenizer calls it


class TokenNames:
    """The text of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """The token's text; where it has none of its own: bytes:\\xe2 for a byte, token_id:7 for others."""
        if token not in self._known:
            text = self._tokenizer.decode([token])
            if not text or "\ufffd" in text:
                is_byte = isinstance(self._tokenizer, ByteTokenizer) and token < 256
                text = f"bytes:\\x{token:02x}" if is_byte else f"token_id:{token}"
            self._known[token] = text
        return self._known[token]

    def raw(self, token: int) -> list[int] | None:
        """The bytes of the token's text; None if they are not known."""
        if isinstance(self._tokenizer, ByteTokenizer):
            return [token] if token < 256 else None
        name = self[token]
        return None if name.startswith("token_id:") else list(name.encode())


@dataclass
class ChoiceSoFar:
    """What a choice has got."""

    texts: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    characters: int = 0  # of the tokens in `scored`, where log-probabilities say at which offset each begins


class Answer:
    """The answer to a job as it comes: choices, usage, and how both look in JSON.

    `chat` says which of the two interfaces it is for. `echoes` are the texts of the prompts where these come before
    what was made.
    """

    def __init__(
        self, model: str, names: TokenNames, job: Job, *, chat: bool = False, echoes: list[str] | None = None
    ) -> None:
        self.names, self.chat, self.echoes, self.n = names, chat, echoes, job.options.n
        self.with_logprobs = job.top is not None
        self.choices = [ChoiceSoFar() for _ in range(job.count)]
        self.prompt_tokens = sum(map(len, job.prompts))
        self.cached_tokens = self.made_tokens = 0
        prefix, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    def begin(self, read: PromptRead) -> list[tuple[int, str, list[Scored]]]:
        """Note that a prompt is read. Returns (choice, text, tokens) where choices begin with it."""
        self.cached_tokens += read.cached
        if self.echoes is None:
            return []
        numbers = range(read.prompt * self.n, (read.prompt + 1) * self.n)
        return [self._add(number, self.echoes[read.prompt], read.scores) for number in numbers]

    def add(self, made: Made) -> tuple[int, str, list[Scored]]:
        """Note tokens. Returns (choice, text, tokens) that are new."""
        choice, text = self.choices[made.sequence], made.text
        if self.chat and not any(choice.texts):
            text = text.lstrip()  # the space after "Assistant:"
        choice.finish_reason = made.finish_reason
        self.made_tokens += len(made.scored)
        return self._add(made.sequence, text, made.scored)

    def _add(self, number: int, text: str, scored: list[Scored]) -> tuple[int, str, list[Scored]]:
        self.choices[number].texts.append(text)
        self.choices[number].scored += scored
        return number, text, scored

    @property
    def done(self) -> bool:
        """Whether all choices are over."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request that is no stream."""
        choices = []
        for number, choice in enumerate(self.choices):
            text = "".join(choice.texts)
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self.chat else {"text": text}
            choices.append(self._choice(number, content, choice.scored, choice.finish_reason))
        return {**self.head, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks before any text: in a chat, whose turn it is."""
        begin = {"delta": {"role": "assistant", "content": ""}}
        numbers = range(len(self.choices) if self.chat else 0)
        return [self._chunk([{"index": n, **begin, "logprobs": None, "finish_reason": None}]) for n in numbers]

    def chunk(self, number: int, text: str, scored: list[Scored], finish: FinishReason | None) -> dict[str, Any]:
        """Return one chunk of a stream."""
        delta = {"delta": {"content": text} if text or finish is None else {}} if self.chat else {"text": text}
        return self._chunk([self._choice(number, delta, scored, finish)])

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk that tells the usage."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made_tokens,
            "total_tokens": self.prompt_tokens + self.made_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {**self.head, "object": "chat.completion.chunk"} if self.chat else self.head
        return {**head, "choices": choices}

    def _choice(
        self, number: int, content: dict[str, Any], scored: list[Scored], finish: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(self.choices[number], scored)
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, choice: ChoiceSoFar, scored: list[Scored]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return self._chat_logprobs(scored) if self.chat else self._completion_logprobs(choice, scored)

    def _chat_logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": self.names[token], "logprob": logprob, "bytes": self.names.raw(token)}

        content = [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]}
            for each in scored
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, choice: ChoiceSoFar, scored: list[Scored]) -> dict[str, Any]:
        tokens = [self.names[each.token] for each in scored]
        *offsets, choice.characters = accumulate(map(len, tokens), initial=choice.characters)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in scored],
            "top_logprobs": [self._top(each) for each in scored],
            "text_offset": offsets,
        }

    def _top(self, scored: Scored) -> dict[str, float] | None:
        """The most probable tokens by their text; of two with one text the more probable one. None without any."""
        if scored.logprob is None or not scored.top:
            return None
        top: dict[str, float] = {}
        for token, logprob in scored.top:
            top.setdefault(self.names[token], logprob)
        return top
