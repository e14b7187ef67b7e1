"""One HTML page that needs nothing else: styles, figures and the records themselves are inside it."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from rebased.files import replacing
from rebased.runs.finished import Run

GENERATOR = "rebased report"


class Section(NamedTuple):
    heading: str
    body: str  # HTML


class Page(NamedTuple):
    title: str
    lead: str
    sections: Sequence[Section]
    footer: str
    data: object  # what the page was computed from, embedded as JSON

    def to_html(self) -> str:
        template = files("rebased.report").joinpath("page.html").read_text(encoding="utf-8")
        sections = "\n".join(
            f"<section>\n<h2>{escape(section.heading)}</h2>\n{section.body}\n</section>" for section in self.sections
        )
        return Template(template).substitute(
            generator=GENERATOR,
            title=escape(self.title),
            lead=escape(self.lead),
            sections=sections,
            footer=escape(self.footer),
            data=embed(self.data),
        )


def figure(panels: str, caption: str) -> str:
    return f"<figure>{panels}<figcaption>{escape(caption)}</figcaption></figure>"


def details(summary: str, body: str) -> str:
    """Out of the way until it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def paragraphs(*texts: str) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def bullets(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def commands(lines: Sequence[str]) -> str:
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"


def describe_origin(runs: Sequence[Run]) -> str:
    """On which machines and with which code the runs were made: one clause for each that differs."""
    origins: dict[str, None] = {}
    for line in (line for run in runs for line in run.lines if line["type"] in ("run", "resume")):
        code, machine = line["code"], line["machine"]
        commit = f", commit {code['commit'][:10]}" if code["commit"] else ""
        changed = " with local changes" if code["dirty"] else ""
        hardware = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} thread(s) a run"
        origins[
            f"rebased {code['version']}{commit}{changed}; torch {machine['torch']}, Python {machine['python']}, "
            f"{machine['system']}; {hardware}"
        ] = None
    return "Made with " + "; and with ".join(origins) + "."


def embed(data: object) -> str:
    """JSON that no text in it can break out of."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def check_replaceable(path: Path) -> None:
    """A page may take the place of an older page, never of another file."""
    if path.exists() and f'content="{GENERATOR}"' not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{path} is not a page that rebased has written; move it, or choose another folder (--out)")


def write_page(page: Page, path: Path) -> None:
    check_replaceable(path)
    html = page.to_html()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(html.encode())
