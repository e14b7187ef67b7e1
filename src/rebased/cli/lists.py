"""rebased list: mixers, tasks, presets, shipped models and configs by name, in words; and one config's text."""

import re
from collections.abc import Mapping
from itertools import takewhile

from rich.table import Table

from rebased.cli.imports import Imports, import_all
from rebased.cli.output import TO_TERMINAL, Output
from rebased.config import did_you_mean
from rebased.files import read_json
from rebased.runs.shipped import ABOUT, shipped_configs, shipped_models


def mixers(*, imports: Imports = (), to: Output = TO_TERMINAL) -> None:
    """List the mixers that a config can name.

    Parameters
    ----------
    imports
        Python file or module with mixers of your own (@register_mixer), to list them too.
    """
    from rebased.mixers import mixer_class, mixer_names  # needs torch, which takes seconds to import

    import_all(imports)
    show({name: first_sentence(mixer_class(name).__doc__ or "") for name in mixer_names()}, to)


def tasks(*, imports: Imports = (), to: Output = TO_TERMINAL) -> None:
    """List the synthetic tasks that a config can name.

    Parameters
    ----------
    imports
        Python file or module with tasks of your own (@register_task), to list them too.
    """
    from rebased.tasks import task_class, task_names

    import_all(imports)
    show({name: task_class(name).about() for name in task_names()}, to)


def presets(*, to: Output = TO_TERMINAL) -> None:
    """List the paper's models: what model.preset of a config can be, and `preset(NAME)` in Python."""
    from rebased.models.presets import preset_names, preset_to_change

    found = {}
    for name in preset_names():
        config = preset_to_change(name)
        pattern = " + ".join(dict.fromkeys(mixer.name for mixer in config.mixers))
        found[name] = f"{config.n_layers} layers of {pattern}, D = {config.d_model} unless set."
    show(found, to)


def models(*, to: Output = TO_TERMINAL) -> None:
    """List the models that come with the package: every command that takes a model takes these names."""
    found = {}
    for name, path in shipped_models().items():
        about = read_json(path / ABOUT)
        mixers = " and ".join(dict.fromkeys(mixer["name"] for mixer in about["config"]["model"]["mixers"]))
        trained_on = "text" if "corpus" in about else about["config"]["task"]["name"]
        found[name] = f"{mixers}, {about['parameters']:,} parameters, trained on {trained_on}."
    show(found, to)


def configs(name: str | None = None, /, *, to: Output = TO_TERMINAL) -> None:
    """List the configs that come with the package, or print one of them.

    A printed config is a start for your own: rebased list configs mqar/quick > mine.yaml

    Parameters
    ----------
    name
        Name of a shipped config, for example mqar/quick. Without it, all names are listed.
    """
    shipped = shipped_configs()
    if name is None:
        show({known: first_comment(path.read_text(encoding="utf-8")) for known, path in shipped.items()}, to)
    elif name in shipped:
        text = shipped[name].read_text(encoding="utf-8")
        to.result_console().out(text, end="", highlight=False)
        to.emit({"name": name, "text": text})
    else:
        raise ValueError(f"no shipped config is named {name!r}; {did_you_mean(name, list(shipped))}")


def show(found: Mapping[str, str], to: Output) -> None:
    """Print each name with what is said of it."""
    to.check()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)  # a name is never cut or wrapped
    table.add_column()
    for name, sentence in found.items():
        table.add_row(name, sentence)
    to.result_console().print(table, highlight=False)
    to.emit([{"name": name, "about": sentence} for name, sentence in found.items()])


def first_comment(text: str) -> str:
    """Return the first sentence of the comment at the top of a YAML text, or "" if it begins with something else."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return first_sentence(" ".join(line.removeprefix("#").strip() for line in lines))


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, in one line. The dot of a product, q . k, ends no sentence."""
    return re.split(r"(?<=\S[.?]) ", " ".join(text.split()))[0]
