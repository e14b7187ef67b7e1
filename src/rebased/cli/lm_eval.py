"""rebased lm eval: the perplexity of a trained language model on all, AR and non-AR tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from rich.console import Console

from rebased.analysis.perplexity import Measured, TextSummary, summarise
from rebased.cli.lm_tasks import TaskOptions, eval_tasks, list_tasks
from rebased.cli.model_options import DEFAULT_COMPUTING, Computing, ModelPath, check_length
from rebased.cli.output import TO_TERMINAL, OnProgress, Output, digits, progress_bars, say
from rebased.cli.rich_table import TerminalTable
from rebased.config import plural
from rebased.data import Corpus, spread_rows
from rebased.evaluate.ar import ARRule
from rebased.evaluate.ngrams import NgramCounts, count_stream
from rebased.evaluate.text import evaluate_text
from rebased.models.weights import model_checksum
from rebased.report.tables import Table
from rebased.runs.load import open_trained
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.shipped import find_model, model_name
from rebased.train.lm.corpus import describe_corpus


@Parameter(name="*")
@dataclass(frozen=True)
class ARTokens:
    """Which tokens are AR.

    Parameters
    ----------
    order
        How many tokens must repeat for the last of them to be AR.
    reset_token
        A token id, or `end` for the token that ends documents: n-grams before it do not count as seen.
    max_count
        n-grams that occur more often in the training split are not AR, because the model may have memorised them.
    """

    order: int = 2
    reset_token: str | None = None
    max_count: int | None = None

    def rule(self, corpus: Corpus, split: str, begin_bar: Callable[[str], OnProgress]) -> ARRule:
        """The rule for a split of a prepared text. With max_count, the training split is counted first."""
        counts = None
        if self.max_count is not None:
            counts = count_training(corpus, split, self.order, begin_bar("counting the training split"))
        return ARRule(self.order, parse_reset_token(self.reset_token, corpus), counts, self.max_count)


DEFAULT_AR, DEFAULT_TASKS = ARTokens(), TaskOptions()


def lm_eval(
    model: ModelPath = None,
    /,
    *,
    data: Path | None = None,
    split: str = "test",
    seq_len: int | None = None,
    windows: int | None = None,
    ar: ARTokens = DEFAULT_AR,
    tasks: TaskOptions = DEFAULT_TASKS,
    computing: Computing = DEFAULT_COMPUTING,
    to: Output = TO_TERMINAL,
) -> int:
    """Measure the perplexity of a trained language model as the paper does: on all, AR and non-AR tokens.

    A token is AR (a target of associative recall) if the bigram that it ends occurred earlier in the window. With
    --tasks, tasks of lm-evaluation-harness are run instead (pip install 'rebased[eval]').

    Parameters
    ----------
    data
        Folder that `rebased data prepare` wrote. Default: the one that the run was trained on.
    split
        The split to measure.
    seq_len
        Tokens per window. Default: as in training.
    windows
        How many windows to measure, at even distances in the split. Default: all.
    """
    to.check()
    where = computing.import_code()
    if tasks.tasks == "list":
        return list_tasks()
    path = find_model(model)
    if tasks.tasks is not None:
        return eval_tasks(path, tasks, data, seq_len, computing, where, to)
    trained = open_trained(path, data, where)
    length = check_length(trained.seq_len if seq_len is None else seq_len, trained.model, "--seq-len")
    corpus = trained.corpus
    corpus.verify_if_small(split, *(["train"] if ar.max_count is not None else []))
    text = corpus.windows(split, length, isolate_documents=trained.isolate_documents)
    if windows is not None and windows < 1:
        raise ValueError(f"--windows {windows}: give 1 or more")
    rows = spread_rows(len(text), windows)
    with progress_bars(to.console()) as begin_bar:
        rule = ar.rule(corpus, split, begin_bar)
        scores = evaluate_text(
            trained.model,
            text,
            ar=rule,
            rows=rows,
            batch_size=computing.batch_size,
            dtype=computing.dtype,
            on_progress=begin_bar("reading windows"),
        )
    summary = check_finite(summarise(scores), path, computing.precision)
    entry = corpus.splits[split]
    bits = summary.bits_per_byte(entry.text_bytes / entry.tokens) if entry.text_bytes else None
    results, parameters = to.result_console(), trained.model.num_parameters()
    say(results, f"{model_name(path)}, {parameters:,} parameters; {split}, {plural(len(rows), 'window')} of {length:,}")
    show(results, summary, bits, rule)
    about = {
        "model": model_name(path),
        "model_sha256": model_checksum(path),
        "parameters": parameters,
        "corpus": describe_corpus(corpus),
        "split": split,
        "seq_len": length,
        "windows": len(rows),
        "isolate_documents": trained.isolate_documents,
        "rule": {"order": ar.order, "reset_token": rule.reset_token, "max_count": ar.max_count},
        "precision": computing.precision,
        "code": describe_code(),
        "machine": describe_machine(where),
    }
    to.emit(about | numbers(summary, bits))
    return 0


def check_finite(summary: TextSummary, path: Path, precision: str) -> TextSummary:
    """The summary; ValueError if its losses are not finite."""
    if not math.isfinite(summary.all.nats):
        raise ValueError(
            f"{model_name(path)}: its losses are not finite; the model has diverged, or --precision {precision} is too "
            "low"
        )
    return summary


def count_training(corpus: Corpus, split: str, order: int, on_progress: Callable[[int, int], None]) -> NgramCounts:
    """How often the n-grams of a split occur in the training split, for --max-count."""
    if split == "train":
        raise ValueError("--max-count counts the training split, and --split is that one; measure another")
    stream, measured = corpus.stream("train"), corpus.stream(split)
    return count_stream(stream, order, corpus.vocab_size, among=measured, on_progress=on_progress)


def parse_reset_token(name: str | None, corpus: Corpus) -> int | None:
    """The token id that --reset-token means; None if it is not given."""
    if name is None:
        return None
    if name == "end":
        if corpus.end_of_text is None:
            raise ValueError(f"--reset-token end: the tokenizer of {corpus.folder} has no token that ends a document")
        return corpus.end_of_text
    if not name.isdecimal() or int(name) >= corpus.vocab_size:
        raise ValueError(f"--reset-token {name}: give a number below {corpus.vocab_size}, or `end`")
    return int(name)


def show(console: Console, summary: TextSummary, bits: float | None, rule: ARRule) -> None:
    """Print the table of perplexities, and below it what AR means and the bits per byte."""
    ago = [(f"  {a:,} ago" if a == b else f"  {a:,} to {b:,} ago", kind) for a, b, kind in summary.by_distance]
    kinds = [("all", summary.all), ("non-AR", summary.non_ar), ("AR", summary.ar), *ago]
    rows = []
    for name, kind in kinds:
        share = f"{kind.tokens / summary.all.tokens:.4f}"
        low, high = map(digits, kind.perplexity_interval)
        interval = f"{low} to {high}" if low != "-" else "-"
        rows.append((name, f"{kind.tokens:,}", share, digits(kind.perplexity), interval, digits(kind.nats, 4)))
    console.print(TerminalTable(Table(("tokens", "number", "share", "perplexity", "95 % interval", "nats"), rows)))
    if any(kind.tokens and math.isnan(kind.interval.low) for _, kind in kinds):
        say(console, "no interval where all tokens are of one window")
    say(console, f"AR: {describe(rule)}")
    value = "not known: this text was prepared without counting its bytes" if bits is None else f"{bits:.4f}"
    say(console, f"bits per byte: {value}")


def describe(rule: ARRule) -> str:
    """What counts as AR by this rule, in words."""
    tokens, order = ("a token", "") if rule.order == 1 else (f"the last of {rule.order} tokens", "in this order ")
    phrases = [f"{tokens} that occurred {order}earlier in the window"]
    if rule.reset_token is not None:
        phrases.append(f"since the last token {rule.reset_token}")
    if rule.max_count is not None:
        phrases.append(f"unless they occur more than {rule.max_count:,} times in the training split")
    return ", ".join(phrases)


def numbers(summary: TextSummary, bits: float | None) -> dict[str, Any]:
    """Return the perplexities and their intervals as JSON has them."""

    def kind(measured: Measured) -> dict[str, Any]:
        losses = {"tokens": measured.tokens, "nats": measured.nats, "nats_interval": measured.interval}
        return losses | {"perplexity": measured.perplexity, "perplexity_interval": measured.perplexity_interval}

    return {
        "all": kind(summary.all),
        "ar": kind(summary.ar),
        "non_ar": kind(summary.non_ar),
        "ar_share": summary.ar_share,
        "bits_per_byte": bits,
        "by_distance": [{"nearest": a, "farthest": b, **kind(measured)} for a, b, measured in summary.by_distance],
    }
