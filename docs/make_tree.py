"""Write the list of folders in docs/architecture.md from the first line of each package: python docs/make_tree.py"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rebased"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- file tree: make tree -->\n", "<!-- end of file tree -->"


def first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def tree_of(folder: Path, indent: str = "") -> Iterator[str]:
    """One line per package below a folder. Its __init__.py says what the package is."""
    for path in sorted(folder.glob("*/__init__.py")):
        yield f"{indent}{path.parent.name + '/':{18 - len(indent)}}{first_line(path)}"
        yield from tree_of(path.parent, indent + "  ")


def with_tree(page: str) -> str:
    """The page with a fresh tree."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    tree = "\n".join(tree_of(SOURCE))
    return f"{before}{BEGIN}\n```text\n{tree}\n```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text()))
