"""Configs from files and from the command line: what they mean, and what is said of those that mean nothing."""

import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError

from rebased.config import Config, explain, load_config, merge, parse_yaml, plural, read_yaml
from rebased.models import LMConfig, preset
from rebased.runs.shipped import CONFIGS
from rebased.runs.synthetic_config import SyntheticRunConfig, SyntheticTrainConfig

QUICK = CONFIGS / "mqar" / "quick.yaml"


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in ("mqar", "tasks") for path in (CONFIGS / folder).glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_every_shipped_config_loads_and_survives_being_written(path: Path) -> None:
    config = load_config(SyntheticRunConfig, path)
    again = SyntheticRunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert again.digest() == config.digest()


def test_the_paper_config_is_the_paper() -> None:
    config = load_config(SyntheticRunConfig, CONFIGS / "mqar" / "paper.yaml")
    assert config.model == preset("rebased", d_model=64)
    assert config.task == SyntheticRunConfig(task={}, model={}).task  # type: ignore[arg-type]
    assert config.train == SyntheticRunConfig(task={}, model={}, train={"micro_batch": 128}).train  # type: ignore[arg-type]


def test_overrides_are_typed_and_reach_everything() -> None:
    overrides = {
        "train.lr": "3e-4",
        "train.micro_batch": "16",
        "task.train.0.examples": "100",
        "task.test": "[{seq_len: 48, kv_pairs: 4, examples: 10}]",
        "model.mixers.0.width": "4",
        "model.mixers.1.qk_transform": "none",
        "train.device": "auto",
    }
    config = load_config(SyntheticRunConfig, QUICK, overrides)
    assert (config.train.lr, config.train.micro_batch, config.train.device) == (3e-4, 16, "auto")
    assert config.task.train[0].examples == 100
    assert config.model.max_len == config.task.test[0].seq_len == 48
    assert config.model.mixers[0].arguments() == {"width": 4}
    assert config.model.mixers[1].arguments()["qk_transform"] == "none"
    assert config.model.mixers[1].arguments()["n_heads"] == 2  # the file's own change stays
    assert config.train.epochs == load_config(SyntheticRunConfig, QUICK).train.epochs


def test_a_preset_is_expanded_after_the_overrides() -> None:
    config = load_config(
        SyntheticRunConfig, CONFIGS / "mqar" / "paper.yaml", {"model.d_model": "128", "model.preset": "based"}
    )
    assert config.model == preset("based", d_model=128)


def test_other_heads_share_the_width_anew() -> None:
    paper = CONFIGS / "mqar" / "paper.yaml"
    mixer = load_config(SyntheticRunConfig, paper, {"model.mixers.1.n_heads": "4"}).model.mixers[1].arguments()
    assert (mixer["n_heads"], mixer["value_width"]) == (4, None)
    both = {"model.mixers.1.n_heads": "4", "model.mixers.1.value_width": "5"}
    assert load_config(SyntheticRunConfig, paper, both).model.mixers[1].arguments()["value_width"] == 5


def test_another_mixer_drops_the_settings_of_the_former_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(SyntheticRunConfig, QUICK, {"model.mixers.1.name": "based", "model.mixers.1.key_width": "8"})
    assert (config.model.mixers[1].arguments()["n_heads"], config.model.mixers[1].arguments()["key_width"]) == (12, 8)
    said = "changes from 'rebased' to 'based': the other settings there are dropped (n_heads 2); set again what should "
    said += "stay"
    assert caplog.messages == [f"mixers.1.name {said}"]
    caplog.clear()
    path = tmp_path / "listed.yaml"
    path.write_text("task: {}\nmodel: {mixers: [short_conv, {name: rebased, n_heads: 2}]}\n")
    load_config(SyntheticRunConfig, path, {"model.mixers.1.name": "based"})
    assert caplog.messages == [f"model.mixers.1.name {said}"]
    caplog.clear()
    both = {"model.mixers.1.name": "based", "model.mixers.1.n_heads": "2"}
    assert load_config(SyntheticRunConfig, path, both).model.mixers[1].arguments()["n_heads"] == 2
    load_config(SyntheticRunConfig, path, {"model.mixers.0.name": "attention", "model.mixers.1.name": "rebased"})
    load_config(SyntheticRunConfig, path, {"model.mixers.1": "based"})
    assert caplog.messages == []


def test_heads_are_judged_after_the_overrides(caplog: pytest.LogCaptureFixture) -> None:
    """12 heads do not share a width of 64, 4 do; and a width of 8 has room for 4."""
    paper = CONFIGS / "mqar" / "paper.yaml"
    load_config(SyntheticRunConfig, paper, {"model.mixers.1.n_heads": "4"})
    load_config(SyntheticRunConfig, paper, {"model.mixers.1.n_heads": "4", "model.d_model": "8"})
    assert caplog.messages == []
    load_config(SyntheticRunConfig, paper)
    assert caplog.messages == ["d_model 64 is not divisible by 12 heads: as in the paper, values are 12 x 5 = 60 wide"]
    with pytest.raises(ValueError, match="model: d_model 8 is below the 12 heads of the paper's 'rebased'"):
        load_config(SyntheticRunConfig, paper, {"model.d_model": "8"})


