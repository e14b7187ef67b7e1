"""--section.key value: change settings of a config file on the command line."""

from collections.abc import Sequence

from rebased.config import nearest_word


def parse_overrides(words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return settings by their path: ["--train.lr", "3e-3", "--model.d_model=64"] gives {"train.lr": "3e-3",
    "model.d_model": "64"}.

    `known` lists the command's options. An unknown option gets the nearest of them as a hint.
    """
    overrides, rest = {}, list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"unexpected word {word!r}; settings are written --section.key value")
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if "." not in key:
            names = [option.removeprefix("--") for option in known]  # dashes would make all of them similar
            near = next((option for option in names if option.endswith(f".{key}")), None) or nearest_word(key, names)
            hint = f"did you mean '--{near}'?" if near else "settings of the config are written --section.key value"
            raise ValueError(f"unknown option {word!r}; {hint}")
        if not equals:
            if not rest:
                raise ValueError(f"{word} needs a value, such as {word} 1")
            value = rest.pop(0)
        overrides[key] = value
    return overrides
