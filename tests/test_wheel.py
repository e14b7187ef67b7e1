"""The wheel: it holds everything that the commands need, and works in an empty environment without a checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import rebased

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
TINY = [
    *("--task.train.0.examples", "64", "--task.test.0.examples", "32"),
    *("--train.epochs", "1", "--train.batch_size", "32", "--model.d_model", "12"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    assert names == {file for file in files if "__pycache__" not in file}
    others = [
        "rebased/py.typed",
        "rebased/report/page.html",
        "rebased/configs/sweeps/demo.yaml",
        "rebased/shipped/demo.jsonl.xz",
    ]
    others += ["rebased/paper/records/precision.json", "rebased/paper/records/table1-small.jsonl.xz"]
    others += ["rebased/configs/mqar/quick.yaml", "rebased/configs/lm/quick.yaml", "rebased/configs/sweeps/table1.yaml"]
    assert set(others) <= names


def test_what_it_says_about_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        about = message_from_string(archive.read(path).decode())
        (scripts,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "rebased = rebased.cli:main" in archive.read(scripts).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert about["Version"] == rebased.__version__
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()  # the version is in one place
    assert "Paper, https://arxiv.org/abs/2402.10644" in about.get_all("Project-URL", [])


@pytest.mark.release
def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The environment has the wheel; its dependencies come from the one that runs this test."""
    venv.create(tmp_path / "env", symlinks=True)
    bin_folder = tmp_path / "env" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str, code: int = 0) -> str:
        result = subprocess.run(
            [str(bin_folder / command[0]), *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    own = run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    theirs = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(own, "theirs.pth").write_text("\n".join(theirs))  # after its own, so the wheel's package comes first

    assert run("python", "-c", "import rebased; print(rebased.__file__)").startswith(own)
    assert "sweep" in run("rebased", "--help")
    assert run("python", "-m", "rebased", "--version") == f"{rebased.__version__}\n"
    assert "mqar/quick" in run("rebased", "list", "configs")
    assert "accuracy" in run("rebased", "train", "--config", "mqar/quick", *TINY, "--out", "run")
    assert "mqar/based" in run("rebased", "list", "models")
    assert "30 runs: 0 done" in run("rebased", "sweep", "table1-cpu", "--dry-run")
    run("rebased", "report", "run", "-o", "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()
    run("rebased", "paper", "-o", "paper.html")
    assert "From the records that come with rebased" in (tmp_path / "paper.html").read_text()
    assert "did you mean 'mqar/quick'?" in run("rebased", "train", "--config", "mqar/quik", code=2)