def test_a_model_without_a_preset_takes_the_tasks_sizes() -> None:
    config = SyntheticRunConfig.model_validate({"task": {"vocab_size": 1000}, "model": {"mixers": ["attention"]}})
    assert (config.model.vocab_size, config.model.max_len) == (1000, 256)
    assert config.model.d_model == LMConfig().d_model


@pytest.mark.parametrize("text", ["3e-3", "3.0e-3", ".3e-2", "3E-3", "0.003"])
def test_numbers_are_numbers(text: str) -> None:
    assert parse_yaml(text, "here") == 0.003


@pytest.mark.parametrize(
    ("text", "value"), [("12e", "12e"), ("e3", "e3"), ("1e3x", "1e3x"), ("-1e3", -1000.0), ("yes", True), ("4", 4)]
)
def test_other_scalars_stay_what_they_are(text: str, value: Any) -> None:
    assert parse_yaml(text, "here") == value


BAD = {
    "train.lrr=1": "--train.lrr: unknown key 'lrr'; did you mean 'lr'?",
    "trian.lr=1": "unknown key 'trian'; did you mean 'train'?",
    "train.lr=fast": "train.lr: should be a valid number, unable to parse string as a number; got 'fast'",
    "train.lr=yes": "train: lr should be a number; got True",
    "train.lr=0": "train.lr: should be greater than 0; got 0",
    "train.lr=.nan": "train.lr: should be a finite number; got nan",
    "train.epochs=2.5": "train.epochs: should be a valid integer, got a number with a fractional part; got 2.5",
    "train.betas=[0.9, 1]": "train.betas: both must be at least 0 and below 1, such as [0.9, 0.999]; got [0.9, 1.0]",
    "train.protocol=papers": "train.protocol: should be 'paper' or 'held_out'; got 'papers'; did you mean 'paper'?",
    "train.precision=int3": "train.precision: should be 'auto', 'fp32', 'tf32' or 'bf16'; got 'int3'",
    "train.device=gpu": "train.device: should be 'auto', 'cpu' or 'cuda'; got 'gpu'; did you mean 'cuda'?",
    "train=3": "train: should be a valid dictionary or instance of SyntheticTrainConfig; got 3",
    "train.lr=[1": "--train.lr is not valid YAML in line 1, column 3",
    "train.protocol=held_out": "train.protocol held_out reports on the held-out split, but task.held_out is empty",
    "task.train.0.seq_len=33": "seq_len must be even, got 33",
    "task.train.0.kv_pairs=9": "use seq_len >= 36 or kv_pairs <= 8",
    "task.vocab_size=32": "vocab_size must exceed seq_len=32, got 32",
    "task.name=mqr": "--task.name: unknown task 'mqr'; did you mean 'mqar'?",
    "task.kv_pairs=4": "task: kv_pairs is set for each segment: write it into train and test",
    "task.kv_pair=4": "--task.kv_pair: unknown key 'kv_pair'; kv_pairs is set for each segment",
    "task.seq_length=8": "or for all segments give --task.train.0.seq_len 8 --task.test.0.seq_len 8",
    "task.train.0.kvpairs=4": "--task.train.0.kvpairs: unknown key 'kvpairs'; did you mean 'kv_pairs'?",
    "task=3": "task: a task is a name, or a mapping of settings ({name: mqar, vocab_size: 64}); got 3",
    "task.train=[{seq_len: 32}]": "task.train.0.examples: is missing; give it a value",
    "task.train.1.seq_len=8": "task.train has entries 0 to 0; there is no '1'",
    "model.preset=rebasd": "--model.preset: unknown preset 'rebasd'; did you mean 'rebased'?",
    "model.prest=rebased": "--model.prest: unknown key 'prest'; did you mean 'preset'?",
    "model.dmodel=3": "--model.dmodel: unknown key 'dmodel'; did you mean 'd_model'?",
    "model.d_model=wide": "model.d_model: should be a valid integer, unable to parse string as an integer; got 'wide'",
    "model.mixers.1.nheads=4": "--model.mixers.1.nheads: unknown key 'nheads'; did you mean 'n_heads'?",
    "model.mixers.1.n_heads=few": "model.mixers.1.n_heads: should be a valid integer",
    "model.mixers.2.n_heads=4": "model: mixers has entries 0 to 1; there is no '2'",
    "model.mixers.one.n_heads=4": "model: mixers has entries 0 to 1; there is no 'one'",
    "model.mixers.1.name=rebsed": "--model.mixers.1.name: unknown mixer 'rebsed'; did you mean 'rebased'?",
    "model.mixers=[rebsed]": "model.mixers.0: unknown mixer 'rebsed'; did you mean 'rebased'?",
    "model.mixers=[rebsed, rebsed]": "model.mixers.0: unknown mixer 'rebsed'; did you mean 'rebased'?",
    "model.vocab_size=32": "model.vocab_size 32 is below the task's 64; leave it out",
    "model.max_len=16": "model.max_len 16 is below the task's longest sequence, 32; leave it out",
    "model=rebased": "model: should be a valid dictionary or instance of LMConfig; got 'rebased'",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_named_with_its_remedy(override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ValueError) as caught:
        load_config(SyntheticRunConfig, QUICK, {key: value})
    message = str(caught.value)
    assert BAD[override] in message
    assert len(message.splitlines()) == 1
    assert "pydantic" not in message
    assert "://" not in message


def test_a_mistake_says_where_its_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: mqar\nmodel: {preset: rebased}\ntrain: {lr: fast}\n")
    for overrides, begin in (
        ({}, f"{path}: train.lr: should be a valid number"),
        ({"train.seed": "1"}, f"{path}: train.lr: should be a valid number"),
        ({"train.lr": "slow"}, "--train.lr: should be a valid number"),
        ({"train": "{lr: slow}"}, "--train: train.lr: should be a valid number"),
        ({"train.lrr": "1", "task.name": "mqar"}, "--train.lrr: unknown key 'lrr'"),
    ):
        with pytest.raises(ValueError) as caught:
            load_config(SyntheticRunConfig, path, overrides)
        assert str(caught.value).startswith(begin)


def test_each_mistake_has_a_line() -> None:
    with pytest.raises(ValueError) as caught:
        load_config(SyntheticRunConfig, QUICK, {"train.lr": "-1", "train.seed": "-1", "model.d_model": "0"})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  lr: 1\n  lr: 2\n", r"is not valid YAML in line 3, column 3: the key 'lr' is given twice"),
        ("train: {lr: 1", r"is not valid YAML in line 1, column 14"),
        ("a: !!python/object/apply:os.getcwd []", r"is not valid YAML in line 1, column 4"),
        ("", "is empty; `rebased list configs` lists examples of configs"),
        ("just words", r"should hold keys and values .*; it holds 'just words'"),
        ("a: \x00", r"is not valid YAML"),
        ("{[1, 2]: 3}", r"is not valid YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.yaml {message}"):
        read_yaml(path)


@pytest.mark.parametrize("text", ["010", "0x10", "0b11", "1:40.5", "-1:40", "-017"])
def test_numbers_are_decimal(text: str) -> None:
    """YAML 1.1 reads these as 8, 16, 3, 100.5, -100 and -15."""
    with pytest.raises(ValueError, match=r"here is not valid YAML in line 1, column 9: .* is not a decimal number"):
        parse_yaml(f"epochs: {text}", "here")
    assert parse_yaml(f"name: '{text}'", "here") == {"name": text}


def test_a_ratio_is_text_and_no_number() -> None:
    """YAML 1.1 reads these as 181 and 100."""
    assert parse_yaml("{pattern: 3:1}", "here") == {"pattern": "3:1"}
    with pytest.raises(ValueError, match="epochs"):
        SyntheticTrainConfig.model_validate(parse_yaml("epochs: 1:40", "here"))


@pytest.mark.parametrize(
    ("text", "value"), [("1_000", 1000), ("-7", -7), ("+3", 3), ("0", 0), (".5", 0.5), ("1.", 1.0), ("2.5e3", 2500.0)]
)
def test_usual_numbers(text: str, value: float) -> None:
    assert parse_yaml(text, "here") == value


def test_yaml_anchors_and_merges_work() -> None:
    assert parse_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}", "here")["b"] == {"p": 1, "q": 3}


