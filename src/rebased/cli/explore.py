"""rebased explore: a page that shows what two trained models predict, where they look, and what their states hold."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rebased.cli.imports import Imports, import_all
from rebased.cli.lm_serve import AllowHost
from rebased.cli.model_options import Device
from rebased.cli.output import TO_TERMINAL, Output, say
from rebased.ops.backend import choose_device
from rebased.runs.load import open_model
from rebased.runs.shipped import find_model, model_name, shipped_models

HOST = "127.0.0.1"
DEFAULT = ("mqar/rebased", "mqar/based")
GRACE_SECONDS = 5.0


def explore(
    runs: tuple[Path, ...] = (),
    /,
    *,
    port: int = 8010,
    allow_host: AllowHost = (),
    tokenizer: str | None = None,
    data: Path | None = None,
    device: Device = "cpu",
    imports: Imports = (),
    to: Output = TO_TERMINAL,
) -> int:
    """Open a page on this machine that shows one or two trained models from the inside.

    Of a model that recalls (MQAR): its answers, its attention, which keys can be read out of its state, and how recall
    fails as the pairs become more. Of a language model: its predictions and its attention in a text that you type.

    Parameters
    ----------
    runs
        One or two runs on mqar or forgetting_mqar, or of `rebased lm train`; or names of `rebased list models`.
        Default: mqar/rebased and mqar/based.
    port
        Port to listen on; 0 for any free one.
    allow_host
        Host name under which requests may come, besides localhost and IP addresses: for example that of a proxy.
        *.NAME for all names below NAME, * for any. Can be given several times.
    tokenizer
        Of language models: bytes, a tokenizer.json, or a name on the Hugging Face Hub. Default: the run's own.
    data
        Of language models: a folder that `rebased data prepare` wrote, for its tokenizer.
    imports
        Python file or module with your own mixers or tasks. Can be given several times.
    """
    to.check()
    if len(runs) > 2:
        raise ValueError(f"two models stand side by side, and {len(runs)} runs were given; give one or two")
    try:
        from rebased.serve.explorer.api import build_explorer
        from rebased.serve.explorer.workbench import Workbench, check_comparable
        from rebased.serve.hosts import allowed_names
        from rebased.serve.server import open_socket, serve
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed; exploring needs it: pip install 'rebased[serve,lab]'"
        ) from error
    import_all(imports)
    hosts = allowed_names(HOST, allow_host)
    where, console = choose_device(device), to.console()
    with open_socket(HOST, port) as sock:  # first: to load models takes longer
        with console.status("loading models"):
            models, shown = open_models(runs, tokenizer, data, where)
        left, *others = shown or DEFAULT
        right = others[0] if others else None
        if right is not None:
            check_comparable(left, right, models)
        app = build_explorer(Workbench(models, left, right), hosts)
        address = f"http://{HOST}:{sock.getsockname()[1]}/"

        def say_ready() -> None:
            say(console, f"{left} beside {right}" if right else left)
            say(console, f"page {address}   Ctrl-C ends")
            to.emit({"address": address, "left": left, "right": right, "models": list(models)})
            sys.stdout.flush()

        serve(app, sock, grace_seconds=GRACE_SECONDS, on_ready=say_ready)
    say(console, "ended")
    return 0


def open_models(
    runs: Sequence[Path], tokenizer: str | None, data: Path | None, where: torch.device
) -> tuple[dict[str, Any], list[str]]:
    """(models by name: those of the runs, and those that come with the package; the names of the runs)."""
    paths = {model_name(path): path for path in map(find_model, runs)}
    models = {name: open_model(path, tokenizer, data, where) for name, path in paths.items()}
    others = {name: open_model(path, device=where) for name, path in shipped_models().items() if name not in models}
    return models | others, list(paths)
