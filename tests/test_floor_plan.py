"""The floor plan of docs/architecture.md, held against every import; and what an import may cost and do."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rebased"
FILES = sorted(SOURCE.rglob("*.py"))
TORCH_ALONE = ("compat", "mixers", "ops")
TOP = ("__init__", "__main__")  # the package itself, above all floors


def read_floors() -> list[str]:
    """Top to bottom, from the one table there is."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    return re.findall(r"^(\w+) {2,}\S", table, flags=re.MULTILINE)


FLOORS = read_floors()


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def floor_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, floor) of each use of this package; a name taken from the package's own top counts as floor ''."""
    for node in nodes:
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import out from 'rebased'"
            names = [f"rebased.{alias.name}" for alias in node.names]
            modules = names if node.module == "rebased" else [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            modules = [f"{node.value.id}.{node.attr}"]
        for module in modules:
            top, _, rest = module.partition(".")
            floor = rest.split(".")[0]
            if top == "rebased" and floor and not floor.startswith("__"):  # __version__ and __file__ are everyone's
                yield getattr(node, "lineno", 0), floor if floor in FLOORS else ""


def violations(path: Path, nodes: list[ast.AST]) -> list[str]:
    own = floor_of(path)
    found = []
    for line, floor in imported(path, nodes):
        where = f"{name_of(path)}:{line}"
        if floor == "":
            found.append(f"{where} imports from the top; import from where the name lives")
        elif FLOORS.index(floor) < FLOORS.index(own):
            found.append(f"{where} ({own}) imports from {floor}, a floor above")
        elif floor == "config" and own in TORCH_ALONE:
            found.append(f"{where} ({own}) imports config; it must do with torch alone")
    return found


def test_the_table_names_every_floor() -> None:
    assert FLOORS[:2] == ["cli", "paper"]  # so nothing but the command imports the paper
    assert {floor_of(path) for path in FILES} - set(TOP) <= set(FLOORS)


def test_imports_go_down() -> None:
    assert [each for path in FILES if floor_of(path) not in TOP for each in violations(path, nodes_of(path))] == []


def test_a_violation_is_found() -> None:
    lines = ["import rebased.models", "from rebased import ReBased", "from rebased.config import Config"]
    lines += ["import rebased", "print(rebased.__version__)", "rebased.MQAR()"]
    nodes = list(ast.walk(ast.parse("\n".join(lines))))
    for floor, wrong in (("ops", "1236"), ("compat", "1236"), ("tasks", "126"), ("train", "26")):
        where = [text.split()[0] for text in violations(SOURCE / floor / "x.py", nodes)]
        assert where == [f"{floor}/x.py:{line}" for line in wrong]


def test_nothing_prints_below_cli() -> None:
    calls = [
        (path, node)
        for path in FILES
        if floor_of(path) != "cli"
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
    ]
    prints = [(path, call.lineno) for path, call in calls if getattr(call.func, "id", None) == "print"]
    assert [f"{name_of(path)}:{line}" for path, line in prints] == []


def test_one_file_asks_about_hardware() -> None:
    asks = re.compile(r"cuda\.is_available|find_spec\(")
    assert [name_of(path) for path in FILES if asks.search(path.read_text())] == ["ops/backend.py"]


def run_python(*words: str) -> str:
    """What a fresh interpreter prints, stderr included; it must succeed."""
    result = subprocess.run([sys.executable, "-W", "error", "-c", *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_importing_rebased_is_silent_and_cheap() -> None:
    heavy = ("torch", "numpy", "pydantic", "yaml", "rich", "cyclopts")
    assert run_python(f"import rebased, sys; assert not [m for m in {heavy} if m in sys.modules]") == ""


AFTER_TORCH = {
    "names at the top arrive on first use": """
import rebased
assert set(rebased.__all__) <= set(dir(rebased))
from rebased import *
assert ReBased is rebased.mixers.ReBased and poly_attention is rebased.ops.poly_attention
try:
    rebased.nonsense
except AttributeError as error:
    assert "no attribute 'nonsense'" in str(error)
else:
    raise AssertionError
""",
    "counting needs no compiler, which takes as long to import as all the rest": """
from rebased.mixers import mixer_names
from rebased.models import LMConfig, shape_of
for name in mixer_names():
    assert shape_of(LMConfig(vocab_size=8, d_model=48, mixers=[name])).num_parameters() > 0
    assert "torch._dynamo" not in sys.modules, name
""",
    "operators on a CPU do not import triton": """
import torch
from rebased.ops import REBASED, poly_attention
q = torch.ones(1, 3, 1, 2)
poly_attention(q, q, q, coefficients=REBASED, cu_seqlens=torch.tensor([0, 1, 3]))
assert not [name for name in sys.modules if name.startswith(("triton", "rebased.ops.polynomial.gpu"))]
""",
    "a bare machine with a GPU sweeps without what reports alone need": """
sys.modules |= dict.fromkeys(("scipy", "matplotlib", "ray"))
import rebased.cli.sweep, rebased.train.lm.workload, rebased.train.synthetic.workload
""",
}
FORKS = """
import json, os, sys, traceback
import torch
answers = {}
for name, code in json.loads(sys.argv[1]).items():
    ours, theirs = os.pipe()
    if not os.fork():
        os.dup2(theirs, 1), os.dup2(theirs, 2)
        try:
            exec(code, {"sys": sys})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        answers[name] = said.read()
print(json.dumps(answers))
"""


def test_what_is_imported_beside_torch() -> None:
    """Each question in an interpreter that has imported torch and nothing else: they are forks of one."""
    assert json.loads(run_python(FORKS, json.dumps(AFTER_TORCH))) == dict.fromkeys(AFTER_TORCH, "")


def test_ops_mixers_and_compat_need_torch_alone() -> None:
    code = """
import sys, warnings
for name in ("numpy", "pydantic", "yaml", "rich", "cyclopts", "safetensors", "triton", "scipy", "matplotlib"):
    sys.modules[name] = None  # importing it raises ImportError
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own remark
import inspect, torch, rebased.ops
from rebased.mixers import CONTEXT, mixer_class, mixer_names
for name in mixer_names():
    cls = mixer_class(name)
    context = {key: value for key, value in zip(CONTEXT, (48, 0, 2, 8)) if key in inspect.signature(cls).parameters}
    assert cls(**context)(torch.randn(1, 5, 48)).shape == (1, 5, 48)
from rebased.compat.fla import ReBasedLinearAttention
assert ReBasedLinearAttention(48)(torch.randn(1, 5, 48)).shape == (1, 5, 48)
assert not torch.cuda.is_initialized()
"""
    assert run_python(code) == ""
