"""Inputs that broke a command once: each is a clear error now, in bounded time and memory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from tests.torture.outcome import FORBIDDEN

import rebased
from fake_records import fake_lm_run, fake_run, write_record
from rebased.cli import explain_error, is_users, main
from rebased.config import YAML_VALUES, merge, nest
from rebased.files import seal
from rebased.mixers import register_mixer
from rebased.models import LanguageModel, LMConfig
from rebased.models.weights import save_model
from rebased.ops import backend
from rebased.tasks import register_task
from tiny_run import TINY


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one error that a command ends with."""
    with pytest.raises(SystemExit) as left:
        main(words)
    shown = capsys.readouterr()
    assert left.value.code == 2, shown.out + shown.err
    assert not FORBIDDEN.search(shown.out + shown.err)
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def with_setting(**settings: Any) -> str:
    """A config file with these settings, written with __ for a dot."""
    tree = merge(json.loads(json.dumps(TINY)), nest({key.replace("__", "."): value for key, value in settings.items()}))
    Path("x.yaml").write_text(yaml.safe_dump(tree))
    return "x.yaml"


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model__mixers__1", {"name": "rebased", "n_heads": 0}, "n_heads 0 must be at least 1"),
        ("model__mixers__1", {"name": 5}, "a mixer is a name, or a mapping with one"),
        ("model__mixers__1", {"name": []}, "a mixer is a name, or a mapping with one"),
        ("task__name", [], "a task is a name, or a mapping of settings"),
        ("model__d_model", 10**30, "does not fit into 64 bits"),
        ("model__vocab_size", 2**63, "does not fit into 64 bits"),
        ("model__d_model", 2**40, "of memory, and"),
        ("model__mixers__1", {"name": "rebased", "key_width": 2**62, "n_heads": 2}, "more than 2**63 bytes"),
        ("model__n_layers", 10**9, "less than or equal to 10000"),
        ("train__lr", 1e300, "less than or equal to 1000000"),
        ("train__eps", 1e300, "less than or equal to 1000000"),
        ("task__train__0__examples", 10**13, "the examples of task 'mqar' need at least"),
        ("task__train__0__seq_len", 2**62, "vocab_size must exceed seq_len"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_an_error(
    capsys: pytest.CaptureFixture[str], setting: str, value: Any, message: str
) -> None:
    assert message in refused(capsys, "train", "--config", with_setting(**{setting: value}), "--out", "out")
    assert not Path("out").exists()


def test_sizes_beyond_memory_name_the_bytes_needed_and_available(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "available_memory", lambda: 10**9)
    message = refused(capsys, "train", "--config", with_setting(model__vocab_size=10**8), "--out", "out")
    needed = 16 * (10**8 + 16) * 8
    assert "12.8 GB (12,80" in message
    assert "and 1.0 GB (1,000,000,000 bytes) are available" in message
    assert int(message.partition("(")[2].partition(" bytes")[0].replace(",", "")) >= needed


BOMB = "a: &a {x: 1}\n" + "".join(
    f"{there}: &{there} {{<<: [{', '.join([f'*{here}'] * 9)}]}}\n"
    for here, there in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 500 + "]" * 500, "nested deeper than 32 levels"),
        ("\n".join(" " * i + "a:" for i in range(500)), "nested deeper than 32 levels"),
        ("task: !!bool abc", "'abc' cannot be read as !!bool"),
        ("task: !!timestamp abc", "the tag !!timestamp is not supported here; remove it"),
        ("task: !!python/object/apply:os.system [ls]", "is not supported here; remove it"),
        ("task: 59:59:" + ":".join(["59"] * 400) + ".5", "is not a decimal number"),
        (BOMB, f"more than {YAML_VALUES:,} values"),
        ("a: &a [*a]", "stands for a value that holds it"),
        ("#" * 50_000_000, "50,000,000 bytes; at most"),
    ],
    ids=["flow", "block", "bool", "timestamp", "python", "sexagesimal", "bomb", "recursive", "comment"],
)
def test_a_yaml_that_would_hang_or_break_is_an_error(
    capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("x.yaml").write_text(text)
    started = time.process_time()
    assert message in refused(capsys, "train", "--config", "x.yaml")
    assert time.process_time() - started < 60  # minutes, or for ever, without limits


def test_a_config_is_a_regular_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.yaml").write_text("base: /dev/zero\ngrid: {train.seed: [1]}")
    assert "/dev/zero is a device, a pipe or a socket" in refused(capsys, "sweep", "sweep.yaml", "--dry-run")
    os.mkfifo("pipe.yaml")
    assert "pipe.yaml is a device" in refused(capsys, "train", "--config", "pipe.yaml")


def test_a_grid_of_too_many_runs_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    grid = {f"train.{key}": list(range(1, 100)) for key in ("seed", "epochs", "batch_size", "lr", "micro_batch")}
    Path("sweep.yaml").write_text(yaml.safe_dump({"base": TINY, "grid": grid}))
    assert "9,509,900,499 combinations" in refused(capsys, "sweep", "sweep.yaml", "--dry-run")


DEEP = b"[" * 100_000


def test_a_manifest_nested_too_deep_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text").mkdir()
    Path("text/manifest.json").write_bytes(DEEP)
    assert "nested deeper than 64 levels" in refused(capsys, "data", "verify", "text")


def test_json_lines_nested_too_deep_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.jsonl").write_bytes(b'{"text": "a"}\n{"text": ' + DEEP)
    message = refused(capsys, "data", "prepare", "x.jsonl", "-o", "out", "--tokenizer", "bytes")
    assert "nested deeper than 64 levels" in message


@pytest.mark.parametrize(
    ("answers", "message"),
    [(DEEP, "nested deeper"), (b'{"data": [{"paragraphs": [{"context": 5, "qas": [{"answers": [{"answer_start": 1, '
                               b'"text": 2.5}]}]}]}]}', "an answer is a text")],
    ids=["deep", "number"],
)  # fmt: skip
def test_squad_files_that_broke_are_errors(capsys: pytest.CaptureFixture[str], answers: bytes, message: str) -> None:
    Path("x.json").write_bytes(answers)
    assert message in refused(capsys, "lm", "recall", "run", "--squad", "x.json")


@pytest.mark.parametrize("about", ["[]", '{"format": "rebased-1"}', "[" * 100_000, "not JSON"], ids=len)
def test_weights_without_a_config_are_an_error(capsys: pytest.CaptureFixture[str], about: str) -> None:
    save_model(LanguageModel(LMConfig(d_model=8, mixers=("short_conv",))), Path())
    content = Path("model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["rebased"] = about
    changed = json.dumps(header).encode()
    Path("model.safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    message = refused(capsys, "lm", "eval", "model.safetensors")
    assert message.startswith("model.safetensors")


def test_prompts_nested_too_deep_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "\n")
    assert "nested" in refused(capsys, "lm", "generate", "--file", "x.jsonl")


def test_a_report_needs_no_histograms() -> None:
    """As in compact records. One that lacked its counts ended the report."""
    records = Path(rebased.__file__).parent / "paper" / "records" / "figure1-t256.jsonl.gz"
    with pytest.raises(SystemExit) as left:
        main(["report", str(records), "-o", "page.html"])
    assert not left.value.code
    assert "Gamma and beta of queries and keys" in Path("page.html").read_text()


def test_text_of_files_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither rich's markup nor codes of a terminal: here in a table's title, and in an error."""
    name = "[bold]x[/nope] :smile: \x1b]0;owned\x07\x9b31m \u202e"
    Path("text.txt").write_text("some text " * 50)
    with pytest.raises(SystemExit):
        main(["data", "prepare", "text.txt", "-o", "text", "--tokenizer", "bytes"])
    manifest = json.loads(Path("text/manifest.json").read_text())
    manifest["tokenizer"]["name"] = name
    Path("text/manifest.json").write_text(json.dumps(seal({k: v for k, v in manifest.items() if k != "sha256"})))
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["data", "verify", "text"])
    shown = "".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert r"[bold]x[/nope]:smile:\x1b]0;owned\x07\x9b31m\u202e" in shown
    path = f"{name.replace('/', '')}.yaml"
    Path(path).write_text("a")
    message = refused(capsys, "train", "--config", path)
    assert r"[bold]x[nope] :smile: \x1b]0;owned\x07\x9b31m \u202e.yaml should hold" in message


def test_out_of_memory_is_an_error_of_one_line() -> None:
    trace = "\nException raised from alloc_cpu at x.cpp:12 (most recent call first):\nframe #0: c10::ThrowEnforce"
    torchs = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        f"allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory){trace}"
    )
    assert is_users(torchs)
    assert explain_error(torchs) == (
        "out of memory: can't allocate memory: you tried to allocate 8000000000000 bytes. Error code 12 (Cannot "
        "allocate memory); choose smaller sizes"
    )
    assert explain_error(MemoryError()).startswith("out of memory: ")
    assert "frame #0" not in explain_error(RuntimeError(f"something else{trace}"))


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "rebased.cli.train":
            print("importing", flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                raise ImportError("what a C extension makes of it")
sys.meta_path.insert(0, Slow())
from rebased.cli import main
main(["train", "--config", "x.yaml"])
"""


def test_ctrl_c_during_imports_is_quiet() -> None:
    command = [sys.executable, "-c", SLOW_IMPORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize(
    "words",
    [
        ("report", "x.jsonl"),
        ("suite", "quick", "--known", "x.jsonl"),
        ("lm", "generate", "x.safetensors", "--prompt", "a"),
        ("lm", "export", "x.safetensors", "-o", "out"),
        ("lm", "import", "x.safetensors", "-o", "out"),
        ("lm", "eval", "x.safetensors"),
    ],
    ids=" ".join,
)
def test_a_named_pipe_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """Reading one that nobody writes to would never end."""
    for name in ("x.jsonl", "x.safetensors"):
        os.mkfifo(name)
    assert "is a device, a pipe or a socket; give a regular file" in refused(capsys, *words)


def write_hostile_records(folder: Path) -> None:
    """Runs on a task and on text whose names, settings and machines hold everything that is no plain text."""
    runs = [fake_run(model, [0.1, 0.6], seed=seed, lr=lr) for model in ("rebased", "based") for seed, lr in SEEDS]
    runs += [fake_lm_run(model, seed=seed) for model in ("rebased", "attention") for seed, _ in SEEDS]
    for run in runs:
        first, last = run.lines[0], run.lines[-1]
        for mixer in first["config"]["model"]["mixers"]:
            mixer["name"] += HOSTILE
            mixer[f"own {HOSTILE}"] = f"{run.digest} {HOSTILE}"
        first["machine"] = first["machine"] | {"cpu": HOSTILE}
        for part in filter(None, first["config"].values()):
            part |= {"name": HOSTILE} if "train" in part else {"folder": HOSTILE} if "folder" in part else {}
        if "test" in run.lines[1]:
            run.lines[1]["test"]["slices"] = {HOSTILE: 0.5}
        last["note"] = HOSTILE
        write_record(run, folder)
    (folder / "sweep.jsonl").write_text(json.dumps({"type": "failed", "digest": "a", "error": HOSTILE}) + "\n")


HOSTILE = "\x1b]0;owned\x07 \x9b31m \u202e \uffff \x00 \n\n | & < $\\frac$ x"
SEEDS = ((1, 1e-3), (2, 1e-3), (3, 1e-2))
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


@pytest.mark.parametrize(
    "words",
    [
        ["report", "sweep\x1b[31m", "-o", "out/page.html", "--title", HOSTILE.replace("\0", "")],
        ["report", "sweep\x1b[31m", "--tables", "out", "--formats", "md,tex,csv,svg"],
    ],
    ids=["page", "tables"],
)
def test_no_control_character_leaves_through_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hostile_records(Path("sweep\x1b[31m"))
    with pytest.raises(SystemExit) as left:
        main(words)
    captured = capfd.readouterr()
    assert left.value.code in (None, 0), captured.err
    assert not CONTROL.search(captured.out + captured.err)
    files = list(Path("out").iterdir())
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not CONTROL.search(text), file
        pictures = [text] if file.suffix == ".svg" else re.findall("<svg .*?</svg>", text, flags=re.DOTALL)
        for picture in pictures:
            ElementTree.fromstring(picture)
        if file.suffix == ".md":
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()}) == 1, file
    assert any(r"\x1b]0;owned" in file.read_text() or r"backslash{}x1b]0;owned" in file.read_text() for file in files)


@pytest.mark.parametrize("register", [register_mixer, register_task])
def test_a_name_with_a_control_character_is_not_registered(register: Callable[[str], Callable[[type], type]]) -> None:
    with pytest.raises(ValueError, match="has a control character in its name; choose another name"):
        register("own\x1b[31m")(type("Own", (torch.nn.Module,), {}))
