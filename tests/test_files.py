"""Atomic writes, folder locks and checksums."""

import subprocess
import sys
from pathlib import Path

import pytest

from rebased.files import (
    FolderInUse,
    describe_file,
    locked,
    parse_json,
    read_json,
    replacing,
    sha256_bytes,
    sha256_file,
)

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # sha256 of "abc", FIPS 180-2
HOLD = "import sys; from pathlib import Path; from rebased.files import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"


def test_checksums(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert sha256_file(path) == sha256_bytes(b"abc") == ABC
    assert describe_file(path) == {"bytes": 3, "sha256": ABC}


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"new")]


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        expected = r"folder is in use by another process; wait .* choose another folder \(-o\)"
        with pytest.raises(FolderInUse, match=expected), locked(folder, option="-o"):
            pass
        process.kill()
    with locked(folder):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "x is nested deeper than 64 levels"),
        ("[" * 66 + "]" * 66, "x is nested deeper than 64 levels"),
        ("{", "x is not JSON: Expecting property name"),
        ("\ud800", "x is not JSON"),
        ("1" * 5000, "x is not JSON: Exceeds the limit"),
    ],
    ids=["deep", "deeper than ours", "open", "surrogate", "digits"],
)
def test_json_that_is_none_names_its_source(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text, "x")
    assert parse_json("[" * 64 + "]" * 64, "x")


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]")
    assert read_json(path, limit=3) == [1]
    with pytest.raises(ValueError, match="has 3 bytes; at most 2 are read here"):
        read_json(path, limit=2)
    with pytest.raises(ValueError, match="/dev/zero is a device"):
        read_json("/dev/zero")
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)
