"""What `mkdocs build` does beyond Markdown: generated pages, links to files outside docs, notebooks and mathematics."""

import re
from html import escape, unescape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import nbformat
import ziamath
from docs.site.reference import command_line, settings
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
ziamath.config.svg2 = False  # symbols shared by several pictures of a page would need unique names
ziamath.config.precision = 2
GENERATED = {"<!-- generated: command line -->": command_line, "<!-- generated: settings -->": settings}
LINK = re.compile(
    r"(\]\(|(?:src|srcset)=\")([^)\s\"#:]+)(?=[)\s\"#])"
)  # of files; not of other pages or parts of this one
PICTURE = re.compile(r"<picture>.*?srcset=\"(.*?)\".*?alt=\"(.*?)\" src=\"(.*?)\".*?</picture>", re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
SHOWN = (".html", ".json", ".png", ".svg", ".txt")  # what browsers show as it is; they offer to save other files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no Markdown files below docs: the README as home, and notebooks."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    at_home = LINK.sub(lambda link: link[1] + relpath(link[2], "docs"), readme)
    files.append(File.generated(config, "index.md", content=at_home))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        add_notebook(path, files, config)
    return files


def add_notebook(path: Path, files: Files, config: MkDocsConfig) -> None:
    """Add a notebook as a page, with the outputs that it was saved with, and its pictures as files."""
    text, resources = MarkdownExporter().from_notebook_node(nbformat.read(path, as_version=4))
    for name, content in resources["outputs"].items():
        files.append(File.generated(config, f"notebooks/{name}", content=content))
    files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Fill in generated parts. Links to files of the repository lead to copies within the site."""
    for mark, make in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    markdown = PICTURE.sub(r"![\2](\3#only-light){ .picture }\n![\2](\1#only-dark){ .picture }", markdown)
    folder = str(PurePosixPath("docs", page.file.src_uri).parent)

    def lead(link: re.Match[str]) -> str:
        target = normpath(f"{folder}/{link[2]}")
        if (target.startswith("docs/") and not target.endswith((".py", ".ipynb"))) or not (ROOT / target).is_file():
            return link[0]
        return link[1] + relpath(copied(target, config, files), folder.removeprefix("docs").lstrip("/") or ".")

    return LINK.sub(lead, markdown)


def copied(target: str, config: MkDocsConfig, files: Files) -> str:
    """The address within the site of a copy of a file of the repository."""
    address = f"repository/{target}" + ("" if target.endswith(SHOWN) else ".txt")
    if files.get_file_from_path(address) is None:
        files.append(File.generated(config, address, abs_src_path=str(ROOT / target)))
        if target.endswith(".html"):  # with the files beside it that it offers
            for name in re.findall(r'href="([\w-]+\.(?:csv|pdf))"', (ROOT / target).read_text(encoding="utf-8")):
                beside = str(PurePosixPath(target).with_name(name))
                files.append(File.generated(config, f"repository/{beside}", abs_src_path=str(ROOT / beside)))
    return address


def on_page_content(html: str, **_: Any) -> str:
    """Formulas become SVG: no script and no font to fetch, and the same in every browser."""
    return FORMULA.sub(lambda found: drawn(unescape(found[2]).strip(), block=found[1] == "div"), html)


def drawn(latex: str, *, block: bool) -> str:
    """A formula as inline SVG in the colour of the text. Screen readers get the LaTeX."""
    formula = ziamath.Latex(" ".join(latex.split()), size=18 if block else 16.5, color="currentColor", inline=not block)
    style = "" if block else f' style="vertical-align: {formula.getyofst():.2f}px"'
    kind = "formula block" if block else "formula"
    return f'<span class="{kind}" role="math" aria-label="{escape(latex)}"{style}>{formula.svg()}</span>'
