"""A suite file: its protocol, the sizes that are solved from a budget, and which runs belong to it."""

from typing import Any

import pytest
from torch import Tensor, nn

from fake_suite import TREE, fake_run_of, small_suite
from rebased.mixers import mixer_class, register_mixer
from rebased.runs.finished import Run
from rebased.runs.shipped import find_config
from rebased.runs.suite import Suite, load_suite, own_mixer, part_of, widest
from rebased.tasks import task_names

QUICK, CAMPAIGN = (load_suite(find_config(name, "suite")) for name in ("quick", "campaign"))


def changed(**section: Any) -> Suite:
    return small_suite(**{key: TREE[key] | value for key, value in section.items()})


def test_everything_but_the_mixers_is_the_protocol() -> None:
    protocol = small_suite().protocol
    assert changed(train={"epochs": 2}).protocol != protocol
    assert small_suite(state_bytes=[512]).protocol != protocol
    assert small_suite(rates=[1e-3]).protocol != protocol
    assert small_suite(score_seeds=[21, 22]).protocol != protocol
    others = {"Linear": {"mixer": {"name": "linear_attention", "n_heads": 1}}}
    assert small_suite(mixers=others, drawn=[], about="Other words.").protocol == protocol


def test_the_largest_state_that_fits_is_solved() -> None:
    suite = small_suite()
    for name in ("Linear", "ReBased", "Delta"):
        for config in suite.configs("small", name, suite.mixers[name]):
            assert config.suite is not None
            budget, model = config.suite.state_bytes, config.model.model_dump()
            assert budget is not None
            assert suite.layer_bytes(model, 16) <= budget
            model["mixers"][1]["key_width"] += 1
            assert suite.layer_bytes(model, 16) > budget


def test_widths_that_a_mixer_does_not_take_are_left_out() -> None:
    sizes = {width: 10 * width for width in range(2, 100, 4)}  # 2, 6, 10, ...
    assert widest(sizes.get, 77) == 6
    assert widest(sizes.get, 100) == 10
    assert widest(sizes.get, 19) is None


def test_rates_are_chosen_and_scored_on_splits_and_seeds_that_the_record_names() -> None:
    suite = small_suite()
    run = fake_run_of(suite.configs("small", "ReBased", suite.mixers["ReBased"])[0], 0.5, 0.4)
    assert suite.why_not(run) is None
    part = run.settings["suite"]
    assert (part["rate_chosen_on"], part["scored_on"], part["choosing_seeds"]) == ("test", "held_out", [1])
    assert part["protocol"] == suite.protocol
    assert run.settings["train"]["protocol"] == "held_out"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("suite", "protocol"), "0123456789ab", "another protocol"),
        (("train", "epochs"), 64, "not those of the protocol"),
        (("train", "decay"), "matrices", "not those of the protocol"),
        (("task", "vocab_size"), 64, "not those of the protocol"),
        (("train", "protocol"), "paper", "not those of the protocol"),
        (("train", "lr"), 0.5, "a rate or a seed"),
        (("train", "seed"), 99, "a rate or a seed"),
    ],
)
def test_a_run_of_another_protocol_does_not_count(path: tuple[str, str], value: object, reason: str) -> None:
    suite = small_suite()
    run = fake_run_of(suite.configs("small", "ReBased", suite.mixers["ReBased"])[0], 0.5, 0.4)
    run.lines[0]["config"][path[0]][path[1]] = value
    assert reason in str(suite.why_not(run))


def planted(name: str = "Delta", compared: dict[str, Any] | None = None, **model: Any) -> Run:
    """A run of the small suite with another model than the protocol gives to this mixer."""
    suite = small_suite()
    (config, *_) = suite.configs("small", "Delta", suite.mixers["Delta"])
    run = fake_run_of(config, 0.5, 0.4)
    run.lines[0]["config"]["suite"]["mixer"] = name
    run.lines[0]["config"]["model"] |= model
    run.lines[0]["config"]["model"]["mixers"][1] |= compared or {}
    return run


@pytest.mark.parametrize(
    "run",
    [
        planted(d_model=4096),
        planted(n_layers=8),
        planted(positions="learned"),
        planted(compared={"key_width": 500}),
        planted(compared={"key_width": 1}),
        planted("ReBased"),  # the mixer of another label
        planted("Mine", d_model=4096),  # a label that the suite does not have
        planted("Mine", positions="learned"),
        planted("Mine", compared={"key_width": 500}),
        planted("Mine", {"name": "unknown here"}, positions="learned"),
        planted("Mine", {"name": "unknown here"}, d_model=4096),
        planted("Mine", mixers=[{"name": "based"}, {"name": "delta_rebased"}]),
    ],
)
def test_a_run_with_another_model_than_its_mixer_has_does_not_count(run: Run) -> None:
    assert small_suite().why_not(run) == "with another model than the protocol gives to this mixer"


