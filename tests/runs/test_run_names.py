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


def test_what_all_layers_have_is_named_once() -> None:
    def mamba(first: str, second: str) -> Run:
        return fake_run("mamba", changes={"model": {"mixers": {0: {"dt_init": first}, 1: {"dt_init": second}}}})

    _, models = names(mamba("mamba", "mamba"), mamba("paper", "paper"))
    assert models == ["Mamba (dt_init mamba)", "Mamba (dt_init paper)"]
    _, models = names(mamba("mamba", "mamba"), mamba("paper", "paper"), mamba("paper", "mamba"))
    assert models[2] == "Mamba (model.mixers.0.dt_init paper, model.mixers.1.dt_init mamba)"


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


def test_kernels_state_the_heads_where_those_of_one_kernel_differ() -> None:
    plain = {"model": {"mixers": {1: {"qk_transform": "none"}}}}
    _, models = names(fake_run(changes=heads(2)), fake_run(), fake_run(changes=plain), fake_run("conv_attention"))
    assert models == ["ReBased (n_heads 2)", "ReBased (n_heads 12)", "x² (n_heads 12)", "ConvAttention"]


def test_settings_have_one_order_in_all_names() -> None:
    longer = {"train": {"epochs": 9}}
    for others in (
        [fake_run(changes=longer), fake_run(changes=heads(2))],
        [fake_run(changes=heads(2)), fake_run(changes=longer)],
    ):
        assert names(fake_run(), *others)[1][0] == "ReBased (n_heads 12, epochs 5)"


def test_tasks() -> None:
    segment = {"seq_len": 32, "kv_pairs": 4, "examples": 99}
    tasks, _ = names(fake_run(), fake_run(pairs=(4, 8)), fake_run(changes={"task": {"train": [segment]}}))
    assert tasks == [
        "T = 32, 4 pairs (train_examples 10)",
        "T = 32, 4 pairs → T = 32, 4–8 pairs",
        "T = 32, 4 pairs (train_examples 99)",
    ]


FORGETTING = {"name": "forgetting_mqar", "train": [{"seq_len": 64, "kv_pairs": 4, "updates": 2, "examples": 9}]}


def test_other_tasks_are_named_in_their_own_words() -> None:
    tested = [{"seq_len": T, "kv_pairs": 4, "updates": u, "examples": 5} for T, u in ((64, 1), (128, 3))]
    forgetting = fake_run(changes={"task": {**FORGETTING, "test": tested, "vocab_size": 256}})
    segment = {"seq_len": 32, "n_tokens": 3, "examples": 5}
    selective = fake_run(changes={"task": {"name": "selective_copying", "train": [segment], "test": [segment]}})
    assert names(forgetting, selective, fake_run())[0] == [
        "forgetting_mqar, T = 64, 4 pairs, 2 updates → T = 64–128, 4 pairs, 1–3 updates",
        "selective_copying, T = 32, 3 tokens to copy",
        "T = 32, 4 pairs",
    ]


def test_a_task_that_is_not_known_here_is_named_by_its_fields() -> None:
    """Its record may come from another machine, with a task of somebody's own."""
    run = fake_run()
    segments = [{"seq_len": 16, "shape": shape, "examples": 5} for shape in ("ring", "line")]
    run.settings["task"] |= {"name": "mazes", "train": segments[:1], "test": segments}
    assert names(run)[0] == ["mazes, T = 16, shape ring → T = 16, shape line or ring"]
