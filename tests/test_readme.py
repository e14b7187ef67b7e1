"""What the README says is true: its code runs; its commands, targets, files and links exist; its file tree is fresh."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from docs.make_tree import with_tree

from rebased.cli import COMMANDS
from rebased.runs.shipped import find_config, shipped_configs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


SHELL = [line.split("  #")[0].strip() for block in blocks(README, "sh") for line in block.splitlines()]


def test_python_blocks_run() -> None:
    code = "\n".join(blocks(README, "python"))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_layer_is_the_example_and_twelve_lines() -> None:
    layer, own = blocks(README, "python")
    example = (ROOT / "examples" / "layer.py").read_text()
    lines = [line for line in layer.splitlines() if line]
    assert len(lines) <= 12
    assert all(line in example for line in lines)
    assert len([line for line in own.splitlines() if line and "import" not in line]) < 10


@pytest.mark.parametrize("command", SHELL)
def test_commands_exist(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert words[0] in targets
    elif program == "rebased":
        verb = next((verb for verb in (" ".join(words[:2]), words[0]) if verb in COMMANDS), None)
        assert verb is not None or words == ["--help"]
        if verb is not None:
            assert find_spec(COMMANDS[verb][0].split(":")[0]) is not None
    else:
        assert program == "pytest"
    for before, word in pairwise(["", *words]):
        if "/" in word and before != "-o":  # what is read is there; what is written need not be
            assert word in shipped_configs() or (ROOT / word.split(":")[0]).is_file(), word


def test_the_training_commands_make_a_config() -> None:
    from rebased.cli.imports import import_user_code
    from rebased.config import load_config
    from rebased.runs.synthetic_config import SyntheticRunConfig

    trains = [shlex.split(command)[2:] for command in SHELL if command.startswith("rebased train")]
    assert len(trains) == 2
    for words in trains:
        options = dict(zip(words[::2], words[1::2], strict=True))
        if "--import" in options:
            import_user_code(str(ROOT / options.pop("--import")))
        path = find_config(options.pop("--config"), "run")
        load_config(SyntheticRunConfig, path, {key.removeprefix("--"): value for key, value in options.items()})


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_links_lead_somewhere(guide: Path) -> None:
    text = guide.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    assert [link for link in links if not (guide.parent / link).exists()] == []


def test_the_file_tree_is_fresh() -> None:
    assert with_tree(README) == README, "the README's file tree is stale: run `make tree`"


def test_make_alone_lists_its_targets() -> None:
    listed = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "test-all", "test-gpu", "lint", "bench"):
        assert f"make {target} " in listed
