"""Reads a page as a browser would have to: every tag closed in its turn, nothing taken from elsewhere."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Every tag closed in its turn; attributes and texts kept."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def assert_self_contained(html: str) -> Reader:
    reader = Reader(html)
    links = [(tag, value) for tag, name, value in reader.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert [(tag, link) for tag, link in links if not link.startswith("#") and tag != "a"] == []
    styles = " ".join(reader.texts["style"] + [value for _, name, value in reader.attributes if name == "style"])
    assert re.findall(r"@import|url\((?!#)", styles) == []
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for _, link in links if link.startswith("#")} <= set(ids)
    return reader
