"""The configs and models that come with the package: where they are, and how a command finds one by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rebased.config import nearest_word

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = Path(__file__).parents[1] / "shipped"
ABOUT = "about.json"  # what the record of a shipped model's run says
TEXT_MODEL = "lm/stdlib-bytes"
"""The shipped model that commands take where none is named."""

Kind = Literal["run", "lm", "sweep", "suite"]
"""What a config file describes: one run on a synthetic task, one run of a language model, a sweep, or a suite."""

FOLDERS: dict[Kind, str] = {"lm": "lm", "sweep": "sweeps", "suite": "suites"}
"""Where the configs of a kind are shipped. All other folders hold runs on synthetic tasks."""


def shipped_configs() -> dict[str, Path]:
    """Return the path of every shipped config by its name: "mqar/quick", "lm/quick", "sweeps/table1-cpu", ..."""
    paths = CONFIGS.rglob("*.yaml")
    return dict(sorted((path.relative_to(CONFIGS).with_suffix("").as_posix(), path) for path in paths))


def find_config(name: Path | str, kind: Kind) -> Path:
    """Return the path of a config: the file of that path if there is one, else the shipped config of that name.

    Shipped configs of the kinds "lm", "sweep" and "suite" can be named without their folder: "table1-cpu" is short for
    "sweeps/table1-cpu".
    """
    path, shipped = Path(name), shipped_configs()
    if path.is_file():
        return path
    for folder in ("", FOLDERS.get(kind, "")):
        if (known := (Path(folder) / path).as_posix()) in shipped:
            return shipped[known]
    if path.exists():  # a pipe, or a folder, about which the reader of the file complains
        return path
    wanted = path.with_suffix("").as_posix().removeprefix("configs/")
    guess = _guess(wanted, [known for known in shipped if kind_of(known) == kind])
    raise FileNotFoundError(
        f"{name}: No such file or directory, and no shipped config has this name; {guess}`rebased list configs` lists "
        "those that are shipped"
    )


def kind_of(name: str) -> Kind:
    """Return what the shipped config of this name describes."""
    return next((kind for kind, folder in FOLDERS.items() if name.startswith(f"{folder}/")), "run")


def _guess(wanted: str, known: Sequence[str]) -> str:
    """Return a question about the shipped name that was probably meant; empty if none is similar."""
    by_last_part = {name.rpartition("/")[2]: name for name in reversed(known)}
    near = nearest_word(wanted, [*known, *by_last_part])
    return f"did you mean {by_last_part.get(near, near)!r}? " if near else ""


def shipped_models() -> dict[str, Path]:
    """Return the folders of the models that come with the package, by name: the MQAR models, then the text model."""
    recall = {f"mqar/{name}": MODELS / "mqar" / name for name in ("rebased", "based", "attention")}
    return recall | {TEXT_MODEL: MODELS}


def find_model(name: Path | str | None = None) -> Path:
    """Return the path of a model: the file or folder of that path if there is one, else the shipped model's.

    Without a name it is the shipped model of text. Every command that takes a model finds it here.
    """
    path, shipped = Path(TEXT_MODEL if name is None else name), shipped_models()
    if name is not None and path.exists():
        return path
    if path.as_posix() in shipped:
        return shipped[path.as_posix()]
    guess = _guess(path.as_posix(), list(shipped))
    raise ValueError(
        f"{name} does not exist, and no shipped model has this name; {guess}give a run's folder, its model.safetensors "
        f"or a name that `rebased list models` lists"
    )


def model_name(path: Path) -> str:
    """Return what a model is called: the name of a shipped one, else its path."""
    return next((name for name, folder in shipped_models().items() if folder == path), str(path))
