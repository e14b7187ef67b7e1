"""The base class of all configs (typed, frozen, no unknown keys), and how a config is read from a YAML file."""

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rebased.files import read_bounded

_log = logging.getLogger("rebased")

YAML_BYTES = 2**18
"""The largest YAML text that is read; the shipped configs have about a thousand bytes."""
YAML_DEPTH = 32
"""The deepest nesting of a YAML text."""
YAML_VALUES = 20_000
"""The most values of a YAML text, each alias (*name) counted with all that it stands for."""
INTEGERS = 2**63
"""Integers of a config are smaller than this: torch's and numpy's have 64 bits."""


SYNONYMS = {"gpu": "cuda", "learning_rate": "lr", "hidden_size": "d_model"}
"""Words that mean a known one and do not look like it."""


def nearest_word(word: str, known: list[str]) -> str | None:
    """The known word that was probably meant; None if none is similar."""
    if SYNONYMS.get(word) in known:
        return SYNONYMS[word]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.5)), None)


def did_you_mean(word: str, known: list[str]) -> str:
    """The end of an error message about an unknown word: the most similar known word, or all of them."""
    near = nearest_word(word, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"


Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items with equal keys, in the order in which the keys first appear."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def plural(count: int, noun: str) -> str:
    """'1 run', '2,000 runs'"""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_UNSAFE = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),  # DEL and the second set of control characters
    *range(0x202A, 0x202F),  # these and the next four turn the direction of text
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of pairs, which no encoding can write
    0xFFFE,  # these two are no characters, and XML does not take them
    0xFFFF,
)
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _UNSAFE}


def plain(text: str) -> str:
    """The text with every control character written out: an escape code becomes the four characters \\x1b."""
    return text if text.isascii() and text.isprintable() else text.translate(_SHOWN)


def plain_tree(value: Any) -> Any:
    """JSON data whose texts, keys included, are plain."""
    if isinstance(value, dict):
        return {plain(key): plain_tree(entry) for key, entry in value.items()}
    if isinstance(value, list):  # of numbers, most often: matrices of a probe
        return [entry if type(entry) in (float, int) else plain_tree(entry) for entry in value]
    return plain(value) if isinstance(value, str) else value


class Config(BaseModel):
    """The base class of configs. Values are validated and cannot be changed; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    not_in_digest: ClassVar[tuple[str, ...]] = ()
    """Keys that the digest leaves out, such as train.device: they change how a result is computed, not which result."""

    added_later: ClassVar[tuple[str, ...]] = ()
    """Fields that were added after runs had been recorded. The digest leaves such a field out while it has its default,
    so known runs keep their names. The default of such a field must never change."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        check_added_later(cls)

    @model_validator(mode="before")
    @classmethod
    def _reject_mistakes(cls, values: Any) -> Any:
        if isinstance(values, dict):
            fields = cls.model_fields  # once: pydantic takes microseconds to hand it out
            for key, value in values.items():
                if key not in fields:
                    raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), list(fields))}")
                if isinstance(value, bool) and fields[key].annotation in (int, float):
                    raise ValueError(f"{key} should be a number; got {value}")  # pydantic would take yes for 1
                if isinstance(value, int) and abs(value) >= INTEGERS:
                    raise ValueError(f"{key} is {short(value)}, which does not fit into 64 bits; choose a smaller one")
        return values

    def digest(self) -> str:
        """Twelve hex digits that name this config: equal for configs that differ only in `not_in_digest`."""
        tree = self.model_dump(mode="json")
        _drop_added_defaults(self, tree)
        for dotted in self.not_in_digest:
            section, _, key = dotted.rpartition(".")
            del (tree[section] if section else tree)[key]
        canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a config as plain data: classes of mixer configs are created at run time and cannot be imported."""
        return type(self).model_validate, (self.model_dump(),)


def check_added_later(cls: type[Config]) -> None:
    """Raise ValueError if `added_later` of a config class names an unknown field or a field without a default."""
    for key in cls.added_later:
        if key not in cls.model_fields:
            raise ValueError(f"{cls.__name__}.added_later names {key!r}, which is not one of its fields")
        if cls.model_fields[key].is_required():
            raise ValueError(f"{cls.__name__}.{key} was added later, so it needs a default: old records lack it")


def added_defaults(cls: Any) -> dict[str, Any]:
    """The defaults of the fields that were added later to a config class; {} for any other type."""
    keys = cls.added_later if isinstance(cls, type) and issubclass(cls, Config) else ()
    return {key: cls.model_fields[key].get_default(call_default_factory=True) for key in keys}


def _drop_added_defaults(config: Any, tree: Any) -> None:
    """Remove from `tree`, the dump of `config`, each field that was added later and has its default."""
    if isinstance(config, Config):
        for key, field in type(config).model_fields.items():
            value = getattr(config, key)
            if key in config.added_later and value == field.get_default(call_default_factory=True):
                del tree[key]
            else:
                _drop_added_defaults(value, tree[key])
    elif isinstance(config, dict | list | tuple):
        pairs = (config.values(), tree.values()) if isinstance(config, dict) else (config, tree)
        for value, branch in zip(*pairs, strict=True):
            _drop_added_defaults(value, branch)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def load_config(cls: type[AnyConfig], path: Path | str, overrides: Mapping[str, str] | None = None) -> AnyConfig:
    """The config in a YAML file, after overrides such as {"train.lr": "3e-3", "model.mixers.1.n_heads": "4"}."""
    options = {dotted: f"--{dotted}" for dotted in overrides or {}}
    patch = nest({dotted: parse_yaml(text, options[dotted]) for dotted, text in (overrides or {}).items()})
    tree = merge(read_yaml(path), patch)
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        raise ValueError("\n".join(map(": ".join, mistakes_by_source(error, str(path), options)))) from error


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"train.lr": 1, "train.seed": 2} -> {"train": {"lr": 1, "seed": 2}}: the form in which `merge` takes changes."""
    tree: Any = {}
    for dotted, branch in settings.items():
        for key in reversed(dotted.split(".")):
            branch = {key: branch}
        tree = merge(tree, branch)
    return tree


