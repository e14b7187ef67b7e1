"""Names of runs in tables: a task is named by its sizes, a model by its mixers.

Settings in which runs of the same name differ are added to the name. So names are made for many runs at once. They are
made of the settings in a record, which may have been written by other code or name a user's own mixers.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rebased.runs.configs import run_kind
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import DEFAULT_TASK, Task, task_class
from rebased.tasks import task_names as registered_tasks

MODEL_NAMES: dict[tuple[str, ...], str] = {  # the usual name of a pattern of mixers
    ("short_conv", "rebased"): "ReBased",
    ("short_conv", "based"): "Based",
    ("short_conv", "linear_attention"): "LinearAttention",
    ("short_conv", "attention"): "ConvAttention",
    ("attention", "attention"): "Attention",
    ("attention",): "Attention",
    ("previous_token", "rebased"): "ReBased",  # of models that are probed
    ("previous_token", "based"): "Based",
    ("previous_token", "attention"): "Attention",
    ("short_conv", "rwkv"): "ConvRWKV",
    ("rwkv", "rwkv"): "RWKV",
    ("mamba", "mamba"): "Mamba",
    ("hyena", "hyena"): "Hyena",
}
KERNELS = {"none": "x²", "norm": "norm(x)²", "scale": "(γx)²", "affine": "(γx + β)²"}  # of ReBased
MODEL_ORDER = ("Based", *KERNELS.values(), "ReBased")  # models that tables list first

VARIANTS = {  # of ReBased: (argument, value) and what is added to its name
    ("norm", "rms"): "RMS norm",
    ("norm", "l2"): "L2 norm",
    ("norm_axis", "each_head"): "norm of each head",
    ("kernel", "fourth"): "fourth power",
    ("kernel", "learned"): "learnt coefficients",
}

# Settings that are never part of a model's name: axes of tables, execution settings, and what follows from the task.
AXES = ("train.seed", "train.lr", "model.d_model")
EXECUTION = tuple(dict.fromkeys((*SyntheticRunConfig.execution, *LMRunConfig.execution, "train.protocol", "backend")))
PARTS = ("train", "test")
FOLLOWS = ("model.max_len", "model.vocab_size")


class ModelName(NamedTuple):
    """The name of a run's model."""

    kind: str  # by its mixers: "ReBased"
    differences: str = ""  # from other models of its kind: "n_heads 2"

    def __str__(self) -> str:
        return f"{self.kind} ({self.differences})" if self.differences else self.kind


def kind_of(model: dict[str, Any]) -> str:
    """The usual name of a model by its mixers, such as "ReBased"; else the names of the mixers, "3 gla + attention"."""
    mixers = model["mixers"]
    pattern = tuple(mixer["name"] for mixer in mixers)
    times = [(each, len(list(group))) for each, group in groupby(pattern)]
    names = dict.fromkeys(f"{n} {each}" if n > 1 and len(times) > 1 else each for each, n in times)
    name = MODEL_NAMES.get(pattern, " + ".join(names))
    if name == "Attention" and model.get("norm") == "rms" and all(mixer.get("rotary") for mixer in mixers):
        return "ModernTransformer"  # the preset lm-modern
    if name != "ReBased":
        return name
    last = mixers[-1]
    variants = [words for (key, value), words in VARIANTS.items() if last.get(key) == value]
    return ", ".join([KERNELS.get(last.get("qk_transform"), name), *variants])


def flatten(tree: Any, at: str = "") -> dict[str, Any]:
    """{"model": {"mixers": [{"name": "rebased"}]}} -> {"model.mixers.0.name": "rebased"}"""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {at: tree}
    return {
        path: leaf for key, value in tree.items() for path, leaf in flatten(value, f"{at}.{key}".lstrip(".")).items()
    }


def task_names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The name of each run's task, such as "T = 256, 64 pairs" (MQAR), "copying, T = 64" or "enwik8, T = 2048" (text).

    Other settings in which tasks of the same name differ are added in parentheses.
    """
    described = [_size_and_settings(run) for run in runs]
    sizes = [size for size, _ in described]
    added = differences(sizes, [settings for _, settings in described], [()] * len(runs))
    return [f"{size} ({more})" if more else size for size, more in zip(sizes, added, strict=True)]


def _size_and_settings(run: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if run_kind(run) is LMRunConfig:
        data = run["data"]
        return f"{Path(data['folder']).name}, T = {data['seq_len']}", data
    return sizes_of(run["task"]), task_settings(run["task"])


def task_settings(task: dict[str, Any]) -> dict[str, Any]:
    """The settings that distinguish tasks. The segments of a split become two: examples in all, and sizes in words.

    The held-out split is left out, because it changes neither training nor the choice of an epoch.
    """
    leaves = {key: value for key, value in task.items() if key not in (*PARTS, "name", "held_out", "held_out_seed")}
    for part in PARTS:
        segments = task[part]
        leaves[f"{part}_examples"] = sum(segment["examples"] for segment in segments)
        leaves[part] = " + ".join(describe_segments([segment], words_of(task)) for segment in segments)
    return leaves


def sizes_of(task: dict[str, Any]) -> str:
    """The sizes of a task's sequences: "T = 256, 64 pairs"; training → test if they differ."""
    name = task["name"]
    trained, tested = (describe_segments(task[part], words_of(task)) for part in PARTS)
    sizes = trained if trained == tested else f"{trained} → {tested}"
    return sizes if name == DEFAULT_TASK else f"{name}, {sizes}"


