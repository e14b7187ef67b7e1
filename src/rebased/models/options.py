"""What is asked of a generation, in one object: `generate`, `stream`, the commands and the server pass it on."""

from dataclasses import dataclass

from rebased.data.detokenize import StopStrings
from rebased.models.sampling import Sampling


@dataclass(frozen=True)
class GenerateOptions(Sampling):
    """How tokens are chosen (Sampling), how many sequences are written, and when each of them ends.

    Args:
        temperature, top_k, top_p, min_p, repetition_penalty, seed: see Sampling.
        max_tokens: how many tokens a sequence gets at most. Default 256.
        n: how many sequences are written per prompt. Default 1.
        stop: strings that end a sequence; they need a tokenizer.
        end_of_text: the token that ends a sequence. Default: the tokenizer's, if there is one.
        ignore_end_of_text: whether a sequence goes on after that token. Default False.
    """

    max_tokens: int = 256
    n: int = 1
    stop: tuple[str, ...] = ()
    end_of_text: int | None = None
    ignore_end_of_text: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens!r} is not a number of tokens; give 1 or more")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n {self.n!r} is not a number of sequences per prompt; give 1 or more")
        if isinstance(self.stop, str):
            raise ValueError(f"stop {self.stop!r} should be a list of strings; write [{self.stop!r}]")
        object.__setattr__(self, "stop", tuple(self.stop))
        StopStrings(self.stop)  # an error if one is empty
