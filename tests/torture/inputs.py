"""Mutated inputs: configs, arguments, JSON files and text, each a function of a random generator."""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

NUMBERS = (0, -1, 1, 2, 3, 7, 1000, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63), 1e300, 1e-300, 1e38)
NUMBERS += (math.inf, -math.inf, math.nan, 0.5, -0.0, 1e6, 10**9, 10**12)
TEXTS = (
    "",
    " ",
    "a",
    "[bold]x[/nope]",
    "\x1b]0;title\x07\x1b[31mred",
    "=cmd|' /C calc'!A0",
    "../../x",
    "/dev/zero",
    "/dev/null",
    "/",
    ".",
    "\u202eright",
    "é" * 50,
    "x" * 5000,
    "rebased",
    "null",
    "1e400",
    "{name: 5}",
    "[" * 500,
    "!!bool abc",
    "&a [*a]",
    "%s%n{0}{x!r}",
    "2001-01-01",
    "--help",
    "-",
    "nan",
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": {}},
    {"name": 5},
    {"name": []},
    [None],
    {"a": 1},
    {1: 2},
)
SNIPPETS = (
    "!!bool abc",
    "!!timestamp abc",
    "!!binary x",
    "*a",
    "&a ",
    "<<: *a",
    "- ",
    "? ",
    ": ",
    "{",
    "[",
    "}",
    "]",
    "'",
)
SNIPPETS += (
    '"',
    "|",
    ">",
    "%",
    "@",
    "`",
    "\t",
    "\0",
    "\ufeff",
    "\u2028",
    "#",
    "\n",
    "---",
    "...",
    "0x",
    "1:2:3",
    "~",
    ",",
)


def hostile_value(random: Random) -> Any:
    """A value that a config seldom holds."""
    return copy.deepcopy(random.choice(random.choice((NUMBERS, NUMBERS, TEXTS, OTHERS))))


def paths_in(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a nest of mappings and lists, its own first."""
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths_in(value, (*at, key))


def mutate_tree(random: Random, tree: Any) -> Any:
    """A copy with one to three changes: a value replaced, removed, nested, repeated, or put under another key."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        path = random.choice(list(paths_in(tree)))
        if not path:
            if random.random() < 0.05:
                tree = hostile_value(random)
            continue
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        key, action = path[-1], random.randrange(10)
        if action < 6:
            holder[key] = hostile_value(random)
        elif action == 6:
            del holder[key]
        elif action == 7:
            holder[key] = [holder[key]] if random.random() < 0.5 else {"name": holder[key]}
        elif action == 8 and isinstance(holder, dict):
            holder[random.choice((f"{key}x", 5, "", "name", None))] = holder.pop(key)
        elif isinstance(holder[key], list):
            holder[key] = holder[key] * random.choice((0, 2, 50))
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * random.choice((-1, 2, 1000, 10**9, 0.5))
    return tree


def mutate_text(random: Random, text: str) -> str:
    """The text with one to four changes: characters removed, repeated, swapped or inserted."""
    for _ in range(random.randint(1, 4)):
        i, j = sorted(random.randrange(len(text) + 1) for _ in range(2))
        j = min(j, i + 40)
        text = random.choice(
            (
                text[:i] + text[j:],
                text[:i] + text[i:j] * random.choice((2, 100)) + text[j:],
                text[:i] + random.choice(SNIPPETS) + text[i:],
                text[:i] + chr(random.choice((random.randrange(32), random.randrange(0x300), 0x1F600))) + text[i + 1 :],
                text[:i],
            )
        )
    return text


def mutate_yaml(random: Random, tree: Any) -> str:
    """A YAML text: a mutated tree, a mutated text of the tree, or both."""
    changed = mutate_tree(random, tree) if random.random() < 0.7 else tree
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    return mutate_text(random, text) if changed is tree or random.random() < 0.1 else text


def mutate_json(random: Random, tree: Any) -> bytes:
    """A JSON text: a mutated tree, a mutated text of it, or one that is nested very deep."""
    kind = random.random()
    if kind < 0.05:
        return random.choice((b"[", b'{"format":', b'{"a":[')) * 100_000
    if kind < 0.6:
        return json.dumps(mutate_tree(random, tree), default=str, skipkeys=True).encode()
    return mutate_text(random, json.dumps(tree)).encode("utf-8", "surrogatepass")


def mutate_words(random: Random, words: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line with one to three changes. A NUL cannot be part of an argument."""
    changed = list(words)
    for _ in range(random.randint(1, 3)):
        at, value, option = random.randrange(len(changed)), str(hostile_value(random)), random.choice(options)
        action = random.randrange(6)
        if action == 0:
            changed.insert(at + 1, value)
        elif action == 1:
            changed[at] = value
        elif action == 2 and len(changed) > 1:
            del changed[at]
        else:
            changed += [[option, value], [f"{option}={value}"], [option]][action % 3]
    return [word.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "replace") for word in changed]


def write(path: Path, content: bytes | str) -> None:
    """Write a file, whatever its text holds."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