def words_of(task: dict[str, Any]) -> Mapping[str, str]:
    """How the fields of a task's segments are written; for an unknown task, those that every task has."""
    name = task["name"]
    return (task_class(name) if name in registered_tasks() else Task).segment_words


def describe_segments(segments: Sequence[dict[str, Any]], words: Mapping[str, str]) -> str:
    """Segments by their fields: "T = 32–64, 4 pairs". A field without words is written "key value"."""
    keys = [key for key in segments[0] if key != "examples" and all(key in segment for segment in segments)]
    return ", ".join(words.get(key, f"{key} {{}}").format(span({segment[key] for segment in segments})) for key in keys)


def span(values: set[Any]) -> str:
    """One value "4", or a range "4–16". Values that are not numbers are listed."""
    if len(values) == 1:
        return str(*values)
    if all(isinstance(value, int | float) for value in values):
        return f"{min(values)}–{max(values)}"
    return " or ".join(sorted(map(str, values)))


def model_names(runs: Sequence[dict[str, Any]], tasks: Sequence[str]) -> list[ModelName]:
    """The name of each run's model: "ReBased", or "ReBased (n_heads 2)" if runs of one task and width differ in it.
    Then other kernels of ReBased state it, too: "x² (n_heads 12)"."""
    kinds = [kind_of(run["model"]) for run in runs]
    places = [(task, run["model"]["d_model"]) for run, task in zip(runs, tasks, strict=True)]
    mixers = [tuple(mixer["name"] for mixer in run["model"]["mixers"]) for run in runs]
    added = differences(kinds, [distinguishing_settings(run) for run in runs], places, mixers)
    return [ModelName(*name) for name in zip(kinds, added, strict=True)]


def distinguishing_settings(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model and its training that can distinguish it from others."""
    model, train = run["model"], run["train"]
    if isinstance(train.get("give_up"), dict):  # one setting, so that runs with and without it differ in it
        train = train | {"give_up": " ".join(f"{key} {value}" for key, value in train["give_up"].items())}
    leaves = flatten({"model": model, "train": train})
    for i, mixer in enumerate(model["mixers"]):  # a default that is written out counts as the default
        if mixer.get("value_width") == model["d_model"] // (mixer.get("n_heads") or 1):
            leaves[f"model.mixers.{i}.value_width"] = None
    ignored = (*AXES, *EXECUTION, *FOLLOWS)
    return {path: leaf for path, leaf in leaves.items() if not path.endswith(ignored)}


def differences(
    names: Sequence[str],
    settings: Sequence[dict[str, Any]],
    places: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
) -> list[str]:
    """For each run the settings in which runs of the same name and place differ: "n_heads 2, epochs 8".

    Names in one group state the same settings; by default each name is a group. A setting that only some records have
    is not compared: those records were written by other code. One that all layers have, always with one value, is
    named once.
    """
    groups = names if groups is None else groups
    added: dict[Hashable, dict[str, None]] = {}
    seen: dict[tuple[str, Hashable], dict[str, Any]] = {}
    for name, leaves, place, group in zip(names, settings, places, groups, strict=True):
        first = seen.setdefault((name, place), leaves)
        differ = [path for path in first if path in leaves and first[path] != leaves[path]]
        added.setdefault(group, {}).update(dict.fromkeys(differ))
    for group, paths in added.items():
        own = [leaves for other, leaves in zip(groups, settings, strict=True) if other == group]
        alike = {(last_word(path), *(str(leaves.get(path)) for leaves in own)): path for path in sorted(paths)[::-1]}
        added[group] = dict.fromkeys(sorted(alike.values()))
    return [
        ", ".join(f"{shorten(path, added[group])} {leaves.get(path)}" for path in added[group])
        for group, leaves in zip(groups, settings, strict=True)
    ]


def shorten(path: str, paths: Iterable[str]) -> str:
    """The last word of a path, or the whole path if another one ends with the same word."""
    return path if Counter(map(last_word, paths))[last_word(path)] > 1 else last_word(path)


def last_word(path: str) -> str:
    """Of "model.mixers.0.n_heads": "n_heads"."""
    return path.rsplit(".", 1)[-1]
