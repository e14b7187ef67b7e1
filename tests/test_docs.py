"""The documentation is true: links and anchors lead somewhere, Python runs, commands parse, pages are in the site."""

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from cyclopts import CycloptsError
from docs.make_tree import PAGE, with_tree

import rebased.ops
from docs_text import PAGES, ROOT, anchors, blocks, links, name_of, shell_lines
from forked_python import run_code
from rebased.cli import build_app
from rebased.runs.shipped import shipped_configs

APP = build_app()
OTHERS = ("curl", "echo", "lm_eval", "uv")
SITE_PACKAGES = ("mkdocs", "material", "mkdocstrings", "nbconvert", "ziamath")
NEEDS_SITE = pytest.mark.skipif(
    not all(map(find_spec, SITE_PACKAGES)), reason="the extra `docs` is not installed: `make docs` installs it"
)


def test_links_and_anchors_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in links(page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.is_file():  # the site has no page for a folder
                wrong.append(f"{name_of(page)}: {link}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                wrong.append(f"{name_of(page)}: {link}; known: {sorted(anchors(target))}")
    assert wrong == []


def test_files_that_are_named_exist() -> None:
    """`ops/backend.py` and the like, below the repository, the package, docs or tests."""
    folders = [ROOT, ROOT / "src", ROOT / "src" / "rebased", ROOT / "docs", ROOT / "tests"]
    named = [
        (page, name)
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`((?:\w[\w.-]*/)+[\w.-]+\.(?:py|md|js))`", page.read_text())
    ]
    missing = [each for each in named if not any((folder / each[1]).is_file() for folder in folders)]
    assert [f"{name_of(page)}: {name}" for page, name in missing] == []


def test_lists_begin_after_a_blank_line() -> None:
    """Python-Markdown would join them to the paragraph before."""
    joined = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"^(?![-|# ]|\d+\. |\*).+\n- .*$", text, flags=re.MULTILINE)
        joined += [f"{name_of(page)}: {lines}" for lines in found]
    assert joined == []


def test_python_compiles() -> None:
    wrong = []
    for page in PAGES:
        for block in blocks(page.read_text(), "python"):
            try:
                ast.parse(block)
            except SyntaxError as error:
                wrong.append(f"{name_of(page)}: {error}")
    assert wrong == []


def test_the_python_of_the_tour_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tour.md").read_text()
    result = run_code("\n".join(blocks(text, "python")), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    for line in result.stdout.splitlines():
        assert f"\n{line}\n" in text


def test_commands_parse() -> None:
    wrong = []
    for page in PAGES:
        for command in shell_lines(page.read_text()):
            try:
                for part in command.split(" | "):
                    check_command(shlex.split(part.partition(" > ")[0]))
            except (AssertionError, CycloptsError) as error:
                wrong.append(f"{name_of(page)}: {command}\n{error}")
    assert not wrong, "\n\n".join(wrong)


def test_an_extra_is_added_without_replacing_the_package() -> None:
    """`pip install ".[serve]"` would put a copy in the place of an editable install. The other two install rebased."""
    pages = [page for page in PAGES if name_of(page) not in ("README.md", "docs/install.md")]
    assert [name_of(page) for page in pages if 'pip install ".' in page.read_text()] == []


def check_command(words: list[str]) -> None:
    """The program is one that a page may name. Ours takes these words; a script is there; a target of make exists."""
    while "=" in words[0]:
        words = words[1:]  # an environment variable
    if words[0] == "torchrun":
        words = words[words.index("rebased") :]
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == []
    elif words[0] == "rebased":
        check_parses(words[1:])
    elif words[0].endswith("python"):
        assert words[1] == "-m" or (ROOT / words[1]).is_file(), words[1]
    else:
        assert words[0] in ("pip", "pytest", "git", "source", ".venv/bin/pre-commit", "tensorboard", *OTHERS), words[0]


def check_parses(words: list[str]) -> None:
    """The command exists and takes these options; a config that it names is shipped, unless it is a file."""
    if words == ["--help"] or words[0] == "--install-completion":
        return
    APP.parse_args(words, exit_on_error=False, print_error=False)
    options = dict(pairwise(words))
    name = options.get("--config", "") or (words[1] if words[0] == "sweep" else "")
    if name and not name.endswith((".yaml", ".py")):
        assert name in shipped_configs() or f"sweeps/{name}" in shipped_configs(), name


def test_the_file_tree_is_fresh() -> None:
    assert with_tree(PAGE.read_text()) == PAGE.read_text(), "the tree in docs/architecture.md is stale: run `make tree`"


def nav_pages() -> list[str]:
    """The pages that mkdocs.yml lists."""
    return re.findall(r"^ .*?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], flags=re.MULTILINE)


def test_every_page_is_in_the_site() -> None:
    written = {str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    pages = written | notebooks | {"index.md"}
    assert sorted(pages - set(nav_pages())) == [], "add these pages to the nav of mkdocs.yml"
    assert sorted(set(nav_pages()) - pages) == [], "these pages of mkdocs.yml do not exist"


def test_pictures_are_small() -> None:
    large = [path.name for path in (ROOT / "docs" / "images").iterdir() if path.stat().st_size > 200_000]
    assert large == []


def test_settings_of_the_reference_have_meanings() -> None:
    pytest.importorskip("docstring_parser")
    from docs.site.reference import command_line, settings

    rows = [row.split(" | ") for row in settings().splitlines() if row.startswith("| `") and row.count(" | ") == 3]
    assert rows
    assert [row[0] for row in rows if not row[2].strip()] == []
    assert "--config PATH" in command_line()
    assert "## rebased lm train" in command_line()


@NEEDS_SITE
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = list(tmp_path.rglob("*.html"))
    fetched = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="https?://')
    assert [page.name for page in pages if "repository" not in page.parts and fetched.search(page.read_text())] == []
    assert 'role="math"' in (tmp_path / "math.html").read_text()
    assert "poly_attention" in (tmp_path / "reference" / "api" / "ops.html").read_text()
    assert "rebased lm train" in (tmp_path / "reference" / "cli.html").read_text()


def test_forms_and_workflows_are_yaml_and_run_what_exists() -> None:
    targets = (ROOT / "Makefile").read_text()
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        tree = yaml.safe_load(path.read_text())
        if path.parent.name == "workflows":
            runs = "\n".join(step.get("run", "") for job in tree["jobs"].values() for step in job["steps"])
            for script in re.findall(r"(?:clone/)?(\.ci/[\w-]+)", runs):
                assert os.access(ROOT / script, os.X_OK), f"{name_of(path)}: {script}"
            for target in re.findall(r"^make (\w+)", runs):
                assert target in targets, f"{name_of(path)}: {target}"
        elif path.stem != "config":
            assert {"name", "description", "body"} <= set(tree), name_of(path)
            assert all("label" in field["attributes"] for field in tree["body"]), name_of(path)


def test_the_site_names_hooks_and_scripts_that_exist() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    files = [*site["hooks"], *(f"docs/{name}" for name in (*site["extra_css"], *site["extra"]["polyfills"]))]
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_operator_stands_first_among_all_operators() -> None:
    page = (ROOT / "docs" / "reference" / "api" / "ops.md").read_text()
    options = yaml.safe_load(page[page.index("    options:") :])["options"]
    names = options["members"]
    assert options["group_by_category"] is False  # otherwise constants would stand before functions
    assert (names[0], names[-1]) == ("poly_attention", "IGNORE")
    assert sorted(names) == sorted(rebased.ops.__all__)
