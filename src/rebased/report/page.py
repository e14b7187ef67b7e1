"""One self-contained HTML page: styles, figures and data are inside it."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from rebased.config import plain, plural
from rebased.files import replacing
from rebased.report.prose import shortened
from rebased.runs.finished import Run

if TYPE_CHECKING:
    from rebased.report.drawing import Panels

GENERATOR = "rebased report"


class Section(NamedTuple):
    """A heading, which the first section may lack, and what stands below it."""

    heading: str
    body: str  # HTML
    anchor: str = ""  # an id to link to

    def to_html(self) -> str:
        """The <section>."""
        name = f' id="{escape(self.anchor)}"' if self.anchor else ""
        heading = f"<h2>{escape(self.heading)}</h2>\n" if self.heading else ""
        return f"<section{name}>\n{heading}{self.body}\n</section>"


class Page(NamedTuple):
    """A page as data; `write_page` writes it."""

    title: str
    lead: str
    sections: Sequence[Section]
    footer: str
    data: object  # what the page was computed from, embedded as JSON

    def to_html(self) -> str:
        """The whole page."""
        template = files("rebased.report").joinpath("page.html").read_text(encoding="utf-8")
        return Template(template).substitute(
            generator=GENERATOR,
            title=escape(self.title),
            lead=escape(self.lead),
            sections="\n".join(section.to_html() for section in self.sections),
            footer=escape(self.footer),
            # no text in the JSON can end its <script> element
            data=json.dumps(self.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        )


def figure(picture: "Panels | str", caption: str) -> str:
    """A <figure>: panels, or pictures as HTML, above a caption. The page's script lets the reader save panels."""
    below = f"<figcaption>{escape(caption)}</figcaption>"
    if isinstance(picture, str):
        return f"<figure>{picture}{below}</figure>"
    return f'<figure data-name="{escape(picture.name)}">{picture.to_html()}{below}</figure>'


def details(summary: str, body: str) -> str:
    """HTML that is hidden until the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def paragraphs(*texts: str) -> str:
    """One <p> per text that is not empty."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)


def bullets(texts: Iterable[str]) -> str:
    """A list with one item per text."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def commands(lines: Sequence[str]) -> str:
    """A box of shell commands."""
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"


def describe_origin(runs: Sequence[Run]) -> str:
    """The machines and versions of the code that made the runs: one clause per combination, with a few commits each."""
    origins: dict[tuple[str, str], dict[str, None]] = {}
    for line in (line for run in runs for line in run.lines if line["type"] in ("run", "resume")):
        code, machine = line["code"], line["machine"]
        commit = f"{code['commit'][:10]}{' with local changes' * bool(code['dirty'])}" if code["commit"] else ""
        cores = f", {plural(machine['cores'], 'core')}" if machine["cores"] else ""
        threads = f", threads per run: {machine['threads']}" if machine["threads"] else ""
        hardware = machine["gpu"] or f"{machine['cpu']}{cores}{threads}"
        where = f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}; {hardware}"
        origins.setdefault((code["version"], where), {})[commit] = None
    clauses = []
    for (version, where), commits in origins.items():
        known = list(filter(None, commits))
        few = f", commit{'s' * (len(known) > 1)} {shortened(known)}" if known else ""
        clauses.append(f"rebased {version}{few}; {where}")
    return f"Made with {'; and with '.join(clauses)}."


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """A dict for JSON: None instead of nan and infinity."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in values.items()}


def check_replaceable(path: Path) -> None:
    """ValueError if `path` is a file that is not a page of this package. Pages may be replaced, other files not."""
    if path.exists() and f'content="{GENERATOR}"' not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{path} is not a page that rebased has written; move it, or choose another file (-o)")


def write_page(page: Page, path: Path) -> None:
    """Write the page to `path`, atomically; an older page is replaced."""
    check_replaceable(path)
    html = page.to_html()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(plain(html).encode())  # titles and other words of a command, too