def test_a_mixer_that_the_suite_does_not_have_may_have_any_arguments_within_the_bytes() -> None:
    assert small_suite().why_not(planted("Mine", {"key_width": 1})) is None
    assert small_suite().why_not(planted("Mine", {"name": "unknown here"}, d_model=32)) is None


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("state_bytes", 999_999, "a size of state that"), ("choosing_seeds", [1, 2], "a rate or a seed that")],
)
def test_sizes_and_choosing_seeds_are_those_of_the_protocol(key: str, value: object, reason: str) -> None:
    run = planted()
    run.lines[0]["config"]["suite"][key] = value
    assert f"with {reason} the protocol does not have" == small_suite().why_not(run)


def test_the_device_is_not_part_of_the_protocol() -> None:
    suite = small_suite()
    (config, *_) = suite.configs("small", "ReBased", suite.mixers["ReBased"], "cuda")
    assert config.train.device == "cuda"
    assert suite.why_not(fake_run_of(config, 0.5, 0.4)) is None


def test_a_record_that_lacks_a_later_setting_is_of_the_protocol() -> None:
    """Shipped results lost their place when `train.decay` was added."""
    suite = small_suite()
    run = fake_run_of(suite.configs("small", "ReBased", suite.mixers["ReBased"])[0], 0.5, 0.4)
    del run.lines[0]["config"]["train"]["decay"]
    assert suite.why_not(run) is None
    assert run.settings["train"]["decay"] == "all"


def test_a_seed_that_chooses_is_not_scored() -> None:
    with pytest.raises(ValueError, match="seed 1 both chooses rates and is scored"):
        small_suite(score_seeds=[1, 2])


class Mean(nn.Module):
    """Without a state: it can be trained and not ranked."""

    def __init__(self, d_model: int, n_heads: int = 12) -> None:
        super().__init__()
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(x.cumsum(1))


def test_a_mixer_that_cannot_tell_its_state_is_trained_once_and_has_no_set_size() -> None:
    register_mixer("suite_test_mean")(Mean)
    suite, mixer = small_suite(), own_mixer("suite_test_mean", 1)
    assert mixer.mixer == {"name": "suite_test_mean", "n_heads": 1}
    configs = suite.configs("small", "Mean", mixer)
    assert {config.suite and config.suite.state_bytes for config in configs} == {None}
    assert len(configs) == len(suite.tasks) * len(suite.rates) * 6


class Sum(Mean):
    """Its state has one number per channel, so only the width of the model sets its size."""

    def init_state(self, batch: int, **_: Any) -> Tensor:
        return self.out_proj.weight.new_zeros(batch, self.out_proj.in_features)

    def extend(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        sums = state[:, None] + x.cumsum(1)
        return self.out_proj(sums), sums[:, -1]

    def state_size(self, seq_len: int) -> int:
        return self.out_proj.in_features


def test_the_same_model_is_not_trained_for_two_sizes_of_state() -> None:
    """A model is at most eight times as wide as the others: here 128, which fits into the smaller size already."""
    register_mixer("suite_test_sum")(Sum)
    configs = small_suite().configs("small", "Sum", own_mixer("suite_test_sum", 1))
    assert {(config.suite and config.suite.state_bytes, config.model.d_model) for config in configs} == {(512, 128)}


@pytest.mark.parametrize("suite", [QUICK, CAMPAIGN], ids=["quick", "campaign"])
def test_shipped_suites_name_what_there_is(suite: Suite) -> None:
    for task in suite.tasks.values():
        assert task.task["name"] in task_names()
    for mixer in suite.mixers.values():
        mixer_class(mixer.mixer["name"])
    factors = [tuple(sorted(mixer.factors.items())) for mixer in suite.mixers.values() if mixer.factors]
    assert len(set(factors)) == len(factors)  # else two mixers of one cell would be two pairs
    assert len({tuple(key for key, _ in cell) for cell in factors}) == 1


def test_every_mixer_of_quick_can_be_built() -> None:
    for name, mixer in QUICK.mixers.items():
        found = {config.suite and config.suite.state_bytes for config in QUICK.configs("quick", name, mixer)}
        assert found == ({None} if mixer.unsized else set(QUICK.state_bytes)), name


def test_a_record_of_something_else_has_no_part() -> None:
    suite = small_suite()
    run = fake_run_of(suite.configs("small", "ReBased", suite.mixers["ReBased"])[0], 0.5, 0.4)
    run.lines[0]["config"]["suite"] = {"name": 7}
    assert part_of(run) is None
    assert suite.why_not(run) == "not of a suite"
