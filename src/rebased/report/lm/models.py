"""Runs of language models by model and seed. Only runs that were measured on the same tokens stand side by side."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, log
from pathlib import PurePath
from statistics import fmean
from typing import Any, NamedTuple

from rebased.analysis.paired import compare_all
from rebased.config import grouped
from rebased.report.comparisons import Difference
from rebased.report.reference_values import NO_VALUES, Reference, ReferenceValues
from rebased.runs.finished import Run
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record_schema import MAX_COUNT, is_by_distance
from rebased.runs.run_names import ModelName, differences, flatten, kind_of

PARTS = {"all": "all", "ar": "AR", "non_ar": "non-AR"}  # the key in a record: the heading of a column
SPLITS = ("test", "valid")  # the first that all runs were measured on is reported
MODEL_ORDER = ("Attention", "Based", "ReBased")  # the models that tables list first

LAST_STEPS = 200  # of training, over which the training loss is averaged
PARTED = 0.1  # nats by which the loss on unseen text is above that of training where the two have parted

# Settings that name no model: the seed, execution settings, and how often something is recorded.
NAMELESS = (
    "train.seed",
    *LMRunConfig.execution,
    "train.log_every",
    "train.eval_every",
    "train.eval_windows",
    "train.final_windows",
    "train.checkpoint_every",
)


class Distance(NamedTuple):
    """AR tokens whose bigram was last seen `nearest` to `farthest` tokens ago."""

    nearest: int
    farthest: int
    tokens: int  # how many they are

    def __str__(self) -> str:
        return f"{self.nearest:,}{f' to {self.farthest:,}' if self.farthest > self.nearest else ''} ago"


@dataclass(frozen=True)
class LanguageModels:
    """Finished runs that were measured on one split of one text, in the same windows."""

    split: str  # "test" or "valid"
    models: dict[str, dict[int, Run]]  # by name, then by seed
    left_out: list[str]  # folders of runs that are not finished, or that repeat another run's seed
    known: ReferenceValues = NO_VALUES

    @cached_property
    def runs(self) -> list[Run]:
        """All runs, in the order of the models."""
        return [run for seeds in self.models.values() for run in seeds.values()]

    @property
    def data(self) -> str:
        """The data in words, such as "text enwik8 (db4046b34883), T = 2,048"."""
        run = self.runs[0]
        settings = run.settings["data"]
        isolated = ", documents isolated" if settings["isolate_documents"] else ""
        tokens = measured(run, self.split)["tokens"]
        return (
            f"text {PurePath(settings['folder']).name} ({checksum(run)}), T = {settings['seq_len']:,}{isolated}, "
            f"{tokens:,} tokens of the {self.split} split"
        )

    def values(self, model: str, part: str) -> dict[int, float]:
        """Perplexity by seed; `part` is a key of PARTS."""
        return {seed: measured(run, self.split)[part]["perplexity"] for seed, run in self.models[model].items()}

    def losses(self, model: str) -> tuple[float, float] | None:
        """(training loss, loss on the measured split), means over seeds; None if a record has no training loss."""
        trained = [loss for run in self.models[model].values() if (loss := training_loss(run)) is not None]
        tested = [log(value) for value in self.values(model, "all").values()]
        return (fmean(trained), fmean(tested)) if len(trained) == len(tested) else None

    @property
    def overfitting(self) -> str:
        """Which models have learned the training text by heart, with numbers; empty if none has."""
        found = {model: losses for model in self.models if (losses := self.losses(model))}
        if not any(tested - trained > PARTED for trained, tested in found.values()):
            return ""
        times = {f"{count:.1f}" for run in self.runs if (count := passes(run))}
        read = f" after {' or '.join(sorted(times))} passes over the text" if times else ""
        listed = "; ".join(f"{model} {trained:.2f} and {tested:.2f}" for model, (trained, tested) in found.items())
        return (
            f"Overfitting: the loss on the {self.split} split is above that of training{read}. Nats per token in the "
            f"last {LAST_STEPS} steps of training and on the {self.split} split: {listed}. Differences between models "
            "on this split show how they overfit, not only what they can learn."
        )

    def reference(self, model: str) -> Reference:
        """What others report for a model. For one of several that differ in settings nothing is known."""
        return self.known.of(next(iter(self.models[model].values()))) if kind_in(model) == model else Reference()

    @cached_property
    def by_distance(self) -> dict[str, dict[Distance, list[float]]]:
        """Perplexity of AR tokens by model and distance, nearest first, one value per seed. Models whose records do not
        have it are left out."""
        found: dict[str, dict[Distance, list[float]]] = {}
        for model, runs in self.models.items():
            by_seed = [perplexity_by_distance(run, self.split) for run in runs.values()]
            distances = sorted(set().union(*by_seed))
            if distances:
                found[model] = {at: [values[at] for values in by_seed if at in values] for at in distances}
        return found

    @property
    def without_distances(self) -> list[Run]:
        """The runs whose records do not have AR tokens by distance."""
        return [run for run in self.runs if not perplexity_by_distance(run, self.split)]


def compare_language_models(runs: Sequence[Run], known: ReferenceValues = NO_VALUES) -> LanguageModels:
    """Group runs by model and seed. Runs measured on different text, or in different windows, are refused. `known` is
    what others report for them."""
    done = [run for run in runs if is_finished(run)]
    if not done:
        raise ValueError(f"none of {len(runs)} run(s) of a language model is done; finish them with --resume")
    split = common_split(done)
    for what in read(done[0]) | measured_on(done[0], split):
        by_value = grouped(done, lambda run, what=what: (read(run) | measured_on(run, split))[what])  # type: ignore[misc]
        if len(by_value) > 1:
            said = "; ".join(f"{value} in {some[0].folder}" for value, some in by_value.items())
            raise ValueError(f"these runs have different {what}, so their perplexities cannot be compared: {said}")
    return by_name(done, split, [run.folder for run in runs if run not in done], known)


def group_language_models(runs: Sequence[Run], known: ReferenceValues = NO_VALUES) -> list[LanguageModels]:
    """Group the finished runs as `compare_language_models` does, once per text and way of measuring it."""
    groups = []
    for alike in grouped(filter(is_finished, runs), lambda run: tuple(read(run).values())).values():
        split = common_split(alike)
        by_tokens = grouped(alike, lambda run, split=split: tuple(measured_on(run, split).values()))  # type: ignore[misc]
        groups += [by_name(group, split, [], known) for group in by_tokens.values()]
    return groups


def read(run: Run) -> dict[str, Any]:
    """What a run read. Perplexities can be compared if it is the same."""
    data = run.settings["data"]
    return {"texts": checksum(run)} | {f"data.{key}": data[key] for key in ("seq_len", "isolate_documents")}


def measured_on(run: Run, split: str) -> dict[str, Any]:
    """The number and choice of windows that a run was measured on. Compared runs must agree."""
    found = measured(run, split)
    windows = found.get("windows", "all or the first")
    return {"numbers of measured tokens": found.get("tokens"), "choices of measured windows": windows}


def is_finished(run: Run) -> bool:
    """Whether a run is done and was measured."""
    return run.status == "done" and any(measured(run, split) for split in SPLITS)


def common_split(runs: Sequence[Run]) -> str:
    """The split to report: test if every run was measured on it, else valid."""
    return SPLITS[0] if all(measured(run, SPLITS[0]) for run in runs) else SPLITS[1]


def by_name(runs: Sequence[Run], split: str, left_out: Sequence[str], known: ReferenceValues) -> LanguageModels:
    """Name the models and sort them; a second run of one model and seed is left out."""
    models: dict[str, dict[int, Run]] = {}
    repeated = []
    for name, run in sorted(zip(names(runs), runs, strict=True), key=lambda pair: order(pair[0])):
        if models.setdefault(name, {}).setdefault(run.seed, run) is not run:
            repeated.append(run.folder)
    return LanguageModels(split, models, [*left_out, *repeated], known)


def names(runs: Sequence[Run]) -> list[str]:
    """One name per run: the usual one, with the settings in which models of one name differ."""
    kinds = [kind_of(run.settings["model"]) for run in runs]
    apart = differences(kinds, [naming_settings(run) for run in runs], [()] * len(runs))
    return [str(ModelName(*name)) for name in zip(kinds, apart, strict=True)]


def kind_in(name: str) -> str:
    """'ReBased (n_heads 6)' -> 'ReBased'"""
    return name.split(" (")[0]


def naming_settings(run: Run) -> dict[str, Any]:
    """By path, the settings that distinguish models: {"model.mixers.1.n_heads": 12, "train.lr": 0.001, ...}"""
    leaves = flatten({"model": run.settings["model"], "train": run.settings["train"]})
    return {path: leaf for path, leaf in leaves.items() if path not in NAMELESS}


def training_differences(runs: Sequence[Run]) -> str:
    """The training settings in which the runs differ, with their values: 'lr 0.0003 and 0.001'."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for path, leaf in naming_settings(run).items():
            if path.startswith("train."):
                found.setdefault(path.removeprefix("train."), {})[str(leaf)] = None
    return ", ".join(f"{key} {' and '.join(values)}" for key, values in found.items() if len(values) > 1)


