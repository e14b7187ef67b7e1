"""Recipes: pinned files become documents, each in the split that its content decides; what differs is named."""

import hashlib
import io
import json
import lzma
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rebased.cli import main as exits
from rebased.data import Corpus
from rebased.data.overlap import RUN, shared_runs
from rebased.data.recipe import RECIPES, find_recipe, read_recipe

PAGES = [f"<page>\n  page {n} about {n * n}\n</page>\n" for n in range(60)]
MODULES = {f"pkg-1/a{n}.py": f"def f{n}():\n    return {n}\n" for n in range(40)}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tar_of(files: dict[str, str]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return target.getvalue()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The files of a recipe, as a server has them."""
    folder = tmp_path / "served"
    folder.mkdir()
    with zipfile.ZipFile(folder / "pages.zip", "w") as archive:
        archive.writestr("other.txt", "not this")
        archive.writestr("in/pages.txt", "".join(PAGES))
    extra = {
        "pkg-1/copy.py": MODULES["pkg-1/a7.py"],
        "pkg-1/b.c": "int x;",
        "pkg-1/e.py": "",
        "pkg-1/big.py": "x" * 999,
    }
    (folder / "pkg-1.tar.gz").write_bytes(tar_of(MODULES | extra))
    return folder


def recipe_of(files: Path, tmp_path: Path, url: str = "https://example.invalid", **changes: Any) -> Path:
    pages = {"url": f"{url}/pages.zip", "member": "in/pages.txt", "sha256": sha256("".join(PAGES).encode())} | changes
    archive = {"url": f"{url}/pkg-1.tar.gz", "sha256": sha256((files / "pkg-1.tar.gz").read_bytes())}
    sources = {
        "wiki": {"licence": "CC", "document_start": "<page>", "files": [pages]},
        "code": {"licence": "MIT", "members": ["*.py"], "max_bytes": 500, "files": [archive]},
    }
    path = tmp_path / "two.recipe.yaml"
    path.write_text(yaml.safe_dump({"sources": sources}, sort_keys=False))
    return path


def main(words: list[str]) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        exits(words)
    return int(ended.value.code or 0)


def prepare(recipe: Path, out: Path, *words: str | Path) -> int:
    split = "train=0.6,valid=0.2,test=0.2"
    return main([str(word) for word in ("data", "prepare", recipe, "-o", out, "--split", split, *words)])


def texts(corpus: Corpus, split: str) -> list[str]:
    stream = corpus.stream(split)
    ends = [0, *stream.document_ends(0, len(stream)).tolist()]
    return [corpus.tokenizer.decode(stream.read(a, b - 1).tolist()) for a, b in pairwise(ends)]


def test_each_document_is_in_one_split_and_whole(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prepare(recipe_of(files, tmp_path), out, "--downloads", files) == 0
    corpus = Corpus(out, verify=True)
    found = {split: texts(corpus, split) for split in corpus.splits}
    everything = [text for each in found.values() for text in each]
    assert sorted(everything) == sorted([*PAGES, *MODULES.values()])  # the copy, the C, the empty and the large are out
    assert all(found.values())
    assert corpus.manifest.duplicates == 1
    assert corpus.manifest.skipped_files == 1
    assert {file.source: file.sha256 for file in corpus.manifest.recipe} == {
        "wiki": sha256("".join(PAGES).encode()),
        "code": sha256((files / "pkg-1.tar.gz").read_bytes()),
    }


def test_the_split_depends_on_the_content_alone(files: Path, tmp_path: Path) -> None:
    recipe = recipe_of(files, tmp_path)
    first = tmp_path / "first"
    assert prepare(recipe, first, "--downloads", files) == 0
    content = yaml.safe_load(recipe.read_text())
    content["sources"] = dict(reversed(content["sources"].items()))
    recipe.write_text(yaml.safe_dump(content, sort_keys=False))
    second = tmp_path / "second"
    assert prepare(recipe, second, "--downloads", files) == 0
    for split in ("train", "valid", "test"):
        assert sorted(texts(Corpus(first), split)) == sorted(texts(Corpus(second), split))


def test_a_text_may_come_in_any_container(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "wiki.xz"
    path.write_bytes(lzma.compress("".join(PAGES).encode()))
    out = tmp_path / "out"
    assert prepare(recipe_of(files, tmp_path), out, "--from", f"wiki={path}", "--from", f"code={files}") == 0
    assert Corpus(out).manifest.splits["train"].documents > 0


def test_another_checksum_is_one_clear_line(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text("<page>another\n")
    out = tmp_path / "out"
    assert prepare(recipe_of(files, tmp_path), out, "--from", f"wiki={path}", "--downloads", files) != 0
    error = capsys.readouterr().err.strip()
    assert f"wiki: {path} has sha256 {sha256(path.read_bytes())[:12]}..., the recipe says" in error.replace("\n", " ")
    assert not out.exists()


def test_a_file_without_a_pin_is_recorded_with_its_checksum(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text("".join(f"<page>{n}\n" for n in range(50)))
    out = tmp_path / "out"
    recipe = recipe_of(files, tmp_path, sha256=None)
    assert prepare(recipe, out, "--from", f"wiki={path}", "--downloads", files) == 0
    assert Corpus(out).manifest.recipe[0].sha256 == sha256(path.read_bytes())


def test_no_network_names_the_remedy(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(files, tmp_path, url="http://127.0.0.1:9")
    assert prepare(recipe, tmp_path / "out", "--downloads", tmp_path / "none") != 0
    error = " ".join(capsys.readouterr().err.split())
    assert "wiki: http://127.0.0.1:9/pages.zip could not be fetched" in error
    assert "add --from wiki=PATH" in error


@pytest.fixture
def server(files: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(files))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_what_is_not_there_is_downloaded_once(files: Path, tmp_path: Path, server: str) -> None:
    recipe, downloads = recipe_of(files, tmp_path, url=server), tmp_path / "downloads"
    assert prepare(recipe, tmp_path / "out", "--downloads", downloads) == 0
    assert sorted(path.name for path in downloads.iterdir()) == ["pages.zip", "pkg-1.tar.gz"]
    (files / "pages.zip").unlink()
    assert prepare(recipe, tmp_path / "again", "--downloads", downloads) == 0


def test_a_preparation_that_was_stopped_goes_on(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first shard, that of the first source. The files may have moved meanwhile."""
    recipe, out, whole = recipe_of(files, tmp_path), tmp_path / "out", tmp_path / "whole"
    assert prepare(recipe, whole, "--downloads", files) == 0
    from rebased.data import preparation

    write, calls = preparation.write_state, []

    def stop(folder: Path, state: Any) -> None:
        write(folder, state)
        calls.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "write_state", stop)
    prepare(recipe, out, "--downloads", files)
    assert calls
    assert not (out / "manifest.json").exists()
    monkeypatch.undo()
    files.rename(tmp_path / "moved")
    assert prepare(recipe, out, "--downloads", tmp_path / "moved", "--resume") == 0
    assert Corpus(out).manifest == Corpus(whole).manifest


