"""Run tasks of lm-evaluation-harness, and ours, on one model."""

import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.evaluator
from lm_eval.tasks import TaskManager

from rebased.config import did_you_mean
from rebased.evaluate.harness.model import HarnessModel
from rebased.evaluate.harness.tasks import EXAMPLES, build_task, task_names

SEED = 0


class Score(NamedTuple):
    """One number of one task."""

    task: str
    metric: str  # with the harness's filter, if it is not the plain one: "exact_match, strict-match"
    value: float
    stderr: float | None
    examples: int
    version: str | None  # of the task


def run_tasks(
    model: HarnessModel,
    names: list[str],
    *,
    facts: Path | None = None,
    squad: Path | None = None,
    folder: Path | None = None,
    limit: int | None = None,
) -> list[Score]:
    """The scores of a model on these tasks.

    names: of the harness's tasks and of ours (harness/tasks.py).
    facts, squad: files that some of our tasks read.
    folder: with tasks of your own, as YAML files of the harness.
    limit: examples per task at most.

    Raises ValueError for a name that nobody knows.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if folder is None else str(folder))
    known = set(manager.all_tasks)
    tasks: list[Any] = []
    for name in names:
        if name in task_names():
            count = EXAMPLES if limit is None else min(limit, EXAMPLES)
            tasks.append(build_task(name, facts=facts, squad=squad, count=count))
        elif name in known:
            tasks.append(name)
        else:
            raise ValueError(f"unknown task {name!r}; {did_you_mean(name, sorted(known | set(task_names())))}")
    # The harness would ask git for the commit of the working folder, and git would complain where there is none.
    lm_eval.evaluator.get_git_commit_hash = lambda: None
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the harness prints, and draws progress bars
        found = lm_eval.evaluator.simple_evaluate(
            model=model,
            tasks=tasks,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
            random_seed=SEED,
            numpy_random_seed=SEED,
            torch_random_seed=SEED,
            fewshot_random_seed=SEED,
        )
    assert found is not None  # only ranks above 0 get None
    return read_scores(found)


def read_scores(found: dict[str, Any]) -> list[Score]:
    """The numbers in what the harness returns."""
    scores = []
    for task, numbers in found["results"].items():
        examples = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if not isinstance(value, int | float) or metric in ("alias", "sample_len") or metric.endswith("_stderr"):
                continue
            error = numbers.get(f"{metric}_stderr,{kind}")
            scores.append(
                Score(
                    task,
                    metric if kind in ("none", "") else f"{metric}, {kind}",
                    float(value),
                    float(error) if isinstance(error, int | float) else None,
                    int(examples),
                    None if (version := found.get("versions", {}).get(task)) is None else str(version),
                )
            )
    return scores
