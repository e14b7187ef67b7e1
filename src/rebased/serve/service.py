"""The service: a request's body becomes a job of the engine, and the engine's events an answer or a stream."""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from rebased.data.tokenizer import Tokenizer
from rebased.models import GenerateOptions
from rebased.models.generation import TooLong, read_prompts
from rebased.models.job import Event, Job, Made, PromptRead, Scored
from rebased.serve.answers import END, Answer, TokenNames
from rebased.serve.bodies import BODY_SECONDS, Body, read_body
from rebased.serve.client import Closed, EngineClient, Full
from rebased.serve.errors import OUR_ERROR, ApiError
from rebased.serve.metrics import Metrics
from rebased.serve.responses import JSON, Stream, client_leaves
from rebased.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Message, Settings, TokenizeRequest

_log = logging.getLogger("rebased")

DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's interface; a chat gets all that is allowed


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how long its client may take."""

    max_tokens: int = 4096  # tokens that are made per choice
    seconds: float = 300.0
    choices: int = 128  # prompts times n
    body_bytes: int = 4 * 2**20
    body_seconds: float = BODY_SECONDS
    send_seconds: float = 30.0  # in which a client must take a chunk of a stream
    ping_seconds: float = 15.0  # after which a stream without news sends a comment


class Service:
    """A model with a name, its engine, and what requests may ask for: bodies become jobs, events become answers.

    For the page: `trained_on` names the text that the model was trained on, if it is known. `example` is a text that
    the model goes on from; if it is empty, the model begins a text.
    """

    def __init__(
        self,
        name: str,
        engine: EngineClient,
        limits: Limits,
        api_key: str | None = None,
        trained_on: str = "",
        example: str = "",
    ) -> None:
        self.name, self.engine, self.limits, self.api_key = name, engine, limits, api_key
        self.trained_on, self.example = trained_on, example
        self.tokenizer, self.config, self.context = engine.tokenizer, engine.about.config, engine.about.context
        self.names, self.metrics, self.created = TokenNames(engine.tokenizer), Metrics(engine), int(time.time())

    def about(self) -> dict[str, Any]:
        """Return the model as /v1/models lists it, with a description in words and the example."""
        mixers = " and ".join(dict.fromkeys(mixer.name for mixer in self.config.mixers))
        words = f"A language model of {self.engine.about.parameters:,} parameters: {self.config.n_layers} layers of "
        words += f"{mixers}, tokenizer {self.tokenizer.name}"
        words += f", trained on {self.trained_on}." if self.trained_on else "."
        known = {"id": self.name, "object": "model", "created": self.created, "owned_by": "rebased"}
        example = None if not self.example and self.tokenizer.end_of_text is None else self.example
        return known | {"max_model_len": self.context, "description": words, "example": example}

    def check_key(self, request: Request) -> None:
        """Raise ApiError 401 unless the request carries the API key, where there is one."""
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if a request names another model."""
        if name is not None and name != self.name:
            message = f"the model {name[:100]!r} is not served here; this is {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, request: Request, schema: type[Body]) -> Body:
        return await read_body(request, schema, self.limits.body_bytes, self.limits.body_seconds)

    async def complete(self, request: Request) -> Response:
        """Answer a request to /v1/completions."""
        body = await self._read(request, CompletionRequest)
        prompts = await asyncio.to_thread(self._prompt_tokens, body)
        tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens is 0 and echo is not set: there is nothing to answer", param="max_tokens")
        job = self._job(body, prompts, tokens)
        job.top, job.score_prompts = body.logprobs, bool(body.echo) and body.logprobs is not None
        echoes = None
        if body.echo:
            echoes = [
                given if isinstance(given, str) else self.tokenizer.decode(ids)
                for given, ids in zip(body.prompt, prompts, strict=True)
            ]
        return await self._respond(request, body, job, Answer(self.name, self.names, job, echoes=echoes))

    async def chat(self, request: Request) -> Response:
        """Answer a request to /v1/chat/completions."""
        body = await self._read(request, ChatRequest)
        tokens, marks = await asyncio.to_thread(render, body.messages, self.tokenizer)
        self._check_length(tokens, "messages")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = min(self.limits.max_tokens, self.context + 1 - len(tokens))
        if asked == 0:
            raise ApiError(400, "max_tokens is 0: there is nothing to answer", param="max_tokens")
        job = self._job(body, [tokens], room if asked is None else asked, stop=(STOP,))
        job.marks, job.keep_end = [marks], True
        job.top = (body.top_logprobs or 0) if body.logprobs else None
        return await self._respond(request, body, job, Answer(self.name, self.names, job, chat=True))

    async def tokenize(self, request: Request) -> Response:
        """Answer a request to /tokenize. END alone is the end-of-text token."""
        body = await self._read(request, TokenizeRequest)
        end = self.tokenizer.end_of_text
        is_end = body.prompt == END and end is not None
        tokens = [end] if is_end else await asyncio.to_thread(self.tokenizer.encode, body.prompt)
        return JSON({"count": len(tokens), "max_model_len": self.context, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Answer a request to /detokenize."""
        body = await self._read(request, DetokenizeRequest)
        size = self.config.vocab_size
        wrong = next((token for token in body.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise ApiError(400, f"token {wrong} is out of range; the model has tokens 0 to {size - 1}", param="tokens")
        return JSON({"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens)})

    async def tokenizer_info(self) -> dict[str, Any]:
        """Answer a request to /tokenizer_info."""
        end = None if self.tokenizer.end_of_text is None else END
        known = {"tokenizer_class": self.tokenizer.name, "vocab_size": self.tokenizer.vocab_size}
        return known | dict.fromkeys(("eos_token", "bos_token", "pad_token"), end) | {"model_max_length": self.context}

    def _prompt_tokens(self, body: CompletionRequest) -> list[list[int]]:
        try:
            prompts = read_prompts(body.prompt, self.tokenizer, self.config, self.tokenizer.end_of_text)
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            raise ApiError(400, str(error), param="prompt", code=code) from error
        for prompt in prompts:
            self._check_length(prompt, "prompt")
        return prompts

    def _check_length(self, tokens: list[int], param: str) -> None:
        if len(tokens) > self.context:
            message = (
                f"the prompt has {len(tokens):,} tokens, more than the {self.context:,} of the context; shorten it"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _job(self, body: Settings, prompts: list[list[int]], max_tokens: int, stop: tuple[str, ...] = ()) -> Job:
        """Return the job that a body asks for, checked; `stop` are strings that end a sequence besides the body's."""
        self.check_model(body.model)
        longest, n = max(map(len, prompts)), body.n or 1
        if max_tokens > self.limits.max_tokens:
            message = f"max_tokens {max_tokens:,} is more than this server's {self.limits.max_tokens:,} per request"
            raise ApiError(400, message, param="max_tokens")
        if longest + max_tokens > self.context + 1:
            message = f"{longest:,} tokens of prompt and max_tokens {max_tokens:,} are more than the context of "
            message += f"{self.context:,} tokens; ask for at most {self.context + 1 - longest:,}"
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        if len(prompts) * n > (limit := min(self.limits.choices, self.engine.max_waiting)):
            raise ApiError(400, f"prompts times n is {len(prompts) * n:,}, more than {limit:,} choices", param="n")
        fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: value for name in fields if (value := getattr(body, name)) is not None}
        try:
            options = GenerateOptions(
                **given,
                seed=secrets.randbits(62) if body.seed is None else body.seed,
                max_tokens=max(1, max_tokens),
                n=n,
                stop=(*(body.stop or ()), *stop),
                end_of_text=self.tokenizer.end_of_text,
                ignore_end_of_text=bool(body.ignore_eos),
            )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).split()[0]) from error
        return Job(prompts, options, only_read=max_tokens == 0)

    async def _respond(self, request: Request, body: Settings, job: Job, answer: Answer) -> Response:
        """Submit the job and return its answer: at once as a stream, or when it is whole."""
        events: asyncio.Queue[list[Event]] = asyncio.Queue()
        started, first = time.monotonic(), True

        def deliver(some: list[Event]) -> None:
            nonlocal first
            if first and any(isinstance(event, Made) for event in some):
                self.metrics.first.observe(time.monotonic() - started)
                first = False
            events.put_nowait(some)

        try:
            self.engine.submit(job, deliver, deadline=started + self.limits.seconds)
        except Full:
            message = "the server is full; try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="server_full") from None
        except Closed:
            raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down") from None
        if body.stream:
            stream, limits = self._stream(job, answer, events, body.with_usage), self.limits
            return Stream(stream, lambda: self.engine.cancel(job), limits.send_seconds, limits.ping_seconds)
        return await self._whole(request, job, answer, events)

    async def _whole(self, request: Request, job: Job, answer: Answer, events: asyncio.Queue[list[Event]]) -> Response:
        async def gather() -> None:
            async for _ in self._news(answer, events):
                pass

        gathering = asyncio.ensure_future(gather())
        leaving = asyncio.ensure_future(client_leaves(request.receive))
        try:
            await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                return Response(status_code=499)  # nobody reads it
            gathering.result()
            return JSON(answer.whole())
        finally:
            gathering.cancel()
            leaving.cancel()
            self.engine.cancel(job)

    async def _stream(
        self, job: Job, answer: Answer, events: asyncio.Queue[list[Event]], with_usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield the chunks of an answer as they come, in JSON."""

        def sent(chunk: dict[str, Any]) -> bytes:
            return orjson.dumps({**chunk, "usage": chunk.get("usage")} if with_usage else chunk)

        try:
            for chunk in answer.first_chunks():
                yield sent(chunk)
            async for news in self._news(answer, events):
                for number, (text, scored) in news.items():
                    finish = answer.choices[number].finish_reason
                    if text or finish or (answer.with_logprobs and scored):
                        yield sent(answer.chunk(number, text, scored, finish))
            if with_usage:
                yield sent(answer.last_chunk())
            yield b"[DONE]"
        except ApiError as error:  # the status is sent already
            yield orjson.dumps(error.body)
        except Exception:
            _log.exception("a stream failed")
            yield orjson.dumps(OUR_ERROR)

    async def _news(
        self, answer: Answer, events: asyncio.Queue[list[Event]]
    ) -> AsyncIterator[dict[int, tuple[str, list[Scored]]]]:
        """Add events to an answer until it is done. Yields the new text and tokens by choice.

        All events that are there come together: a client that is slow gets fewer and longer chunks.
        """
        while not answer.done:
            some = list(await events.get())
            while not events.empty():
                some += events.get_nowait()
            news: dict[int, tuple[str, list[Scored]]] = {}
            for event in some:
                for number, text, scored in self._note(answer, event):
                    before = news.get(number, ("", []))
                    news[number] = (before[0] + text, before[1] + scored)
            yield news

    def _note(self, answer: Answer, event: Event) -> list[tuple[int, str, list[Scored]]]:
        """Add an event to an answer. Returns what is new in it, and raises ApiError if the job failed."""
        if isinstance(event, PromptRead):
            return answer.begin(event)
        if isinstance(event, Made):
            return [answer.add(event)]
        if event.kind == "timeout":
            message = f"{event.message}: {self.limits.seconds:g} seconds"
            raise ApiError(408, message, kind="timeout_error", code="timeout")
        if event.kind == "stopped":
            raise ApiError(503, event.message, kind="server_error", code="shutting_down")
        raise ApiError(500, event.message, kind="server_error", code="model_failed")


NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
STOP = "\n\nUser:"
"""Models of plain text go on with the next question; the answer ends there."""


def render(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return a chat as tokens, and the numbers of tokens after which a message ends.

    The text is "User: Hello\\n\\nAssistant:", one paragraph per message. Each message is encoded by itself, so a chat
    that goes on begins with the tokens that it had before.
    """
    tokens, marks = list[int](), list[int]()
    for message in messages:
        tokens += tokenizer.encode(f"{NAMES[message.role]}: {message.text.strip()}\n\n")
        marks.append(len(tokens))
    tokens += tokenizer.encode("Assistant:")
    return tokens, marks
