"""The page in a real browser, as wide as a phone: it renders, fetches nothing, logs no error, and its tables sort."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_records import fake_lm_run, fake_run
from fake_suite import small_suite, suite_runs
from rebased.report.report import Report
from rebased.report.suite.board import Board
from rebased.report.suite.page import suite_page
from rebased.report.tables import Table
from rebased.runs.collect import Collection

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser; none of {', '.join(BROWSERS)} was found")

PHONE = 375  # pixels
# The page in a frame, and a script beside it that looks around in there and writes down what it sees.
HARNESS = """<!doctype html><iframe id="frame" style="width:{width}px; height:800px; border:0" srcdoc="{page}"></iframe>
<pre id="seen"></pre>
<script>
document.getElementById("frame").addEventListener("load", async event => {{
  const view = event.target.contentWindow, page = view.document;
  const column = (table, i) => Array.from(table.tBodies[0].rows, row => row.cells[i].textContent);
  const table = Array.from(page.querySelectorAll("table")).find(table => table.rows[0].cells[0].textContent === "run");
  const heads = Array.from(table.tHead.rows[0].cells, head => head.textContent);
  const n = heads.indexOf("accuracy"), button = table.tHead.rows[0].cells[n].querySelector("button");
  const seen = {{heads, before: column(table, n)}};
  button.click();
  seen.up = column(table, n);
  button.click();
  seen.down = column(table, n);
  seen.sort = table.tHead.rows[0].cells[n].getAttribute("aria-sort");
  const filter = table.closest("details").querySelector("input");
  filter.value = "rebased 0.001";
  filter.dispatchEvent(new view.Event("input"));
  seen.shown = Array.from(table.tBodies[0].rows).filter(row => !row.hidden).length;
  seen.resources = view.performance.getEntriesByType("resource").map(entry => entry.name);
  seen.width = page.documentElement.scrollWidth;
  page.querySelectorAll("details").forEach(part => part.open = true);
  seen.figures = Array.from(page.querySelectorAll("svg[role=img]"), svg => svg.getBoundingClientRect());
  seen.samples = Array.from(page.querySelectorAll(".legend svg"), svg => svg.getBoundingClientRect().width);
  seen.ink = view.getComputedStyle(page.querySelector("svg text")).fill;
  const figure = page.querySelector("figure"), drawing = figure.querySelector("svg[role=img]");
  const place = drawing.querySelector(".places circle"), box = place.getBoundingClientRect();
  const at = {{clientX: box.x + box.width / 2 + 3, clientY: box.y + box.height / 2 - 3}};
  drawing.dispatchEvent(new view.PointerEvent("pointermove", at));
  seen.told = [place.textContent, page.getElementById("tip").textContent, page.getElementById("tip").hidden];
  drawing.dispatchEvent(new view.PointerEvent("pointerleave", at));
  seen.left = page.getElementById("tip").hidden;
  const saved = [];
  view.URL.createObjectURL = blob => saved.push(blob) && "#";
  view.HTMLAnchorElement.prototype.click = () => null;
  for (const button of figure.querySelectorAll(".save button"))
    if (button.textContent !== "PDF") button.click();
  const {{port1, port2}} = new MessageChannel();  // a timer's seconds pass at once here, a message takes real time
  const turn = () => new Promise(done => {{ port1.onmessage = done; port2.postMessage(0); }});
  for (let i = 0; i < 1e6 && saved.length < 2; i++) await turn();
  const svg = await saved[0].text(), parsed = new DOMParser().parseFromString(svg, "image/svg+xml");
  const panels = parsed.querySelectorAll("svg svg[role=img]").length;
  seen.svg = {{root: parsed.documentElement.tagName, panels, text: svg}};
  seen.png = {{type: saved[1]?.type, size: saved[1]?.size}};
  const card = page.querySelector("table.cards td");
  seen.cards = [view.getComputedStyle(card).display, view.getComputedStyle(card, "::before").textAlign];
  seen.data = JSON.parse(page.getElementById("data").textContent).runs.length;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}});
