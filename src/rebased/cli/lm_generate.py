"""rebased lm generate: what a trained language model writes after prompts, as it is written."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from cyclopts import Parameter
from rich.console import Console

from rebased.cli import INTERRUPTED
from rebased.cli.model_options import DEFAULT_MODEL, ModelOptions
from rebased.cli.output import STDOUT, TO_TERMINAL, Output, Terminal, progress_bars, say
from rebased.cli.text_output import TextOutput
from rebased.config import plural
from rebased.files import parse_json
from rebased.models import GenerateOptions, Generation, Sampling
from rebased.models.decoder import PREFILL_CHUNK
from rebased.runs.load import TextModel
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.shipped import find_model, model_name
from rebased.train.interrupt import stop_request

Texts = Annotated[tuple[str, ...], Parameter(negative="", show_default=False, allow_leading_hyphen=True)]


@Parameter(name="*")
@dataclass(frozen=True)
class WritingOptions:
    """What is written: GenerateOptions as a command takes them.

    Parameters
    ----------
    max_tokens
        How many tokens to write at most, per sequence.
    temperature
        1 is the model's own distribution; 0 always takes the most probable token.
    top_k
        Draw only from the k most probable tokens; 0 for all.
    top_p
        Draw only from the most probable tokens that together reach this probability; 1 for all.
    min_p
        Draw only from tokens with at least this share of the largest probability; 0 for all.
    repetition_penalty
        Above 1: tokens that are there already become less probable.
    stop
        Text that ends a sequence; it is not written. Can be given several times.
    seed
        Of the draws.
    n
        How many sequences to write per prompt.
    ignore_end
        Go on after the token that ends a text.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Texts = ()
    seed: int = 0
    n: int = 1
    ignore_end: Annotated[bool, Parameter(negative="")] = False

    def checked(self) -> GenerateOptions:
        """Return them as the model takes them. Raises ValueError."""
        given = asdict(self)
        return GenerateOptions(ignore_end_of_text=given.pop("ignore_end"), **given)


DEFAULT_WRITING = WritingOptions()


def lm_generate(
    model: Path | None = None,
    /,
    *,
    prompt: Texts = (),
    file: Path | None = None,
    writing: WritingOptions = DEFAULT_WRITING,
    batch_size: int = 64,
    batch_invariant: Annotated[bool, Parameter(negative="")] = False,
    opening: ModelOptions = DEFAULT_MODEL,
    to: Output = TO_TERMINAL,
) -> int:
    """Write text after prompts, token by token. The same command writes the same text.

    Parameters
    ----------
    model
        A run's folder, a model.safetensors, or a name of `rebased list models`. Default: lm/stdlib-bytes, a small
        model of Python code.
    prompt
        The text to go on from. Can be given several times; prompts of any lengths are written at once. Default: the
        text on stdin, without its last line break; in a terminal the beginning of a text.
    file
        Prompts, one per line; or .jsonl with one {"prompt": "..."} per line.
    batch_size
        How many sequences are written at once; the others wait.
    batch_invariant
        Give each sequence the same tokens and log-probabilities, to the bit, whatever others are written with it.
        Slower.
    """
    to.check()
    where = opening.import_code()
    prompts = collect_prompts(prompt, file)
    opened = opening.open(model, where)
    with options_in_errors(*asdict(writing), slots="batch_size"):
        generation = opened.model.stream(
            prompts,
            writing.checked(),
            tokenizer=opened.tokenizer,
            slots=batch_size,
            batch_invariant=batch_invariant,
        )
    if opening.cuda_graph and where.type == "cuda":
        generation.capture()
    begin = time.perf_counter()
    console, made = Console(highlight=False), 0
    with stop_request() as request:
        read(generation)
        output = None if to.quiet or to.json == STDOUT else TextOutput(console, generation)
        while not request.check() and (token := next(generation, None)):
            made += 1
            if output:
                output.write(token)
    seconds = time.perf_counter() - begin
    if output:
        output.close()
    about = {"code": describe_code(), "machine": describe_machine(where)}
    to.emit(describe(opened, generation, model, made, seconds) | about)
    if made and console.is_terminal and not to.quiet:
        rate = f"{plural(made, 'token')} in {seconds:.1f} s, {made / seconds:,.0f} tokens/s"
        size = generation.state_bytes / generation.slots / 1e6
        say(Terminal(stderr=True), f"{rate}; a sequence's state takes {size:,.2f} MB")
    return INTERRUPTED if request.asked else 0


