"""Our tasks for lm-evaluation-harness: recall of what stands in the context. Examples are drawn from a seed.

- rebased_mqar_words_N: N lines `adjective noun: seven digits`, then one of the names again.
- rebased_facts: sixteen facts, then one of them up to its answer.
- rebased_squad: a passage of SQuAD, then one of its sentences up to an answer.

Each has a second form, NAME_twice, in which the context is read twice. Scores are `acc`, the share of answers that
greedy decoding gives, and `perplexity`, of the whole answers.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from rebased.config import did_you_mean, grouped
from rebased.evaluate.facts.sources import Fact, read_facts, read_squad

EXAMPLES = 500
SEED = 0
LINES = (4, 8, 16, 32, 64)
FACTS = 16  # per context
DIGITS = 7
ADJECTIVES = (
    *("amber", "ancient", "bitter", "blue", "bold", "brave", "bright", "calm"),
    *("clever", "cold", "crimson", "curious", "distant", "eager", "early", "empty"),
    *("fading", "gentle", "giant", "golden", "green", "happy", "hidden", "hollow"),
    *("humble", "icy", "idle", "jolly", "late", "little", "lonely", "loud"),
    *("lucky", "modest", "narrow", "noble", "old", "pale", "patient", "plain"),
    *("proud", "purple", "quick", "quiet", "rapid", "red", "round", "rusty"),
    *("salty", "sharp", "shy", "silent", "silver", "simple", "slow", "small"),
    *("smooth", "soft", "stern", "swift", "tall", "wild", "wise", "young"),
)
NOUNS = (
    *("anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "bell"),
    *("bridge", "candle", "canyon", "castle", "cedar", "cliff", "cloud", "comet"),
    *("coral", "crane", "desert", "eagle", "engine", "falcon", "feather", "ferry"),
    *("fiddle", "forest", "fountain", "garden", "harbor", "hammer", "island", "ivory"),
    *("kettle", "ladder", "lantern", "lemon", "lion", "marble", "meadow", "mirror"),
    *("needle", "oak", "ocean", "orchard", "otter", "paddle", "pebble", "pepper"),
    *("pillow", "planet", "raven", "ribbon", "river", "saddle", "shadow", "spoon"),
    *("summit", "tiger", "tower", "valley", "violin", "walnut", "whistle", "window"),
)


class Example(NamedTuple):
    """What a model reads and how it should go on."""

    context: str
    question: str
    answer: str  # with the space before it


def mqar_in_words(lines: int, count: int = EXAMPLES, seed: int = SEED) -> list[Example]:
    """`count` lists of `lines` names with numbers; each asks for the number of one name. Names differ within a list."""
    if not 1 <= lines <= len(ADJECTIVES) * len(NOUNS):
        raise ValueError(f"{lines} lines: there are {len(ADJECTIVES) * len(NOUNS)} different names; give 1 to so many")
    examples = []
    for number in range(count):
        random = Random(f"{seed} {lines} {number}")
        places = random.sample(range(len(ADJECTIVES) * len(NOUNS)), lines)
        names = [f"{ADJECTIVES[place // len(NOUNS)]} {NOUNS[place % len(NOUNS)]}" for place in places]
        values = [f"{random.randrange(10**DIGITS):0{DIGITS}}" for _ in names]
        asked = random.randrange(lines)
        text = "".join(f"{name}: {value}\n" for name, value in zip(names, values, strict=True))
        examples.append(Example(text, f"{names[asked]}:", f" {values[asked]}"))
    return examples


def facts_in_context(facts: Sequence[Fact], per_context: int, count: int = EXAMPLES) -> list[Example]:
    """`count` contexts of facts of different groups, each with one of its facts begun again; fewer if facts run out."""
    groups = grouped(facts, lambda fact: fact.group)
    if len(groups) < per_context:
        raise ValueError(f"{per_context} facts of different texts are needed for a context; there are {len(groups)}")
    examples = []
    for number in range(min(count, len(facts))):
        random = Random(f"{SEED} {number}")
        chosen = [random.choice(groups[group]) for group in random.sample(sorted(groups), per_context)]
        asked = random.choice(chosen)
        text = "".join(f"{fact.before}{fact.cue}{fact.answer}{fact.after}" for fact in chosen)
        examples.append(Example(text, asked.cue, asked.answer))
    return examples


def task_names() -> list[str]:
    """The names of our tasks."""
    once = [*(f"rebased_mqar_words_{lines}" for lines in LINES), "rebased_facts", "rebased_squad"]
    return [name + form for name in once for form in ("", "_twice")]


def build_task(
    name: str, *, facts: Path | None = None, squad: Path | None = None, count: int = EXAMPLES
) -> dict[str, Any]:
    """The config of one of our tasks, as lm-evaluation-harness takes it.

    `facts` and `squad` are the files that rebased_facts and rebased_squad read (evaluate/facts/sources.py).
    """
    if name not in task_names():
        raise ValueError(f"unknown task {name!r}; {did_you_mean(name, task_names())}")
    once = name.removesuffix("_twice")
    if once == "rebased_facts":
        examples = facts_in_context(read_facts(_needed(facts, name, "--facts")), FACTS, count)
    elif once == "rebased_squad":
        examples = facts_in_context(read_squad(_needed(squad, name, "--squad")), 1, count)
    else:
        examples = mqar_in_words(int(once.rpartition("_")[2]), count)
    times = 2 if name != once else 1
    rows = [{"text": times * each.context + each.question, "target": each.answer} for each in examples]
    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": Rows(rows)},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
        "metadata": {"version": 1.0},
    }


class Rows(list[dict[str, str]]):
    """Examples as the harness reads them: a sequence of rows that knows the names of its columns."""

    features: ClassVar[dict[str, str]] = {"text": "string", "target": "string"}


def _needed(path: Path | None, name: str, option: str) -> Path:
    if path is None:
        raise ValueError(f"task {name} needs a file; give it with {option}")
    return path