</script>"""


# As above, for the page about the paper: how wide it is as wide as a phone and on a desk, and where its links lead.
PAPER = """<!doctype html><iframe id="frame" style="width:{width}px; height:800px; border:0" srcdoc="{page}"></iframe>
<pre id="seen"></pre>
<script>
document.getElementById("frame").addEventListener("load", event => {{
  const frame = event.target, view = frame.contentWindow, page = view.document, seen = {{}};
  page.querySelectorAll("details").forEach(part => part.open = true);
  const rows = page.querySelector("table.stacked").tBodies[0].rows;
  const links = Array.from(rows, row => row.querySelector("a")).filter(link => link);
  seen.links = links.map(link => page.querySelector(link.getAttribute("href")).querySelector("h2").textContent);
  seen.names = links.map(link => link.textContent);
  seen.phone = page.documentElement.scrollWidth;
  seen.stacked = view.getComputedStyle(rows[0].cells[1]).display;
  frame.style.width = "1280px";
  seen.desk = page.documentElement.scrollWidth;
  seen.cut = Array.from(page.querySelectorAll("table")).filter(table => {{
    const box = table.closest(".wide"), style = box && view.getComputedStyle(box), place = box?.getBoundingClientRect();
    return !box || style.overflowX !== "auto" || place.left < 0 || place.right > page.documentElement.clientWidth + 1;
  }}).length;
  seen.scrolling = Array.from(page.querySelectorAll(".wide")).filter(box => box.scrollWidth > box.clientWidth).length;
  seen.cell = view.getComputedStyle(rows[0].cells[1]).display;
  seen.resources = view.performance.getEntriesByType("resource").map(entry => entry.name);
  document.getElementById("seen").textContent = JSON.stringify(seen);
}});
</script>"""


# The page of a suite: what is left of it after a filter was chosen. No script of the page takes part.
FILTERS = """<!doctype html><iframe id="frame" style="width:{width}px; height:800px; border:0" srcdoc="{page}"></iframe>
<pre id="seen"></pre>
<script>
document.getElementById("frame").addEventListener("load", event => {{
  const frame = event.target, page = frame.contentWindow.document, seen = {{}};
  const shown = query => Array.from(page.querySelectorAll(query)).filter(each => each.getClientRects().length);
  const look = name => {{
    const names = shown("#size-512 tbody th").map(each => each.textContent);
    const cells = shown("#size-512 td a").length, runs = shown(".runs").length;
    const written = new Set(shown("[data-name=recall-by-bytes] .panel text").map(each => each.textContent));
    seen[name] = {{names, cells, runs, panels: shown("[data-name=recall-by-bytes] .panel").length,
      lines: ["ReBased", "Linear"].filter(each => written.has(each)), sizes: shown("section[id^=size-]").length}};
  }};
  look("all");
  for (const name of ["task-1", "mixers-1", "state-0"]) {{
    page.getElementById(name).checked = true;
    look(name);
    page.getElementById(name.split("-")[0] + "-all").checked = true;
  }}
  seen.phone = page.documentElement.scrollWidth;
  frame.style.width = "1280px";
  const boxes = Array.from(page.querySelectorAll(".by-task .wide"));
  seen.cut = boxes.filter(box => box.scrollWidth > box.clientWidth).length;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}});
