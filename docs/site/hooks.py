"""What `mkdocs build` does beyond Markdown: generated pages, links to files outside docs, notebooks and mathematics."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import nbformat
from docs.site.reference import command_line, settings
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
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
    text = re.sub(r"(?<=\n\n)((?: {4}.*\n)+)", lambda block: f"```text\n{dedent(block[1])}```\n", text)
    files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))


def dedent(text: str) -> str:
    """Text without the four spaces that nbconvert puts before each line of an output."""
    return re.sub(r"^ {4}", "", text, flags=re.MULTILINE)


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
    return address


def on_page_content(html: str, **_: Any) -> str:
    """Formulas become MathML, which browsers draw without a script."""
    return FORMULA.sub(
        lambda found: convert(unescape(found[2]), display="block" if found[1] == "div" else "inline"), html
    )


def unescape(text: str) -> str:
    """LaTeX as it was written, from HTML."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()
