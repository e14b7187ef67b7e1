"""Reference pages as Markdown, made from the code: the command line, and the settings of configs."""

import inspect
import re
import types
from collections.abc import Collection
from typing import Any, Literal, Union, get_args, get_origin

import docstring_parser
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rebased.cli import COMMANDS, PANELS, build_app
from rebased.mixers import mixer_class, mixer_names
from rebased.models.config import LMConfig, mixer_schema
from rebased.models.presets import preset_names
from rebased.runs.lm_config import LMDataConfig, LMTrainConfig
from rebased.runs.shipped import shipped_configs
from rebased.runs.synthetic_config import SyntheticTrainConfig
from rebased.tasks import TaskData, task_class, task_names

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def command_line() -> str:
    """Every command with its options, as `--help` describes them."""
    text = build_app(COMMANDS).generate_docs(output_format="markdown", heading_level=1)
    commands = text[text.index(f"**{next(iter(PANELS))}**:") :]
    unwrapped = re.sub(r"(?<=\S)\n {4}(?=\S)", " ", commands)
    return unwrapped.replace("][", r"]\[")  # brackets of optional parts, no link


def settings() -> str:
    """Every setting of a run's config: its type, default, bounds and meaning."""
    parts = ["## A run on a synthetic task", "A file with the sections `task`, `model` and `train`: `rebased train`."]
    parts += ["### task", "Each task has these settings, and its own ones below."]
    parts += [table(TaskData)]
    for name in task_names():
        parts += [f"#### task: {name}", summary(task_class(name)), task_table(name)]
    parts += ["### train", summary(SyntheticTrainConfig), table(SyntheticTrainConfig)]
    parts += ["## A run of a language model"]
    parts += ["A file with the sections `data`, `model` and `train`: `rebased lm train`."]
    parts += ["### data", summary(LMDataConfig), table(LMDataConfig)]
    parts += ["### train: language models", summary(LMTrainConfig), table(LMTrainConfig)]
    parts += ["## model", "The section is the same for both kinds of runs."]
    parts += [f"`preset` starts from one of {', '.join(f'`{name}`' for name in preset_names())}; other keys change it."]
    parts += [table(LMConfig)]
    for name in mixer_names():
        cls = mixer_class(name)
        schema = mixer_schema(name, cls)
        schema.__doc__ = cls.__doc__
        parts += [f"### mixer: {name}", summary(cls), table(schema)]
    parts += ["## Shipped configs", shipped()]
    return "\n\n".join(part for part in parts if part)


def task_table(name: str) -> str:
    """The settings of a task: those that each of its segments has, then the others."""
    cls = task_class(name)
    own = [key for key in cls.model_fields if key not in TaskData.model_fields]
    rows = table(cls, only=[key for key in own if key not in cls.segment_fields])
    each = table(cls, only=[key for key in own if key in cls.segment_fields])
    return "\n\n".join(
        part
        for part in (f"In each segment, beside `examples`:\n\n{each}", rows and f"For all segments:\n\n{rows}")
        if part
    )


def table(cls: type[BaseModel], *, only: Collection[str] | None = None) -> str:
    """One row per setting; "" if there are none. A setting without a description takes that of the docstring."""
    rows = []
    arguments = argument_meanings(cls)
    for key, field in cls.model_fields.items():
        if key != "name" and (only is None or key in only):
            default = "required" if field.is_required() else code(written(field.get_default(call_default_factory=True)))
            kind = " ".join([type_name(field.annotation), *bounds(field)])
            rows.append(row(code(key), default, field.description or arguments.get(key, ""), kind))
    return "\n".join([row("setting", "default", "meaning", "type"), row(*["---"] * 4), *rows]) if rows else ""


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def code(text: str) -> str:
    """Text as inline code."""
    return f"`{text}`"


def bounds(field: FieldInfo) -> list[str]:
    """Limits of a number, such as ["≥ 1"]."""
    limits = [(getattr(part, key, None), sign) for part in field.metadata for key, sign in SIGNS.items()]
    return [f"{sign} {limit}" for limit, sign in limits if limit is not None]


def type_name(annotation: Any) -> str:
    """A type as a reader says it: "int", "`fp32` or `bf16`", "list of float"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(code(str(value)) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(code("none") if part is type(None) else type_name(part) for part in arguments)
    if origin in (tuple, list):
        kinds = list(dict.fromkeys(type_name(part) for part in arguments if part is not Ellipsis))
        return f"list of {' or '.join(kinds)}"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return type_name(arguments[0])
    name = str(getattr(annotation, "__name__", annotation))
    return {"MixerConfig": "mixer", "Path": "path", "Segment": "segment"}.get(name, name)


def written(value: Any) -> str:
    """A default as YAML would say it."""
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, BaseModel):
        return str(value.name)  # type: ignore[attr-defined]  # a mixer
    return str(value)


def summary(cls: type) -> str:
    """The first paragraph of a docstring, as Markdown text."""
    return escaped(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])


def escaped(text: str) -> str:
    """Plain text for Markdown, on one line."""
    return " ".join(text.split()).replace("*", r"\*").replace("_", r"\_")


def argument_meanings(cls: type) -> dict[str, str]:
    """What the section "Args" of a docstring says about each argument; one line may be about several."""
    parsed = docstring_parser.parse(cls.__doc__ or "", style=docstring_parser.DocstringStyle.GOOGLE)
    return {name: escaped(each.description or "") for each in parsed.params for name in each.arg_name.split(", ")}


def shipped() -> str:
    """One row per config that comes with the package: its name, and the first sentence of its first comment."""
    rows = []
    for name, path in shipped_configs().items():
        comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
        words = " ".join(comment[0].replace("#", " ").split()) if comment else ""
        rows.append(row(code(name), re.split(r"(?<=[.?]) ", words)[0]))
    return "\n".join([row("name", "what it is"), row("---", "---"), *rows])
