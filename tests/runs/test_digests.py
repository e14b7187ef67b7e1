"""Recorded runs keep their digests: a field that is added later counts only where it differs from its default."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field
from torch import Tensor, nn

from rebased.config import Config, merge
from rebased.mixers import register_mixer
from rebased.models import LMConfig
from rebased.runs.collect import collect
from rebased.runs.finished import Run
from rebased.runs.folder import run_folder
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import MQAR, register_task
from rebased.train import train
from rebased.train.sweep.grid import load_sweep
from registers import registers_kept
from tiny_run import TINY, tiny

RESULTS = Path(__file__).parents[2] / "results"
BUNDLES = sorted(path for suffix in ("xz", "gz") for path in RESULTS.rglob(f"*.jsonl.{suffix}"))


def recorded(path: Path) -> list[tuple[type[Config], Run]]:
    """Every run of a bundle, with the class of its config."""
    found = collect([path])
    return [*((SyntheticRunConfig, run) for run in found.runs), *((LMRunConfig, run) for run in found.lm_runs)]


def test_there_are_bundles_of_both_kinds() -> None:
    found = set[type[Config]]()
    for path in sorted(BUNDLES, key=lambda path: path.stat().st_size):
        found |= {cls for cls, _ in recorded(path)}
        if len(found) == 2:
            return
    pytest.fail(f"bundles of {found} alone")


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_every_recorded_run_keeps_its_digest(path: Path) -> None:
    runs = recorded(path)
    assert runs
    assert {run.digest: cls.model_validate(run.settings).digest() for cls, run in runs} == {
        run.digest: run.digest for _, run in runs
    }


def test_the_sweep_over_language_models_knows_the_recorded_runs() -> None:
    """The nine runs of results/enwik8/enwik8.jsonl.gz, which another program made, are those of the sweep file."""
    few = {"steps": "600", "warmup_steps": "100", "eval_every": "300", "checkpoint_every": "600"}
    points = load_sweep(find_config("enwik8", "sweep"), {f"train.{key}": value for key, value in few.items()}).points
    known = {run.digest for _, run in recorded(RESULTS / "enwik8")}
    assert {point.config.digest() for point in points} == known


class Before(Config):
    size: int = 1


class After(Config):
    added_later: ClassVar = ("depth", "names")
    size: int = 1
    depth: int = 3
    names: tuple[str, ...] = Field(default_factory=lambda: ("a",))


class OuterBefore(Config):
    one: Before = Before()
    many: tuple[Before, ...] = ()
    named: dict[str, Before]


class OuterAfter(Config):
    one: After = After()
    many: tuple[After, ...] = ()
    named: dict[str, After]


def test_an_added_field_counts_only_where_it_is_not_its_default() -> None:
    assert After().digest() == After(depth=3).digest() == After(names=("a",)).digest() == Before().digest()
    assert len({config.digest() for config in (After(), After(depth=4), After(names=()), After(size=2))}) == 4
    tree = {"one": {"size": 5}, "many": [{"size": 2}, {}], "named": {"x": {}}}
    same = OuterAfter.model_validate(tree)
    assert same.digest() == OuterBefore.model_validate(tree).digest()
    for change in ({"one": {"depth": 4}}, {"many": [{}, {"depth": 4}]}, {"named": {"x": {"depth": 4}}}):
        assert OuterAfter.model_validate(tree | change).digest() != same.digest()
        assert OuterAfter.model_validate(tree | change).digest() != OuterBefore.model_validate(tree).digest()


def test_a_field_without_the_mark_always_counts() -> None:
    class Wider(Config):
        size: int = 1
        depth: int = 3

    assert Wider().digest() != Before().digest()


def test_what_was_added_later_is_a_field_with_a_default() -> None:
    with pytest.raises(ValueError, match="added_later names 'dept', which is not one of its fields"):

        class Misspelt(Config):
            added_later: ClassVar = ("dept",)
            depth: int = 3

    with pytest.raises(ValueError, match="depth was added later, so it needs a default"):

        class Required(Config):
            added_later: ClassVar = ("depth",)
            depth: int


def test_a_mixers_added_argument() -> None:
    class Plain(nn.Module):
        def __init__(self, d_model: int, *, width: int = 3) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Gated(Plain):
        added_later = ("gate",)

        def __init__(self, d_model: int, *, width: int = 3, gate: bool = False) -> None:
            super().__init__(d_model, width=width)

    def digest(cls: type[nn.Module], **arguments: Any) -> str:
        with registers_kept():
            register_mixer("own")(cls)
            return LMConfig.model_validate({"mixers": [{"name": "own", **arguments}]}).digest()

    assert digest(Plain) == digest(Gated) == digest(Gated, gate=False)
    assert len({digest(Plain), digest(Gated, gate=True), digest(Gated, width=4)}) == 3


def test_the_name_of_a_task_counts_unless_it_is_the_default() -> None:
    """Tasks of two names may have the same settings; only MQAR was recorded before tasks had names."""
    for name in ("one", "other"):
        register_task(name)(type(name, (MQAR,), {}))
    plain = SyntheticRunConfig.model_validate(TINY)
    named = [
        SyntheticRunConfig.model_validate(merge(TINY, {"task": {"name": name}})) for name in ("mqar", "one", "other")
    ]
    assert named[0].digest() == plain.digest()
    assert len({config.digest() for config in named}) == 3


def test_a_run_written_before_tasks_had_names_is_resumed(tmp_path: Path) -> None:
    config = tiny({"train": {"epochs": 1}})
    assert "name" not in TINY["task"]
    assert config.model_dump()["task"]["name"] == "mqar"
    assert SyntheticRunConfig.model_validate(config.model_dump()).digest() == config.digest()
    with run_folder(tmp_path / "run", config, resume=False):
        file = tmp_path / "run" / "config.yaml"
        text = file.read_text()
    assert text.count("  name: mqar\n") == 1
    file.write_text(text.replace("  name: mqar\n", ""))
    assert train(config, tmp_path / "run", resume=True).status == "done"