def merge(base: Any, patch: Any, at: str = "") -> Any:
    """`base` with the changes of `patch`.

    Mappings are merged key by key. A mapping whose keys are numbers changes single entries of a list. A mixer's name
    alone, `rebased`, is short for {name: rebased}. Another name replaces the whole mapping, with a warning that lists
    what is dropped. Everything else is replaced. `at` is the path of `base`, for messages.
    """
    if not isinstance(patch, dict):
        return patch
    if isinstance(base, list | tuple):
        entries = list(base)
        for key, value in patch.items():
            if not str(key).isdecimal() or int(key) >= len(entries):
                raise ValueError(f"{at or 'this list'} has entries 0 to {len(entries) - 1}; there is no {key!r}")
            entries[int(key)] = merge(entries[int(key)], value, f"{at}.{key}".lstrip("."))
        return entries
    if isinstance(base, str):
        base = {"name": base}
    if not isinstance(base, dict):
        return patch
    if "name" in base and patch.get("name", base["name"]) != base["name"]:  # another mixer takes other arguments
        dropped = [f"{key} {short(value)}" for key, value in base.items() if key not in patch]
        if dropped:
            _log.warning(
                "%s changes from %r to %r: the other settings there are dropped (%s); set again what should stay",
                *(f"{at}.name".lstrip("."), base["name"], patch["name"], ", ".join(dropped)),
            )
        return patch
    return base | {
        key: merge(base[key], value, f"{at}.{key}".lstrip(".")) if key in base else value
        for key, value in patch.items()
    }


def explain(error: ValidationError) -> str:
    """One line per mistake that pydantic found: the path of the key, what is wrong with its value, and the remedy."""
    return "\n".join(f"{key}: {what}" if key else what for key, what in find_mistakes(error))


def mistakes_by_source(error: ValueError, file: str, options: Mapping[str, str]) -> list[tuple[str, str]]:
    """(where its value came from, what `explain` says) for each mistake in a config from a file and options.

    `options` are those of the command line by the path of the setting that they change: {"train.lr": "--train.lr"}.
    The source is such an option, or the file, together with the options that are below the path of the mistake.
    """
    found = []
    for key, what in find_mistakes(error):
        text = f"{key}: {what}" if key else what
        unknown = re.match(r"unknown (key|task|mixer|preset) '([^']+)'", what)  # set below the path of the mistake
        child = {"key": unknown[2], "preset": "preset"}.get(unknown[1], "name") if unknown else ""
        if option := options.get(f"{key}.{child}".strip(".")) or options.get(key):
            found.append((option, what))
        elif above := [option for path, option in options.items() if key.startswith(f"{path}.")]:
            found.append((above[0], text))
        else:
            below = [option for path, option in options.items() if not key or path.startswith(f"{key}.")]
            found.append((f"{file} with {', '.join(dict.fromkeys(below))}" if below else file, text))
    return found


