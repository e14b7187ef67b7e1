"""The examples of docs/add_a_mixer.md pass the contract suite with the command that the page gives."""

import re
from pathlib import Path

import pytest

from forked_python import run_pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add_a_mixer.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["forward alone", "with a state"])
def test_the_page_is_true(example: str, tmp_path: Path) -> None:
    file = tmp_path / "your_file.py"
    file.write_text(example)
    (name,) = re.findall(r'@register_mixer\("(\w+)"\)', example)
    done = run_pytest("--mixer", f"{file}:{name}", str(ROOT / "tests" / "mixers" / "test_contract.py"))
    assert done.returncode == 0, done.output
    assert ("has no init_state, extend" in done.output) == (
        "def extend" not in example
    )  # the reason why checks are skipped
