"""Write the file tree in docs/architecture.md from the first line of each file: python docs/make_tree.py"""

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


def packages_of(folder: Path) -> list[Path]:
    """The packages in a folder, by name."""
    return sorted(path.parent for path in folder.glob("*/__init__.py"))


def tree_of(folder: Path, indent: str = "") -> Iterator[str]:
    """One line per file: the files of a folder, then its folders. What a package is, its __init__.py says."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}{path.name:{26 - len(indent)}}{first_line(path)}"
    for package in packages_of(folder):
        yield f"{indent}{package.name + '/':{26 - len(indent)}}{first_line(package / '__init__.py')}"
        yield from tree_of(package, indent + "  ")


def sections() -> Iterator[str]:
    """One section per folder of the package, after one for the files at its top."""
    top = [f"{path.name:26}{first_line(path)}" for path in sorted(SOURCE.glob("*.py"))]
    yield section("src/rebased", top, "")
    for package in packages_of(SOURCE):
        yield section(f"src/rebased/{package.name}", tree_of(package), first_line(package / "__init__.py"))


def section(title: str, lines: Iterator[str] | list[str], about: str) -> str:
    """A heading, what the folder is for, and its files."""
    listing = "\n".join(lines)
    return f"### {title}\n\n" + (f"{about}\n\n" if about else "") + f"```text\n{listing}\n```\n"


def with_tree(page: str) -> str:
    """The page with a fresh tree."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n" + "\n".join(sections()) + f"\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text()))
