"""Write the README's file tree from the first line of each file: python docs/make_tree.py"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- file tree: make tree -->\n```text\n", "```\n<!-- end of file tree -->"


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def tree_of(folder: Path, indent: str = "") -> list[str]:
    """A line a file: the files of a folder, then its folders. What a package is, its __init__.py says."""
    lines = []
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"{indent}{path.name:{28 - len(indent)}}{first_line(path)}")
    for package in sorted(folder.iterdir()):
        if (package / "__init__.py").is_file():
            lines.append(f"{indent}{package.name + '/':{28 - len(indent)}}{first_line(package / '__init__.py')}")
            lines += tree_of(package, indent + "  ")
    return lines


def with_tree(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    tree = "\n".join(["src/rebased/", *tree_of(ROOT / "src" / "rebased", "  ")])
    return f"{before}{BEGIN}{tree}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text()))