@contextmanager
def options_in_errors(*arguments: str, **renamed: str) -> Iterator[None]:
    """An error that begins with one of these arguments, max_tokens, begins with the option instead, --max-tokens."""
    options = {argument: argument for argument in arguments} | renamed
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name not in options:
            raise
        raise ValueError(f"--{options[name].replace('_', '-')} {rest}") from error


def read(generation: Generation) -> None:
    """Read the first prompts and make the first tokens; a progress bar shows how far a long prompt is read."""
    if max(map(len, generation.prompts)) <= PREFILL_CHUNK:
        generation.advance()
        return
    with progress_bars(Console(stderr=True)) as begin_bar:
        generation.advance(begin_bar("reading prompts"))


def describe(
    opened: TextModel, generation: Generation, model: Path | None, made: int, seconds: float
) -> dict[str, Any]:
    """Everything about a generation as JSON data."""
    found, options = generation.result(), asdict(generation.options)
    sequences = {
        "prompt": list(map(opened.tokenizer.decode, generation.prompts)),
        "prompt_tokens": generation.prompts,
        "text": found.texts,
        "tokens": found.tokens,
        "logprobs": found.logprobs,
        "finish_reason": found.finish_reasons,
    }
    ending = ("max_tokens", "stop", "end_of_text", "ignore_end_of_text")
    return {
        "model": model_name(find_model(model)),
        "parameters": opened.model.num_parameters(),
        "tokenizer": opened.tokenizer.name,
        "sampling": {each.name: options[each.name] for each in fields(Sampling)},
        "ending": {name: options[name] for name in ending},
        "batch_invariant": generation.batch_invariant,
        "new_tokens": made,
        "seconds": seconds,
        "state_bytes": generation.state_bytes,
        "sequences": [dict(zip(sequences, each, strict=True)) for each in zip(*sequences.values(), strict=True)],
    }


MAX_BYTES = 2**28  # of a file of prompts, or of stdin


def collect_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of --prompt, or of --file, or the text on stdin; in a terminal without any of them, an empty one."""
    if given and file is not None:
        raise ValueError("give --prompt or --file, not both")
    if file is not None:
        return read_prompt_file(file)
    if given:
        return list(given)
    if sys.stdin is None or sys.stdin.isatty():
        return [""]
    return [read_text(sys.stdin.buffer, "stdin").removesuffix("\n")]


def read_prompt_file(path: Path) -> list[str]:
    """One prompt per line that is not blank; in a .jsonl file one JSON object per line, {"prompt": "..."}."""
    with open(path, "rb") as stream:
        lines = [line.removesuffix("\r") for line in read_text(stream, str(path)).split("\n")]
    numbered = {f"{path}, line {number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if not numbered:
        raise ValueError(f"{path} has no prompts; write one per line")
    if path.suffix not in (".jsonl", ".ndjson"):
        return list(numbered.values())
    prompts = []
    for where, line in numbered.items():
        found = parse_json(line, where)
        if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
            raise ValueError(f'{where} should be an object with a text, such as {{"prompt": "def main("}}')
        prompts.append(found["prompt"])
    return prompts


def read_text(stream: BinaryIO, where: str) -> str:
    """All that can be read, which must be UTF-8 and not too large."""
    content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{where} has more than {MAX_BYTES:,} bytes; give a smaller text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{where}, line {line} is not UTF-8: {error.reason} at byte {error.start:,}") from error