def find_mistakes(error: ValueError) -> list[tuple[str, str]]:
    """(path of the key, what is wrong and the remedy) for each mistake. An error that is not pydantic's has no path."""
    found = _explain(error, ()) if isinstance(error, ValidationError) else [("", str(error))]
    once: dict[tuple[str, str], tuple[str, str]] = {}
    for key, what in found:  # the same mistake in several entries of a list is shown for the first
        once.setdefault((re.sub(r"\d+", "", key), what), (key, what))
    return list(once.values())


def _explain(error: ValidationError, parent: tuple[str | int, ...]) -> Iterator[tuple[str, str]]:
    mistakes = error.errors(include_url=False)
    for mistake in mistakes:
        loc = mistake["loc"]
        if mistake["type"] == "too_short" and any(m["loc"][: len(loc)] == loc != m["loc"] for m in mistakes):
            continue  # pydantic does not count an entry that has a mistake of its own
        path = (*parent, *loc)
        cause = mistake.get("ctx", {}).get("error")
        if isinstance(cause, ValidationError):  # raised by a separate validation, such as that of a mixer
            yield from _explain(cause, path)
            continue
        key = ".".join(map(str, path))
        if mistake["type"] in ("value_error", "assertion_error"):  # our own messages name value and remedy
            yield key, str(cause)
        elif mistake["type"] == "missing":
            yield key, "is missing; give it a value"
        else:
            what = mistake["msg"].removeprefix("Input ")
            hint = ""
            if mistake["type"] == "literal_error":
                near = nearest_word(str(mistake["input"]), re.findall(r"'(.*?)'", what))
                hint = f"; did you mean {near!r}?" if near else ""
            yield key, f"{what}; got {short(mistake['input'])}{hint}"


def short(value: Any) -> str:
    """A value as error messages show it: its repr, at most 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a user's object that holds itself
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(0|[1-9][0-9_]*)"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?([0-9][0-9_]*)?\.?[0-9_]*([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""Decimal numbers. YAML 1.1 also reads 010 as 8 and 1:40.5 as 100.5."""
_RATIO = ("tag:yaml.org,2002:str", re.compile(r"^\d+(:\d+)+$"))
"""3:1 is text, such as a pattern of mixers. YAML 1.1 reads it as 181."""
_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-3 as a number (YAML 1.1 wants 3.0e-3), dates as text, and rejects repeated keys.

    Texts that are nested deep, or that aliases make large, are errors before anything is made of them.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # values that a node stands for, by its id; the graph keeps the nodes alive

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        if self._depth == YAML_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {YAML_DEPTH} levels", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if not is_alias:
            children = [] if isinstance(node, yaml.ScalarNode) else node.value
            children = chain.from_iterable(children) if isinstance(node, yaml.MappingNode) else children
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in children)
        elif id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "this alias stands for a value that holds it", mark)
        if max(self._sizes[id(node)], len(self._sizes)) > YAML_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {YAML_VALUES:,} values", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not supported here; remove it",
                node.start_mark,
            )
        decimal = _NUMBERS.get(node.tag) if isinstance(node, yaml.ScalarNode) else None
        if decimal and not decimal.fullmatch(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, f"{short(node.value)} is not a decimal number; text needs quotes", node.start_mark
            )
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:  # such as of !!bool abc
            what = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{short(node.value)} cannot be read as !!{what}", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice; remove one", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [_RATIO, *((tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises ValueError, which names `source`, if it is not valid YAML or too large."""
    if len(text) > YAML_BYTES:
        raise ValueError(f"{source} has {len(text):,} characters; at most {YAML_BYTES:,} are read here")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: no code is run
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = problem or " ".join(str(error).split())  # of a character that YAML does not allow
        raise ValueError(f"{source} is not valid YAML{where}: {reason}") from error


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError if the file is empty or holds something else."""
    try:
        text = read_bounded(path, YAML_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error.reason} at byte {error.start}") from error
    tree = parse_yaml(text, str(path))
    if tree is None:
        raise ValueError(f"{path} is empty; `rebased list configs` lists examples of configs")
    if not isinstance(tree, dict):
        raise ValueError(f"{path} should hold keys and values (train: ...); it holds {short(tree)}")
    return tree
