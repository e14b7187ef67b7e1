"""Runs that differ in something are not called the same, and runs that do not are."""

from fake_records import fake_run
from rebased.runs.finished import Run
from rebased.runs.run_names import ModelName, model_names, task_names


def names(*runs: Run) -> tuple[list[str], list[str]]:
    settings = [run.settings for run in runs]
    tasks = task_names(settings)
    return tasks, list(map(str, model_names(settings, tasks)))


def heads(n: int) -> dict:
    return {"model": {"mixers": {1: {"n_heads": n}}}}


def test_lr_seed_width_and_device_name_no_model() -> None:
    other = {"train": {"device": "cpu", "micro_batch": 4, "protocol": "paper"}}
    tasks, models = names(fake_run(), fake_run(seed=43, lr=1e-2, changes=other), fake_run(d_model=48))
    assert tasks == ["T = 32, 4 pairs"] * 3
    assert models == ["ReBased"] * 3


def test_what_differs_is_named() -> None:
    _, models = names(
        fake_run(), fake_run(changes=heads(2)), fake_run("based"), fake_run(changes={"train": {"epochs": 9}})
    )
    assert models == [
        "ReBased (n_heads 12, epochs 5)",
        "ReBased (n_heads 2, epochs 5)",
        "Based",
        "ReBased (n_heads 12, epochs 9)",
    ]


def test_a_name_has_two_parts() -> None:
    settings = [fake_run(changes=heads(n)).settings for n in (1, 2)]
    assert model_names(settings, task_names(settings)) == [
        ModelName("ReBased", "n_heads 1"),
        ModelName("ReBased", "n_heads 2"),
    ]


def test_what_differs_between_tasks_alone_is_not() -> None:
    _, models = names(fake_run(), fake_run(seq_len=64, changes={"train": {"epochs": 9}}))
    assert models == ["ReBased", "ReBased"]


def test_kernels_are_named_as_in_table_1() -> None:
    runs = [
        fake_run(changes={"model": {"mixers": {1: {"qk_transform": transform}}}})
        for transform in ("none", "norm", "scale", "affine", "norm_affine")
    ]
    assert names(*runs)[1] == ["x²", "norm(x)²", "(γx)²", "(γx + β)²", "ReBased"]


def test_tasks() -> None:
    segment = {"seq_len": 32, "kv_pairs": 4, "examples": 99}
    tasks, _ = names(fake_run(), fake_run(pairs=(4, 8)), fake_run(changes={"task": {"train": [segment]}}))
    assert tasks == [
        "T = 32, 4 pairs (train_examples 10)",
        "T = 32, 4 pairs → T = 32, 4–8 pairs",
        "T = 32, 4 pairs (train_examples 99)",
    ]