</script>"""


def browse(page: str, folder: Path, harness: str = HARNESS) -> tuple[dict[str, Any], list[str]]:
    """What the script beside the page has seen, and what the console was told."""
    file = folder / "harness.html"
    file.write_text(harness.format(width=PHONE, page=html.escape(page)), encoding="utf-8")
    words = [str(BROWSER), "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    words += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root otherwise
    # an hour, which passes as fast as the page lets it: on a busy machine a minute ended before the PNG was drawn
    words += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3600000", "--dump-dom", file.as_uri()]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', answer.stdout, flags=re.DOTALL)
    assert seen is not None, answer.stderr[-2000:]
    console = [line for line in answer.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(seen[1]) or "{}"), console


@pytest.fixture(scope="module")
def page() -> str:
    runs = [
        fake_run(model, [0.1, level - 5 * lr + seed / 1000], seed=seed, lr=lr, d_model=d_model)
        for model, level in (("rebased", 0.9), ("based", 0.6))
        for d_model in (24, 48)
        for seed in (42, 43)
        for lr in (1e-3, 1e-2, 3e-2, 1e-1)
    ]
    lm_runs = [fake_lm_run(model, seed=seed) for model in ("rebased", "based") for seed in (42, 43)]
    return Report(Collection(runs=runs, lm_runs=lm_runs)).page(None, "rebased report runs").to_html()


def test_the_page_in_a_browser(page: str, tmp_path: Path) -> None:
    seen, console = browse(page, tmp_path)
    assert console == []
    assert seen["resources"] == []
    assert seen["data"] == len(seen["before"]) == 32
    numbers = sorted(map(float, seen["before"]))
    assert list(map(float, seen["up"])) == numbers != list(map(float, seen["before"]))
    assert list(map(float, seen["down"])) == numbers[::-1]
    assert seen["sort"] == "descending"
    assert seen["shown"] == 4  # rows with both words in the filter's box: two widths, two seeds
    assert seen["width"] <= PHONE  # wide things scroll in boxes of their own
    assert len(seen["figures"]) == 6 + 2  # of synthetic tasks; one of training per model
    assert all(200 < panel["width"] <= PHONE and panel["height"] > 100 for panel in seen["figures"])  # a row each
    assert len(seen["samples"]) == 10 + 4  # two lines in each of five legends, chance in four
    assert all(20 < width < 50 for width in seen["samples"])
    assert seen["told"] == [seen["told"][0]] * 2 + [False]  # who points at a point is told what it is
    assert seen["told"][0].startswith("Based, D = 24: 0.6")
    assert seen["left"]
    assert seen["svg"]["root"] == "svg"
    assert seen["svg"]["panels"] == 1
    assert "var(" not in seen["svg"]["text"]  # a saved figure has colours of its own
    assert "ReBased" in seen["svg"]["text"]
    assert seen["png"]["type"] == "image/png"
    assert seen["png"]["size"] > 10_000
    assert seen["cards"] == ["flex", "left"]  # on a phone a wide row is a card; its words begin at the left
    assert re.fullmatch(r"rgb\(\d+, \d+, \d+\)", seen["ink"])  # the page's own colour, not a placeholder's
    assert seen["ink"] != "rgb(1, 1, 1)"


def test_a_page_that_fetches_is_found_out(page: str, tmp_path: Path) -> None:
    _, console = browse(page.replace("<main>", '<main><img src="https://example.org/x.png">'), tmp_path)
    assert any("Content Security Policy" in line for line in console)


def test_the_page_about_the_paper_on_a_phone_and_on_a_desk(tmp_path: Path) -> None:
    """The committed page, which another test holds against the records."""
    committed = (Path(__file__).parents[2] / "results" / "paper.html").read_text()
    planted = Table([f"column {n} of a wide table" for n in range(30)], [["0.5"] * 30]).to_html()
    seen, console = browse(committed.replace("<footer", f"{planted}<footer", 1), tmp_path, PAPER)
    assert console == []
    assert seen["resources"] == []
    assert len(seen["links"]) == 5
    assert seen["names"] == seen["links"]
    assert seen["phone"] <= PHONE
    assert seen["stacked"] == "block"  # a row of the summary is one below the other there
    assert seen["desk"] <= 1280
    assert seen["cut"] == 0  # tables wider than the window scroll within it
    assert seen["scrolling"] == 1
    assert seen["cell"] == "table-cell"


def test_filters_of_a_suite_hide_other_tasks_mixers_and_sizes(tmp_path: Path) -> None:
    suite = small_suite()
    board = Board(suite, list(suite_runs(suite, dict.fromkeys(suite.mixers, 0.5))))
    seen, console = browse(suite_page(board, "small", "x", {}, "").to_html(), tmp_path, FILTERS)
    assert console == []
    whole = {
        "names": ["Delta", "Linear", "ReBased"],
        "cells": 6,
        "runs": 14,
        "panels": 2,
        "lines": ["ReBased", "Linear"],
    }
    assert seen["all"] == whole | {"sizes": 3}
    assert seen["task-1"] == whole | {"cells": 3, "runs": 7, "panels": 1, "sizes": 3}
    assert seen["mixers-1"] == whole | {"names": ["Delta"], "cells": 2, "runs": 4, "lines": [], "sizes": 3}
    assert seen["state-0"] == whole | {"runs": 6, "sizes": 1}
    assert seen["phone"] <= PHONE
    assert seen["cut"] == 0