def test_the_table_counts_tokens_per_source(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(recipe_of(files, tmp_path), tmp_path / "out", "--downloads", files, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sources"]["wiki"] == {"documents": 60, "tokens": sum(len(page) + 1 for page in PAGES)}
    assert found["sources"]["code"]["documents"] == 40
    assert set(found["shared_runs"]) == {"valid", "test"}


class Array:
    """Tokens in memory as a stream."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError


def test_shared_runs_are_counted_at_any_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebased.data.overlap.BLOCK", 3 * RUN)
    rng = np.random.default_rng(0)
    train = rng.integers(1000, size=1000).astype(np.uint16)
    copied = np.concatenate([train[333 : 333 + 3 * RUN], rng.integers(1000, size=5 * RUN).astype(np.uint16)])
    near = train[: 2 * RUN].copy()
    near[[5, RUN + 5]] += 1
    streams = {"copied": Array(copied), "near": Array(near), "short": Array(train[:5]), "same": Array(train)}
    assert shared_runs(streams, Array(train)) == {"copied": 3 / 8, "near": 0.0, "short": 0.0, "same": 1.0}


def test_mini_pile_is_a_recipe_whose_files_are_all_pinned() -> None:
    path = find_recipe(["mini-pile"])
    assert path == RECIPES / "mini-pile.yaml"
    pinned = [file for source in read_recipe(path).sources.values() for file in source.files]
    assert all(file.sha256 and file.url.startswith("https://") for file in pinned)
    assert len({file.sha256 for file in pinned}) == len(pinned)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mini-pile", "a.txt"], "mini-pile is a recipe; it cannot be mixed"),
        (["mini-pile", "--from", "enwik8=x", "foldoc=y"], "takes one NAME=PATH, repeat it: --from foldoc=y"),
        (["mini-pile", "--from", "enwik=x"], "there is no source 'enwik'; did you mean 'enwik8'?"),
        (["mini-pile", "--from", "x"], "--from 'x' is not NAME=PATH"),
        (["mini-pile", "--from", "enwik8=nowhere"], "--from enwik8=nowhere: there is no file nowhere; name enwik8.zip"),
        (["a.txt", "--from", "enwik8=x"], "--from belongs to a recipe"),
        (["no.recipe.yaml"], "no.recipe.yaml"),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    assert main(["data", "prepare", *words, "-o", "out"]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_recipe_is_split_by_shares(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "prepare", str(recipe_of(files, tmp_path)), "-o", str(tmp_path / "out"), "--downloads", str(files)]
    assert main([*words, "--split", "train=1kB,valid=1kB"]) != 0
    assert "a recipe is split by shares" in " ".join(capsys.readouterr().err.split())