def order(name: str) -> tuple[int, str]:
    """A key to sort names by: those of MODEL_ORDER, the others after them."""
    kind = kind_in(name)
    return (MODEL_ORDER.index(kind) if kind in MODEL_ORDER else len(MODEL_ORDER), name)


def checksum(run: Run) -> str:
    """The first digits of the checksum of the tokens that a run read."""
    return run.lines[0]["corpus"]["sha256"][:12]


def steps(run: Run) -> list[dict[str, Any]]:
    """The lines of a record about training steps, without those that lack a number."""
    numbers = ("step", "tokens", "tokens_per_second")
    return [line for line in run.lines if line["type"] == "step" and all(is_number(line.get(key)) for key in numbers)]


def curve(run: Run, kind: str, key: str) -> tuple[list[int], list[float]]:
    """(steps, values of `key`) over the lines of type `kind` ("step" or "eval") that have a number there."""
    lines = [line for line in run.lines if line["type"] == kind]
    points = [(line["step"], line[key]) for line in lines if is_number(line.get("step")) and is_number(line.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def training_loss(run: Run) -> float | None:
    """The mean loss of the last steps of training; None if the record has none."""
    at, losses = curve(run, "step", "loss")
    return fmean(loss for step, loss in zip(at, losses, strict=True) if step > at[-1] - LAST_STEPS) if at else None


def passes(run: Run) -> float | None:
    """How often the training text was read; None if the record does not say how long it is."""
    known = run.lines[0]["corpus"].get("tokens", {}).get("train")
    return steps(run)[-1]["tokens"] / known if known and steps(run) else None


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and isfinite(value)


def measured(run: Run, split: str) -> dict[str, Any]:
    """The measurement of a split in the record's last line; empty if it is missing or has numbers that no run can
    have."""
    found = run.lines[-1].get(split) or {}
    try:
        numbers = [found[part]["perplexity"] for part in PARTS] + [found["tokens"], found["ar_share"]]
        return found if all(0 <= number <= MAX_COUNT for number in numbers) and steps(run) else {}
    except (KeyError, TypeError):
        return {}


def perplexity_by_distance(run: Run, split: str) -> dict[Distance, float]:
    """Perplexity of AR tokens by distance, nearest first. Empty if the record has none, or impossible numbers."""
    found = measured(run, split).get("by_distance")
    if not is_by_distance(found):
        return {}
    return {Distance(at["nearest"], at["farthest"], at["tokens"]): at["perplexity"] for at in found}


def choose_reference(models: Mapping[str, Sized], wanted: str | None) -> str:
    """The model that the others are compared with; `models` has the runs of each.

    `wanted` is a name or a kind ("ReBased"). By default, and if no model has that name, it is the ReBased with most
    runs, or else the first model.
    """
    for choice in (wanted, "ReBased"):
        if choice is not None and choice in models:
            return choice
        if alike := [name for name in models if kind_in(name) == choice]:
            return max(alike, key=lambda name: len(models[name]))
    return next(iter(models))


def compare_models(found: LanguageModels, wanted: str | None = None) -> list[Difference]:
    """The reference against each other model, for all, AR and non-AR tokens. All p values are corrected together."""
    reference = choose_reference(found.models, wanted)
    ours = found.models[reference]
    others = [name for name, runs in found.models.items() if name != reference and runs.keys() & ours.keys()]
    places = [(other, part) for other in others for part in PARTS]
    compared = compare_all([(found.values(reference, part), found.values(other, part)) for other, part in places])
    codes = {other: {run.code for runs in (ours, found.models[other]) for run in runs.values()} for other in others}
    return [
        Difference(reference, other, part, len(codes[other]) == 1, one)
        for (other, part), one in zip(places, compared, strict=True)
    ]
