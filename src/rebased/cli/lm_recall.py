"""rebased lm recall: how many facts in its context a trained language model recalls, by distance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rebased.analysis.intervals import wilson
from rebased.cli.model_options import DEFAULT_COMPUTING, Computing, ModelPath, check_length
from rebased.cli.output import TO_TERMINAL, Output, progress_bars, say
from rebased.cli.rich_table import TerminalTable
from rebased.config import plural
from rebased.evaluate.facts.episodes import Condition, build_recall
from rebased.evaluate.facts.model_answers import Answer, Tally, answer_questions, tally, tally_by_distance
from rebased.evaluate.facts.sources import read_facts, read_squad
from rebased.report.tables import Table
from rebased.runs.load import open_trained
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.shipped import find_model, model_name

LABELS: dict[Condition, str] = {
    "present": "fact in context",
    "absent": "context without it",
    "alone": "question alone",
}


def lm_recall(
    model: ModelPath = None,
    /,
    *,
    facts: Path | None = None,
    squad: Path | None = None,
    data: Path | None = None,
    questions: int = 1000,
    together: int = 4,
    length: int | None = None,
    seed: int = 0,
    computing: Computing = DEFAULT_COMPUTING,
    to: Output = TO_TERMINAL,
) -> int:
    """Ask a trained language model for facts in its context: associative recall in real text.

    A context is filled with facts. Then some of them are begun again, and the model must complete them. An answer is
    correct if greedy decoding gives exactly its tokens. Two controls ask the same questions without the facts: correct
    answers there were known from training or guessed.

    Parameters
    ----------
    facts
        Facts, one JSON object per line: {"context": "The capital of Norway is", "continuation": "Oslo"} (.jsonl, also
        .gz, .xz or .zst).
    squad
        A SQuAD file (.json, also .gz, .xz or .zst) instead: contexts are passages, questions are their sentences up to
        an answer.
    data
        Folder that `rebased data prepare` wrote, for its tokenizer. Default: the one that the run was trained on.
    questions
        How many questions to ask.
    together
        How many questions follow one context, at most.
    length
        Tokens of a context with its questions. Default: as in training.
    seed
        Decides which facts are asked for, and which fill the contexts.
    """
    to.check()
    where, console = computing.import_code(), to.console()
    if (facts is None) == (squad is None):
        raise ValueError("name one file to take facts from: --facts FILE or --squad FILE")
    known = read_facts(facts) if facts is not None else read_squad(squad or "")
    path = find_model(model)
    trained = open_trained(path, data, where)
    size = check_length(trained.seq_len if length is None else length, trained.model, "--length")
    with console.status("making contexts"):
        recall = build_recall(
            known, trained.corpus.tokenizer.encode, length=size, questions=questions, together=together, seed=seed
        )
    with progress_bars(console) as begin_bar:
        answers = {
            condition: answer_questions(
                trained.model,
                episodes,
                batch_size=computing.batch_size,
                dtype=computing.dtype,
                on_progress=begin_bar(LABELS[condition]),
            )
            for condition, episodes in recall.episodes.items()
        }
    tallies, by_distance = {key: tally(some) for key, some in answers.items()}, tally_by_distance(answers["present"])
    source = facts or squad
    asked = f"{plural(tallies['present'].asked, 'question')} after contexts of up to {size:,} tokens"
    results = to.result_console()
    parameters = trained.model.num_parameters()
    say(results, f"{model_name(path)}, {parameters:,} parameters; {source}: {asked}")
    show(results, tallies, by_distance)
    if recall.too_long:
        say(results, f"left out: {plural(recall.too_long, 'fact')} too long for {size:,} tokens")
    about: dict[str, Any] = {"model": model_name(path), "parameters": parameters, "source": str(source), "length": size}
    about |= {"together": together, "seed": seed, "precision": computing.precision}
    about |= {"too_long": recall.too_long, "code": describe_code(), "machine": describe_machine(where)}
    to.emit(about | results_of(answers, tallies, by_distance))
    return 0


def results_of(
    answers: Mapping[Condition, Sequence[Answer]], tallies: Mapping[Condition, Tally], by_distance: Sequence[Tally]
) -> dict[str, Any]:
    """Return the answers and their tallies as JSON has them."""
    found = {condition: numbers(some) for condition, some in tallies.items()}
    distances = [{"nearest": some.nearest, "farthest": some.farthest, **numbers(some)} for some in by_distance]
    each = {condition: [answer._asdict() for answer in some] for condition, some in answers.items()}
    return found | {"by_distance": distances, "answers": each}


def show(console: Console, tallies: dict[Condition, Tally], by_distance: list[Tally]) -> None:
    """Print the table of accuracies: by distance with the fact in the context, then the two controls."""
    named = [(LABELS["present"], tallies["present"])]
    named += [(f"  {some.nearest:,} to {some.farthest:,} ago", some) for some in by_distance]
    named += [(LABELS[condition], tallies[condition]) for condition in ("absent", "alone")]
    rows = []
    for name, some in named:
        low, high = wilson(some.correct, some.asked)
        counts = (f"{some.asked:,}", f"{some.correct:,}")
        rows.append((name, *counts, f"{some.accuracy:.3f}", f"{low:.3f} to {high:.3f}", f"{some.nats:.3f}"))
    console.print(TerminalTable(Table(("answers", "asked", "correct", "accuracy", "95 % interval", "nats"), rows)))
    say(console, "ago: tokens since the answer in the context; nats: -ln p of an answer")


def numbers(some: Tally) -> dict[str, Any]:
    """A tally as JSON data, with Wilson's interval of the accuracy."""
    counts = {"asked": some.asked, "correct": some.correct, "accuracy": some.accuracy, "nats": some.nats}
    return counts | {"interval": wilson(some.correct, some.asked)}
