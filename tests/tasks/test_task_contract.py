"""The contract of every task: one suite over all that the package registers, or one with `pytest --task NAME`."""

from functools import partial
from typing import Any

import pytest

from rebased.evaluate.checks import run_check
from rebased.evaluate.task_contract import CHECKS
from rebased.tasks import task_class, task_names
from task_option import TASK

SMALL: dict[str, list[dict[str, Any]]] = {
    "mqar": [
        {"seq_len": 16, "kv_pairs": 3, "vocab_size": 24},
        {"seq_len": 16, "kv_pairs": 4, "vocab_size": 17, "random_non_queries": True},
    ],
    "forgetting_mqar": [
        {"seq_len": 20, "kv_pairs": 4, "updates": 2, "vocab_size": 24},
        {"seq_len": 24, "kv_pairs": 3, "updates": 1, "vocab_size": 25, "random_non_queries": True},
    ],
    "copying": [
        {"seq_len": 12, "min_length": 2, "max_length": 5, "vocab_size": 9},
        {"seq_len": 15, "min_length": 4, "max_length": 4, "vocab_size": 30},
    ],
    "selective_copying": [
        {"seq_len": 16, "n_tokens": 3, "vocab_size": 9},
        {"seq_len": 11, "n_tokens": 5, "vocab_size": 20},  # no blank before the sign
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        ours = [name for name in task_names() if task_class(name).__module__.startswith("rebased.")]
        chosen = metafunc.config.stash.get(TASK, None)
        cases = [
            pytest.param((name, settings), id=f"{name}-{i}")
            for name in ([chosen] if chosen else ours)
            for i, settings in enumerate(SMALL.get(name, [{}]))
        ]
        metafunc.parametrize("case", cases)
        metafunc.parametrize("check", CHECKS)


def test_task(case: tuple[str, dict[str, Any]], check: str) -> None:
    name, settings = case
    result = run_check(check, partial(CHECKS[check], task_class(name).model_validate(settings)))
    if result.outcome == "skipped":
        pytest.skip(result.message)
    assert result.ok, f"task {name!r}, {check}: {result.message}"
