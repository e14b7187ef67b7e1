"""A real browser that opens a page without a window, and what a script in the page has written down."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser; none of {', '.join(BROWSERS)} was found")


def browse(url: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What the script of the page has written into <pre id="seen">, and what the console was told."""
    words = [str(BROWSER), "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    words += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root otherwise
    words += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
    words += ["--virtual-time-budget=1000000", "--dump-dom", url]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', answer.stdout, flags=re.DOTALL)
    assert seen is not None, answer.stderr[-2000:]
    console = [line for line in answer.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(seen[1]) or "{}"), console
