"""The worked example of docs/add_a_mixer.md passes the contract suite, by the command that the page gives."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add_a_mixer.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["forward alone", "with a state"])
def test_the_page_is_true(example: str, tmp_path: Path) -> None:
    file = tmp_path / "your_file.py"
    file.write_text(example)
    (name,) = re.findall(r'@register_mixer\("(\w+)"\)', example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--mixer", f"{file}:{name}"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "mixers" / "test_contract.py")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("has no init_state, extend" in done.stdout) == ("def extend" not in example)  # what skips those tests
