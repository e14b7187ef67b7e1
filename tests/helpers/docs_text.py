"""Read the documentation in tests: its pages, their code blocks, links and anchors."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """The page's path within the repository."""
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """The contents of all fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """The text without fenced blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def shell_lines(text: str) -> list[str]:
    """The commands in blocks of sh, without comments; lines that end in a backslash are joined."""
    joined = "\n".join(blocks(text, "sh")).replace("\\\n", " ")
    lines = [line.split("  #")[0].split(" # ")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def links(text: str) -> list[str]:
    """The targets of links and pictures that lead to files: no addresses of other sites."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text)) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings that GitHub and the site both make: the site leaves out letters beyond ASCII."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
    )
    return {slug(heading) for heading in headings if slug(heading).isascii()}


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
