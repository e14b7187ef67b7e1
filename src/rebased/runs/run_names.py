"""What runs are called: a task by its sizes, a model by its mixers, each with what else sets it apart.

Names are made of settings as a record keeps them, which other code than today's, or mixers of a user's own, may have
made; and of many runs at once: what all have in common tells none apart.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rebased.runs.lm_config import TextRunConfig
from rebased.runs.synthetic_config import RunConfig, TrainConfig
from rebased.tasks import DEFAULT_TASK, Task, task_class
from rebased.tasks import task_names as registered_tasks

PAPER_NAMES: dict[tuple[str, ...], str] = {  # as the heads of the paper's Table 4 call these patterns of mixers
    ("short_conv", "rebased"): "ReBased",
    ("short_conv", "based"): "Based",
    ("short_conv", "attention"): "ConvAttention",
    ("attention", "attention"): "Attention",
    ("attention",): "Attention",
    ("short_conv", "rwkv"): "ConvRWKV",
    ("rwkv", "rwkv"): "RWKV",
    ("mamba", "mamba"): "Mamba",
    ("hyena", "hyena"): "Hyena",
}
KERNELS = {"none": "x²", "norm": "norm(x)²", "scale": "(γx)²", "affine": "(γx + β)²"}  # rows of the paper's Table 1

# Settings that name no model: axes of their own, how the work was done, or what follows from the task.
AXES = ("train.seed", "train.lr", "model.d_model")
EXECUTION = tuple(dict.fromkeys((*RunConfig.execution, *TextRunConfig.execution, "train.protocol", "backend")))
DEFAULTS = TrainConfig().model_dump(mode="json")  # of settings that a record written by older code may lack
PARTS = ("train", "test")
FOLLOWS = ("model.max_len", "model.vocab_size")


class ModelName(NamedTuple):
    kind: str  # "ReBased": by its mixers
    apart: str = ""  # "n_heads 2": in what it differs from others of its kind

    def __str__(self) -> str:
        return f"{self.kind} ({self.apart})" if self.apart else self.kind


def kind_of(model: dict[str, Any]) -> str:
    """The paper's name for a pattern of mixers, where it has one."""
    mixers = model["mixers"]
    pattern = tuple(mixer["name"] for mixer in mixers)
    name = PAPER_NAMES.get(pattern, " + ".join(dict.fromkeys(pattern)))
    return KERNELS.get(mixers[-1].get("qk_transform"), name) if name == "ReBased" else name


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
    """What each run is trained on: "T = 256, 64 pairs" on MQAR, "copying, T = 64" on another task, "enwik8, T = 2048"
    on text. Tasks that differ in more than that get it in parentheses."""
    sizes = [sizes_of(run["task"]) if "task" in run else text_name(run["data"]) for run in runs]
    settings = [task_settings(run["task"]) if "task" in run else run["data"] for run in runs]
    apart = tell_apart(sizes, settings, [()] * len(runs))
    return [f"{size} ({more})" if more else size for size, more in zip(sizes, apart, strict=True)]


def task_settings(task: dict[str, Any]) -> dict[str, Any]:
    """Segments as two settings: how many examples, and of what. Held-out data change neither training nor choice."""
    leaves = {key: value for key, value in task.items() if key not in (*PARTS, "name", "held_out", "held_out_seed")}
    for part in PARTS:
        segments = task[part]
        leaves[f"{part}_examples"] = sum(segment["examples"] for segment in segments)
        leaves[part] = " + ".join(describe_segments([segment], words_of(task)) for segment in segments)
    return leaves


def text_name(data: dict[str, Any]) -> str:
    """The name of a prepared folder, and the length of windows: "enwik8, T = 2048"."""
    return f"{Path(data['folder']).name}, T = {data['seq_len']}"


def sizes_of(task: dict[str, Any]) -> str:
    """A task by its sizes: "T = 256, 64 pairs"."""
    name = task.get("name", DEFAULT_TASK)
    trained, tested = (describe_segments(task[part], words_of(task)) for part in PARTS)
    sizes = trained if trained == tested else f"{trained} → {tested}"
    return sizes if name == DEFAULT_TASK else f"{name}, {sizes}"


def words_of(task: dict[str, Any]) -> Mapping[str, str]:
    """How a task writes its segment fields; of a task that is not known here, as every task does."""
    name = task.get("name", DEFAULT_TASK)
    return (task_class(name) if name in registered_tasks() else Task).segment_words


def describe_segments(segments: Sequence[dict[str, Any]], words: Mapping[str, str]) -> str:
    """Segments by their fields: "T = 32–64, 4 pairs". A field without words is written "key value"."""
    keys = [key for key in segments[0] if key != "examples" and all(key in segment for segment in segments)]
    return ", ".join(words.get(key, f"{key} {{}}").format(span({segment[key] for segment in segments})) for key in keys)


def span(values: set[Any]) -> str:
    """One value, or from which to which: "4" or "4–16". Values that have no order are listed."""
    if len(values) == 1:
        return str(*values)
    if all(isinstance(value, int | float) for value in values):
        return f"{min(values)}–{max(values)}"
    return " or ".join(sorted(map(str, values)))


def model_names(runs: Sequence[dict[str, Any]], tasks: Sequence[str]) -> list[ModelName]:
    """The name of each run's model: "ReBased", or "ReBased (n_heads 2)" where runs of one task and width differ so."""
    kinds = [kind_of(run["model"]) for run in runs]
    places = [(task, run["model"]["d_model"]) for run, task in zip(runs, tasks, strict=True)]
    apart = tell_apart(kinds, [own_settings(run) for run in runs], places)
    return [ModelName(*name) for name in zip(kinds, apart, strict=True)]


def own_settings(run: dict[str, Any]) -> dict[str, Any]:
    """What a model and its training could be told apart by."""
    model = run["model"]
    train = DEFAULTS | run["train"] if "task" in run else run["train"]
    leaves = flatten({"model": model, "train": train})
    for i, mixer in enumerate(model["mixers"]):  # the default written out, or not
        if mixer.get("value_width") == model["d_model"] // (mixer.get("n_heads") or 1):
            leaves[f"model.mixers.{i}.value_width"] = None
    ignored = (*AXES, *EXECUTION, *FOLLOWS)
    return {path: leaf for path, leaf in leaves.items() if not path.endswith(ignored)}


def tell_apart(names: Sequence[str], settings: Sequence[dict[str, Any]], places: Sequence[Hashable]) -> list[str]:
    """For each run those settings in which runs of its name and place differ, "n_heads 2, epochs 8". A setting that
    only some records have is not compared: other code wrote them, which is said elsewhere."""
    added: dict[str, dict[str, None]] = {}
    seen: dict[tuple[str, Hashable], dict[str, Any]] = {}
    for name, leaves, place in zip(names, settings, places, strict=True):
        first = seen.setdefault((name, place), leaves)
        differ = [path for path in first if path in leaves and first[path] != leaves[path]]
        added.setdefault(name, {}).update(dict.fromkeys(differ))
    return [
        ", ".join(f"{shorten(path, added[name])} {leaves.get(path)}" for path in added[name])
        for name, leaves in zip(names, settings, strict=True)
    ]


def shorten(path: str, paths: Iterable[str]) -> str:
    """The last word of a path, or all of it where another path ends alike."""
    last = path.rsplit(".", 1)[-1]
    return path if Counter(other.rsplit(".", 1)[-1] for other in paths)[last] > 1 else last
