"""The bodies of requests: what OpenAI's interface takes, what of it is supported, and a few extensions."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rebased.config import did_you_mean

MAX_TOP = 20  # most probable tokens per token
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    include_usage: bool = False


class Settings(BaseModel):
    """What completions and chats have in common.

    A field that is not here, and is not neutral, is refused: what a client asks for should not be ignored silently.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    # fields that some clients send and that ask for nothing at these values
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0, None),
        "presence_penalty": (0, None),
        "logit_bias": (None, {}),
        "best_of": (None, 1),
        "suffix": (None, ""),
        "response_format": (None, {"type": "text"}),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "service_tier"),
        *("parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
    )

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("the body is not a JSON object")
        kept = {}
        for key, asked in value.items():
            if key in cls.model_fields:
                if isinstance(asked, bool) and cls.model_fields[key].annotation in (int | None, float | None):
                    raise ValueError(f"{key} should be a number; got {str(asked).lower()}")
                kept[key] = asked
            elif key in cls.neutral:
                if asked not in cls.neutral[key]:
                    raise ValueError(f"{key} is not supported by this server; leave it out")
            elif key not in cls.ignored:
                raise ValueError(f"unknown field {key[:80]!r}; {did_you_mean(key[:80], list(cls.model_fields))}")
        return kept

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"give at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS:,} characters")
        return stops

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Settings):
    """The body of a request to /v1/completions."""

    prompt: Any = [""]  # a text, tokens, or a list of either; checked by hand: the error should say what is wrong
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @field_validator("prompt")
    @classmethod
    def _texts_or_tokens(cls, value: Any) -> list[str | list[int]]:
        value = "" if value is None else value
        each = [value] if isinstance(value, str) or _are_tokens(value) else value
        if not isinstance(each, list) or not all(isinstance(one, str) or one == [] or _are_tokens(one) for one in each):
            raise ValueError("give a string, a list of token ids, or a list of either")
        if not each:
            raise ValueError("the list of prompts is empty")
        return each


class Part(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatRequest(Settings):
    """The body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class TokenizeRequest(BaseModel):
    """The body of a request to /tokenize, as in vLLM. Special tokens are never added."""

    prompt: str
    model: str | None = None


class DetokenizeRequest(BaseModel):
    """The body of a request to /detokenize."""

    tokens: list[int]
    model: str | None = None


def _are_tokens(value: Any) -> bool:
    """Whether a value is a list of at least one whole number."""
    return isinstance(value, list) and set(map(type, value)) == {int}
