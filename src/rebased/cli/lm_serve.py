"""rebased lm serve: a trained language model over HTTP, in OpenAI's shape."""

import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from cyclopts import Parameter
from rich.console import Console

from rebased.cli.model_options import DEFAULT_MODEL, ModelOptions, ModelPath, check_length
from rebased.cli.output import TO_TERMINAL, Output, say
from rebased.config import plural
from rebased.runs.load import record_beside
from rebased.runs.shipped import find_model, model_name, shipped_models

if TYPE_CHECKING:
    from rebased.serve.engine import Engine  # needs the extra "serve"

KEY_VARIABLE = "REBASED_API_KEY"
CONTEXT = 32_768  # tokens per sequence, where the model has no limit of its own
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_SLOTS = 65_536
SLOTS = {"cpu": 32, "cuda": 256}
EXAMPLE = "def main("  # for the model that comes with the package: it writes Python
AllowHost = Annotated[tuple[str, ...], Parameter(name="--allow-host", negative="", show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class ServeOptions:
    """How much a server takes on.

    Parameters
    ----------
    slots
        Sequences that are decoded at once. Default: 256 on a GPU, 32 on a CPU; a quarter of it if states grow with the
        text.
    context
        Tokens per sequence, prompt included. Default: the model's positions, or 32,768 if it has none.
    max_waiting
        Sequences beyond the slots at most, which wait. Beyond, requests get the status 429.
    max_tokens
        Tokens that are made per sequence at most.
    seconds
        Time that a request may take.
    max_body
        Bytes that the body of a request may have.
    prefill_chunk
        Tokens of prompts that are read between two steps at most. Default: 1,024 on a CPU; 16,384 to 32,768 on a GPU,
        by the model's width.
    cache_mb
        Memory, in units of 2^20 bytes, for states of prompts: a beginning that requests share is read once. 0: none.
    batch_invariant
        Give the same request the same answer, to the bit, whatever other requests there are and whatever is cached.
        Slower.
    grace
        Seconds that requests under way get at the end.
    """

    slots: int | None = None
    context: int | None = None
    max_waiting: int = 1024
    max_tokens: int = 4096
    seconds: float = 300.0
    max_body: int = 4 * 2**20
    prefill_chunk: int | None = None
    cache_mb: int = 256
    batch_invariant: Annotated[bool, Parameter(negative="")] = False
    grace: float = 30.0

    def check(self) -> None:
        """Raise ValueError if a number is out of range."""
        positive = ("slots", "context", "max_waiting", "max_tokens", "seconds", "grace", "max_body", "prefill_chunk")
        for name in positive:
            if (value := getattr(self, name)) is not None and not 0 < value < 2**53:
                raise ValueError(f"--{name.replace('_', '-')} {value:g} is out of range; give a number above 0")
        if self.slots is not None and self.slots > MAX_SLOTS:
            raise ValueError(f"--slots {self.slots} is out of range; give 1 to {MAX_SLOTS}")
        if not 0 <= self.cache_mb < 2**30:
            raise ValueError(f"--cache-mb {self.cache_mb} is out of range; give 0 (none) or more")


DEFAULT_SERVING = ServeOptions()


def lm_serve(
    model: ModelPath = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: AllowHost = (),
    name: str | None = None,
    api_key_file: Path | None = None,
    serving: ServeOptions = DEFAULT_SERVING,
    opening: ModelOptions = DEFAULT_MODEL,
    to: Output = TO_TERMINAL,
) -> int:
    """Serve a trained language model over HTTP, with OpenAI's endpoints and a page to try it.

    Ctrl-C, or SIGTERM, refuses new requests and lets those under way end; Ctrl-C again ends at once. If the environment
    variable REBASED_API_KEY is set, requests must carry that key. With --json the address is written as soon as the
    server listens.

    Parameters
    ----------
    host
        Address to listen on. Default: this machine alone.
    port
        Port to listen on; 0 for any free one.
    allow_host
        Host name under which requests may come, besides localhost, the name of --host and IP addresses: for example
        that of a reverse proxy. *.NAME for all names below NAME, * for any. Can be given several times.
    name
        The model's name in requests. Default: that of the folder.
    api_key_file
        File with the API key, instead of REBASED_API_KEY.
    """
    try:
        from rebased.serve.api import build_app
        from rebased.serve.client import EngineClient
        from rebased.serve.hosts import allowed_names
        from rebased.serve.process import EngineProcess
        from rebased.serve.server import open_socket, serve
        from rebased.serve.service import Limits, Service
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed; serving needs it: pip install 'rebased[serve]'") from error
    serving.check()
    key, hosts = read_key(api_key_file), allowed_names(host, allow_host)
    where = opening.import_code()
    to.check()
    console = to.console()
    with open_socket(host, port) as sock, ExitStack() as stack:  # first the socket: to load a model takes longer
        with console.status("loading the model"):
            path, tokenizer = find_model(model), opening.open_tokenizer(model)
            process = stack.enter_context(EngineProcess(partial(build_engine, model, opening, serving)))
            engine = EngineClient(process.about, tokenizer, process, max_waiting=serving.max_waiting)
            engine.on_lost = lambda: signal.raise_signal(signal.SIGTERM)
            limits = Limits(max_tokens=serving.max_tokens, seconds=serving.seconds, body_bytes=serving.max_body)
            about = {"trained_on": trained_on(path), "example": EXAMPLE if path == find_model(None) else ""}
            service = Service(name or name_of(model), engine, limits, key, **about)
            app = build_app(service, hosts)
        address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"

        def say_ready() -> None:
            known = process.about
            what = f"{service.name}: {known.parameters:,} parameters, tokenizer {tokenizer.name}"
            rooms = f"{plural(known.slots, 'slot')} of {known.context:,} tokens"
            say(console, f"{what}, on {where}; {rooms} ({known.state_bytes / 2**20:,.1f} MiB of states)")
            say(console, f"page {address}/   API {address}/v1   Ctrl-C ends")
            say_who_reaches_it(console, host, hosts, has_key=key is not None)
            to.emit({"model": service.name, "address": address, "slots": known.slots, "context": known.context})
            sys.stdout.flush()

        serve(app, sock, grace_seconds=serving.grace, on_ready=say_ready, engine=engine)
    if engine.lost:
        raise RuntimeError(engine.broken)
    say(console, "ended")
    return 0


def build_engine(model: Path | None, opening: ModelOptions, serving: ServeOptions) -> "Engine":
    """Return the engine, after its first steps. Raises ValueError if its slots do not fit into memory."""
    from rebased.serve.engine import Engine

    where = opening.import_code()
    opened = opening.open(model, where).model
    limit = opened.config.length_limit
    context = check_length(serving.context or limit or CONTEXT, opened, "--context")
    try:
        engine = Engine(
            opened,
            slots=serving.slots or SLOTS[where.type] // (4 if opened.state_size(context) > opened.state_size(1) else 1),
            context=context,
            prefill_chunk=serving.prefill_chunk,
            cache_bytes=serving.cache_mb * 2**20,
            batch_invariant=serving.batch_invariant,
            capture=where.type == "cuda" and opening.cuda_graph,
        )
        engine.warm_up()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise ValueError("the slots do not fit into memory; give fewer --slots, or a smaller --context") from error
    return engine


def say_who_reaches_it(console: Console, host: str, hosts: frozenset[str], *, has_key: bool) -> None:
    """Warn if other machines can reach the server."""
    from rebased.serve.hosts import ANY

    if host in LOOPBACK:
        return
    if not has_key:
        say(console, "note: anyone who reaches this address can use it; set an API key")
    if ANY not in hosts:
        names = ", ".join(sorted(hosts))
        say(console, f"it answers under any IP address and as {names}; --allow-host adds names")


def read_key(path: Path | None) -> str | None:
    """Return the API key of a file, or of the environment; None if there is none."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key-file {path}: a key is ASCII characters on one line") from error
    if not key or not key.isprintable() or " " in key:
        raise ValueError(f"--api-key-file {path}: a key is one or more printable characters on one line")
    return key


def trained_on(path: Path) -> str:
    """Return in a few words what a model was trained on; empty if it is not known."""
    first = next(iter(record_beside(path)), {})
    folder = Path(first.get("config", {}).get("data", {}).get("folder", "")).name
    return str(first.get("text") or (f"the text {folder}" if folder else "")).split(". ")[0]  # its first sentence


def name_of(path: Path | None) -> str:
    """Return the name of a model: that of a shipped one, else that of its folder."""
    found = find_model(path)
    if (name := model_name(found)) in shipped_models():
        return name
    found = found.resolve()
    return (found if found.is_dir() else found.parent).name or "rebased"