def test_binary_file(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"\x80\xff\x00")
    with pytest.raises(ValueError, match=r"weights\.pt is not a text file"):
        read_yaml(tmp_path / "weights.pt")


def test_merge() -> None:
    base = {"a": [1, {"b": 2}], "m": ["short_conv", {"name": "rebased", "n_heads": 8}]}
    assert merge(base, {"a": {"1": {"b": 3}}})["a"] == [1, {"b": 3}]
    assert merge(base, {"a": {0: 5}})["a"] == [5, {"b": 2}]
    assert merge(base, {"a": [7]})["a"] == [7]
    assert merge(base, {"m": {0: {"width": 4}}})["m"][0] == {"name": "short_conv", "width": 4}
    assert merge(base, {"m": {1: {"name": "based"}}})["m"][1] == {"name": "based"}  # not with rebased's arguments
    assert base == {"a": [1, {"b": 2}], "m": ["short_conv", {"name": "rebased", "n_heads": 8}]}


class Inner(Config):
    size: int = Field(1, ge=1)
    kind: Literal["small", "large"] = "small"


class Outer(Config):
    inner: Inner = Inner()


def test_plural() -> None:
    assert [plural(n, "run") for n in (0, 1, 2, 2000)] == ["0 runs", "1 run", "2 runs", "2,000 runs"]


def test_explain_needs_no_file() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"size": 0, "kind": "smal"}})
    assert explain(caught.value).splitlines() == [
        "inner.size: should be greater than or equal to 1; got 0",
        "inner.kind: should be 'small' or 'large'; got 'smal'; did you mean 'small'?",
    ]


def test_a_config_is_frozen_and_travels_between_processes() -> None:
    config = load_config(SyntheticRunConfig, QUICK)
    with pytest.raises(ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
