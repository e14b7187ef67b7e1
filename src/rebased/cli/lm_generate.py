"""rebased lm generate: what a trained language model writes after prompts, as it is written."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from rich.console import Console

from rebased.cli import INTERRUPTED
from rebased.cli.imports import import_user_code
from rebased.cli.output import STDOUT, TO_TERMINAL, Output
from rebased.cli.prompts import collect_prompts
from rebased.cli.results import check_new, progress_bars
from rebased.cli.text_output import TextOutput
from rebased.models import Generation, load_generation, save_generation
from rebased.models.decoder import PREFILL_CHUNK
from rebased.ops.backend import choose_device
from rebased.runs.load import TextModel, open_text_model
from rebased.runs.provenance import describe_code, describe_machine
from rebased.train.interrupt import StopRequest, stop_request

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def lm_generate(
    model: Path | None = None,
    /,
    *,
    prompt: Annotated[tuple[str, ...], Parameter(negative="", show_default=False, allow_leading_hyphen=True)] = (),
    file: Path | None = None,
    max_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Annotated[tuple[str, ...], Parameter(negative="", show_default=False, allow_leading_hyphen=True)] = (),
    seed: int | None = None,
    n: int = 1,
    ignore_end: Annotated[bool, Parameter(negative="")] = False,
    batch_size: int = 64,
    batch_invariant: Annotated[bool, Parameter(negative="")] = False,
    save: Path | None = None,
    continue_: Annotated[Path | None, Parameter(name="--continue")] = None,
    tokenizer: str | None = None,
    data: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    cuda_graph: bool = True,
    imports: Annotated[tuple[str, ...], Parameter(name="--import", negative="", show_default=False)] = (),
    to: Output = TO_TERMINAL,
) -> int:
    """Write text after prompts, token by token. The same command writes the same text.

    Parameters
    ----------
    model
        A run's folder, or a model.safetensors. Default: the small model of Python code that comes with the package.
    prompt
        The text to go on from. Can be given several times; prompts of any lengths are written at once. Default: the
        text on stdin, without its last line break; in a terminal the beginning of a text.
    file
        Prompts, one per line; or .jsonl with one {"prompt": "..."} per line.
    max_tokens
        How many tokens to write at most, per sequence.
    temperature
        0 always takes the most probable token. Default: 1, the model's own distribution.
    top_k
        Draw only from the k most probable tokens. Default: all.
    top_p
        Draw only from the most probable tokens that together reach this probability. Default: 1, all.
    min_p
        Draw only from tokens with at least this share of the largest probability. Default: 0, all.
    repetition_penalty
        Above 1: tokens that are there already become less probable. Default: 1.
    stop
        Text that ends a sequence; it is not written. Can be given several times.
    seed
        Of the draws. Default: 0.
    n
        How many sequences to write per prompt.
    ignore_end
        Go on after the token that ends a text.
    batch_size
        How many sequences are written at once; the others wait.
    batch_invariant
        Give each sequence the same tokens and log-probabilities, to the bit, whatever others are written with it.
        Slower.
    save
        Keep the generation in this new file when it ends, or when Ctrl-C stops it, for --continue.
    continue_
        Go on with a saved generation: --max-tokens more for sequences that ended for lack of them. All settings are
        those that it began with; but --seed begins other draws from here on.
    tokenizer
        bytes, a tokenizer.json, or a name on the Hugging Face Hub. Default: the one that the run was trained with.
    data
        Folder that `rebased data prepare` wrote, for its tokenizer.
    device
        Where to compute.
    precision
        Precision of the weights.
    cuda_graph
        Replay steps as CUDA graphs, on a GPU: faster, above all with few sequences. The text is the same.
    imports
        Python file or module with your own mixers (@register_mixer). Can be given several times.
    """
    to.check()
    if save != continue_:
        check_new(save)
    for name in imports:
        import_user_code(name)
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    given: dict[str, Any] = {key: value for key, value in sampling.items() if value is not None}
    if continue_ is None:
        prompts = collect_prompts(prompt, file)
    else:
        begun = {"prompt": prompt, "file": file, "stop": stop, "n": n != 1, "ignore_end": ignore_end}
        check_continued(given, **begun, batch_invariant=batch_invariant)
    where = choose_device(device)
    opened = open_text_model(model, tokenizer, data, where)
    opened.model.to(DTYPES[precision])
    with options_in_errors(*sampling, "max_tokens", "n", slots="batch_size"):
        if continue_ is None:
            generation = opened.model.stream(
                prompts,
                max_tokens=max_tokens,
                stop=stop,
                n=n,
                ignore_end_of_text=ignore_end,
                tokenizer=opened.tokenizer,
                slots=batch_size,
                keep_states=save is not None,
                batch_invariant=batch_invariant,
                **given,
            )
        else:
            generation = load_generation(continue_, opened.model, opened.tokenizer)
            if seed is not None:
                generation = generation.fork(seed)
            if generation.done:
                generation.go_on(max_tokens)
    if cuda_graph and where.type == "cuda":
        generation.capture()
    begin = time.perf_counter()
    with stop_request() as request:
        read(generation)
        output = TextOutput(Console(highlight=False), generation, silent=to.quiet or to.json == STDOUT)
        made = write(generation, output, request)
    seconds = time.perf_counter() - begin
    output.close()
    if save is not None:
        save_generation(generation, save)
    about = {"code": describe_code(), "machine": describe_machine(where)}
    to.emit(describe(opened, generation, model, n, made, seconds) | about)
    if not to.quiet:
        output.summarise(made, seconds, save, request.asked)
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


def check_continued(given: dict[str, Any], **others: Any) -> None:
    """Raise ValueError if --continue is given with an option that a saved generation has decided already."""
    wrong = [key for key, value in (given | others).items() if value and key != "seed"]
    if wrong:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in wrong)
        raise ValueError(f"--continue goes on as the generation began: leave out {names}")


def read(generation: Generation) -> None:
    """Read the first prompts and make the first tokens; a progress bar shows how far a long prompt is read."""
    if generation.done:
        return
    if max(len(sequence.prompt) for sequence in generation.sequences) <= PREFILL_CHUNK:
        generation.advance()
        return
    with progress_bars(Console(stderr=True)) as begin_bar:
        generation.advance(begin_bar("reading prompts"))


def write(generation: Generation, output: TextOutput, request: StopRequest) -> int:
    """Write tokens until all sequences have ended or the user asks to stop. Returns how many there were."""
    made = 0
    while not request.check():
        token = next(generation, None)
        if token is None:
            break
        made += 1
        output.write(token)
    return made


def describe(
    opened: TextModel, generation: Generation, model: Path | None, n: int, made: int, seconds: float
) -> dict[str, Any]:
    """Everything about a generation as JSON data."""
    found = generation.result()
    return {
        "model": "shipped" if model is None else str(model),
        "parameters": opened.model.num_parameters(),
        "tokenizer": opened.tokenizer.name,
        "sampling": asdict(generation.sampling),
        "ending": asdict(generation.ending),
        "batch_invariant": generation.batch_invariant,
        "new_tokens": made,
        "seconds": seconds,
        "state_bytes": generation.state_bytes,
        "sequences": [
            {
                "prompt": opened.tokenizer.decode(sequence.prompt),
                "prompt_tokens": sequence.prompt,
                "text": text,
                "tokens": tokens,
                "logprobs": logprobs,
                "finish_reason": reason,
            }
            for sequence, text, tokens, logprobs, reason in zip(
                generation.sequences, found.texts, found.tokens, found.logprobs, found.finish_reasons, strict=True
            )
        ],
    }
