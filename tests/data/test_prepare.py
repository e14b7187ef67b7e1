"""rebased.data.prepare: all kinds of sources, the same bytes for any number of workers, and never half a result."""

import gzip
import json
import lzma
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizer import small_tokenizer_json, write_small_tokenizer

from forked_python import Started
from rebased.cli import main
from rebased.data import Corpus, PrepareConfig, prepare
from rebased.data import sources as sources_module
from rebased.data.encode_chunks import read_chunks
from rebased.data.manifest import read_manifest
from rebased.data.preparation import _in_order
from rebased.files import seal

zstandard = pytest.importorskip("zstandard")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "doesn't",
    "jump",
    "over",
    "",
    "",
    "12",
    "lazy",
    "dogs;",
    "café",
    "Ωmega",
    "漢字",
]
ALL = ("train=100%",)


def story(n: int, seed: int = 0) -> str:
    order = np.random.default_rng(seed).integers(0, len(WORDS), n)
    return "".join(WORDS[i] + (".\n" if at % 9 == 8 else " ") for at, i in enumerate(order))


def decoded(folder: Path, split: str = "train") -> list[str]:
    """The documents, as text."""
    corpus = Corpus(folder, verify=True)
    stream = corpus.stream(split)
    ends = [0, *stream.document_ends(0, len(stream)).tolist()]
    return [corpus.tokenizer.decode(stream.read(a, b).tolist()) for a, b in pairwise(ends)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def compressed(suffix: str, content: bytes) -> bytes:
    if suffix == ".zst":
        half = len(content) // 2  # two frames, as parallel compressors write them
        return zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    return {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix](content)


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
@pytest.mark.parametrize("tokenizer", ["bytes", "small"])
def test_kinds_of_files(tmp_path: Path, suffix: str, tokenizer: str) -> None:
    if tokenizer == "small":
        tokenizer = str(write_small_tokenizer(tmp_path / "small.json"))
    texts = [story(30, seed) for seed in range(3)]
    lines = "".join(json.dumps({"id": n, "text": text}) + "\n\n" for n, text in enumerate(texts)).encode()
    (tmp_path / f"a.txt{suffix}").write_bytes(compressed(suffix, texts[0].encode()))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compressed(suffix, lines))
    config = PrepareConfig(
        sources=(str(tmp_path / f"a.txt{suffix}"), str(tmp_path / f"b.jsonl{suffix}")), tokenizer=tokenizer, split=ALL
    )
    manifest = prepare(config, tmp_path / "out")
    assert decoded(tmp_path / "out") == [texts[0], *texts]
    assert manifest.splits["train"].text_bytes == sum(len(text.encode()) for text in [texts[0], *texts])
    assert manifest.splits["train"].documents == 4
    assert manifest.dtype == "uint16"


def test_folders_are_read_in_order_and_what_is_no_text_is_counted(tmp_path: Path) -> None:
    for name, content in {
        "b/z.md": b"third",
        "a.txt": b"first",
        "b/a.py": b"second",
        "b/picture.png": b"\x89PNG\0\0",
        "empty.txt": b"",
        ".git/config": b"hidden",
    }.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    manifest = prepare(PrepareConfig(sources=(str(tmp_path / "in"),), split=ALL), tmp_path / "out")
    assert decoded(tmp_path / "out") == ["first", "second", "third"]
    assert manifest.skipped_files == 2


def test_lines_that_begin_documents(tmp_path: Path) -> None:
    pages = ["head\n", "  <page>\n one\n", "  <page>\n two <b>\n", " <page>"]
    (tmp_path / "wiki.xml").write_text("".join(pages))
    prepare(PrepareConfig(sources=(str(tmp_path / "wiki.xml"),), split=ALL, document_start="<page>"), tmp_path / "out")
    assert decoded(tmp_path / "out") == pages


def test_lines_that_begin_documents_in_a_long_file(tmp_path: Path) -> None:
    pages = ["<page>" + story(9000, seed) for seed in range(40)]  # some two parts
    (tmp_path / "wiki.xml").write_text("\n".join(pages))
    config = PrepareConfig(sources=(str(tmp_path / "wiki.xml"),), split=ALL, document_start="^<page>")
    prepare(config, tmp_path / "out")
    assert decoded(tmp_path / "out") == [page + "\n" for page in pages[:-1]] + pages[-1:]


def test_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name: str) -> list[dict[str, Any]]:
        asked.append(name)
        return [{"body": story(10, seed), "n": 1} for seed in range(5)]

    monkeypatch.setattr(sources_module, "open_dataset", fake)
    prepare(PrepareConfig(sources=("hf:org/name:config@test",), split=ALL, field="body"), tmp_path / "out")
    assert decoded(tmp_path / "out") == [story(10, seed) for seed in range(5)]
    assert asked == ["hf:org/name:config@test"]
    with pytest.raises(ValueError, match=r"row 0 has the fields 'body', 'n'; it needs a field 'text' \(--field"):
        prepare(PrepareConfig(sources=("hf:org/name",), split=ALL), tmp_path / "other")


def test_a_dataset_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hf:some needs the datasets library: pip install 'rebased\[data\]'"):
        prepare(PrepareConfig(sources=("hf:some",), split=ALL), tmp_path / "out")


def test_the_standard_library_is_there_without_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "site-packages" / "other.py").write_text("not python's own")
    (tmp_path / "lib" / "data.txt").write_text("not source")
    for n in range(60):
        (tmp_path / "lib" / f"m{n:02}.py").write_text(f"x = {n}\n")
    assert any(
        file.path.name == "this.py"
        for file in sources_module.Source(sources_module.LIBRARY, field="", document_start=None).files
    )
    monkeypatch.setattr(sources_module.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    manifest = prepare(PrepareConfig(), tmp_path / "out")
    assert {name: split.documents > 0 for name, split in manifest.splits.items()} == dict.fromkeys(
        ("train", "valid", "test"), True
    )
    assert sum(split.documents for split in manifest.splits.values()) == 60
    assert manifest.sources == ("the standard library",)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> PrepareConfig:
    """Two files of text, encoded with a tokenizer.json as 7 shards of three splits."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "long.txt").write_text(story(40_000))
    lines = [json.dumps({"text": story(60 + seed, seed)}) for seed in range(300)]
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return PrepareConfig(
        sources=(str(folder / "long.txt"), str(folder / "lines.jsonl.gz")),
        tokenizer=str(write_small_tokenizer(folder / "small.json")),
        shard_bytes=60_000,
    )


@pytest.fixture(scope="module")
def whole(mixed: PrepareConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mixed`, prepared at once by one process. Nobody writes there."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    prepare(mixed, folder)
    return folder


def test_workers_make_no_difference(mixed: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebased.data.preparation.CHUNK_BYTES", 7000)
    monkeypatch.setattr(sources_module, "read_chunks", partial(read_chunks, size=7000))
    prepare(mixed, tmp_path / "one")
    prepare(mixed, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(Corpus(tmp_path / "one").splits["train"].shards) > 3


class Stop(Exception):
    pass


def test_ended_anywhere_and_resumed(mixed: PrepareConfig, whole: Path, tmp_path: Path) -> None:
    reports: list[int] = []
    prepare(mixed, tmp_path / "counted", on_progress=lambda progress: reports.append(progress.shards))
    for after in (1, len(reports) // 2, len(reports) - 1):
        left = [None] * after

        def stop_after(progress: object, left: list[None] = left) -> None:
            if not left:
                raise Stop
            left.pop()

        folder = tmp_path / f"ended-{after}"
        with pytest.raises(Stop):
            prepare(mixed, folder, on_progress=stop_after)
        with pytest.raises(ValueError, match=r"has no manifest\.json"):
            Corpus(folder)
        with pytest.raises(ValueError, match="already holds this preparation; finish it with --resume"):
            prepare(mixed, folder)
        prepare(mixed, folder, resume=True)
        assert contents(folder) == contents(whole)


SCRIPT = """
import sys, time
from pathlib import Path
import rebased.data.preparation as preparation
config = preparation.PrepareConfig.model_validate_json(sys.argv[1])
def slow(progress):
    print(progress.shards, flush=True)
    time.sleep(300 if progress.shards == 3 else 0)  # until it is killed
preparation.prepare(config, Path(sys.argv[2]), workers=int(sys.argv[3]), on_progress=slow)
"""


def test_kill_9_and_resume(mixed: PrepareConfig, whole: Path, tmp_path: Path) -> None:
    process = Started(SCRIPT, mixed.model_dump_json(), str(tmp_path / "killed"), "2")
    assert process.stdout is not None
    while process.stdout.readline().split() != ["3"]:
        assert process.poll() is None
    process.kill()
    process.communicate()
    partial = tmp_path / "killed" / ".train-00003.bin.partial"
    partial.write_bytes(b"half")  # whether or not the moment of the kill left one
    before = (tmp_path / "killed" / "train-00001.bin").stat().st_mtime_ns
    prepare(mixed, tmp_path / "killed", resume=True)
    assert contents(tmp_path / "killed") == contents(whole)
    assert (tmp_path / "killed" / "train-00001.bin").stat().st_mtime_ns == before  # finished shards are kept
    assert not partial.exists()


def test_few_batches_are_read_ahead_and_an_error_arrives_in_order() -> None:
    read: list[int] = []

    def batches() -> Iterator[int]:
        for n in range(40):
            read.append(n)
            yield n

    def encode(n: int) -> int:
        time.sleep(0.002 * (n % 3))  # so that results are ready in another order
        if n == 20:
            raise ValueError("batch 20 is wrong")
        return n * n

    with ThreadPoolExecutor(2) as threads:
        results = _in_order(threads, encode, batches(), 6)  # type: ignore[arg-type]
        for n in range(20):
            assert next(results) == (n, n * n)
            assert len(read) <= n + 6
        with pytest.raises(ValueError, match="batch 20 is wrong"):
            next(results)


def test_a_kill_before_the_first_state_is_written(mixed: PrepareConfig, whole: Path, tmp_path: Path) -> None:
    """The half of it that is left was once taken for someone else's file."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "..prepare.json.partial").write_bytes(b"{")
    assert prepare(mixed, tmp_path / "out", resume=True) == Corpus(whole).manifest


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))" + SCRIPT


def test_a_full_disk(mixed: PrepareConfig, tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk: writing fails in the same way."""
    process = Started(FULL, mixed.model_dump_json(), str(tmp_path / "out"), "1")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "File too large; the shards finished so far are kept: make room, then run" in err
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").glob("*.bin"))
    prepare(mixed, tmp_path / "out", resume=True)
    assert Corpus(tmp_path / "out", verify=True).splits["train"].tokens > 0


def test_a_damaged_shard_is_found(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    shard = tmp_path / "out" / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    Corpus(tmp_path / "out")
    with pytest.raises(ValueError, match=r"train-00001\.bin is damaged: its sha256 is .*copy it again"):
        Corpus(tmp_path / "out", verify=True)
    shard.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train-00001\.bin has [\d,]+ bytes and should have"):
        Corpus(tmp_path / "out")
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin is missing"):
        Corpus(tmp_path / "out")


def test_a_changed_manifest_is_found(whole: Path, tmp_path: Path) -> None:
    """Its sizes and the end-of-text token decide what is trained and measured."""
    shutil.copytree(whole, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    shard["text_bytes"] += 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: its checksum is not that of its contents"):
        Corpus(tmp_path / "out")
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: it has no checksum; copy it again"):
        Corpus(tmp_path / "out")
    shard["token_file"]["file"] = "../outside.bin"
    path.write_text(json.dumps(seal(manifest)))
    with pytest.raises(ValueError, match=r"splits\.train\.shards\.0\.token_file\.file"):
        Corpus(tmp_path / "out")


def test_a_changed_state_is_not_resumed_from(mixed: PrepareConfig, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.shards == 2:
            raise Stop

    with pytest.raises(Stop):
        prepare(mixed, tmp_path / "out", on_progress=stop)
    path = tmp_path / "out" / ".prepare.json"
    state = json.loads(path.read_text())
    state["shards"][0]["train"]["text_bytes"] += 1
    for text in (json.dumps(state), "[]", "["):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"\.prepare\.json is damaged"):
            prepare(mixed, tmp_path / "out", resume=True)


def test_a_damaged_shard_is_not_resumed_from(mixed: PrepareConfig, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.shards == 2:
            raise Stop

    with pytest.raises(Stop):
        prepare(mixed, tmp_path / "out", on_progress=stop)
    shard = tmp_path / "out" / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged"):
        prepare(mixed, tmp_path / "out", resume=True)


def test_another_preparation_is_refused(mixed: PrepareConfig, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert prepare(mixed, tmp_path / "out", resume=True) == Corpus(tmp_path / "out").manifest  # done already
    with pytest.raises(ValueError, match="holds another preparation: it differs in split and field; choose another"):
        prepare(mixed.model_copy(update={"split": ALL, "field": "body"}), tmp_path / "out", resume=True)
    changed = os.stat(mixed.sources[0])
    os.utime(mixed.sources[0], (time.time(), 1.0))
    with pytest.raises(ValueError, match="it differs in files"):
        prepare(mixed, tmp_path / "out", resume=True)
    os.utime(mixed.sources[0], ns=(changed.st_atime_ns, changed.st_mtime_ns))
    with pytest.raises(ValueError, match="is not empty and was not begun by this command"):
        prepare(mixed, tmp_path)
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        prepare(mixed, Path(mixed.sources[0]))
    assert contents(tmp_path / "out") == before


BAD: list[tuple[dict[str, bytes], dict[str, Any], str]] = [
    ({"a.txt": b""}, {}, r"a\.txt is empty; name text files"),
    ({"a.txt": b"ab\0c"}, {}, r"a\.txt is not text: byte 2 is zero"),
    ({"a.xz": b"not xz at all"}, {}, r"a\.xz cannot be unpacked near byte"),
    ({"a.gz": gzip.compress(b"text" * 9000)[:-30]}, {}, r"a\.gz cannot be unpacked near byte"),
    (
        {"a.zst": zstandard.compress(b"text" * 9000)[:-3]},
        {},
        r"a\.zst cannot be unpacked .* its last frame does",
    ),
    ({"a.zst": b"not packed at all"}, {}, r"a\.zst cannot be unpacked near byte"),
    ({"a.txt": b"caf\xe9 au lait"}, {"invalid_utf8": "stop"}, r"a\.txt: not UTF-8: b'\\xe9' after 'caf'"),
    ({"a.jsonl": b'{"text": "x"}\n{"text": '}, {}, r"a\.jsonl, line 2 is not JSON"),
    ({"a.jsonl": b'{"content": "x"}'}, {}, r"line 1 has the fields 'content'; it needs a field 'text'"),
    ({"a.jsonl": b'{"text": 3}'}, {}, r"line 1: 'text' is int and should be text"),
    ({"a.jsonl": b'["text"]'}, {}, r"line 1 is not an object: .* it needs a field 'text'"),
    ({"a.jsonl": b"\n\n"}, {}, r"there is no text in the sources"),
    ({"a.txt": b"x"}, {"tokenizer": "missing.json"}, r"there is no tokenizer file missing\.json"),
    ({"a.txt": b"x"}, {"tokenizer": __file__}, r"test_prepare\.py is not a tokenizer\.json"),
    ({"t.json.xz": b"{}", "a.txt": b"x"}, {"tokenizer": "t.json.xz"}, r"t\.json\.xz cannot be unpacked"),
    ({"a.txt": b"x"}, {"end_of_text": "<eos>"}, r"the bytes tokenizer has token 256 for that"),
    ({"a.txt": b"x"}, {"document_start": "("}, r"--document-start '\(' is not a regular expression"),
    ({"a.txt": b"x" * 9}, {"split": ("train=5B,valid=9B",)}, r"--split wants 14 bytes and the sources have 9"),
    ({"a.jsonl": b'{"text": "x"}'}, {"split": ("train=0.5,valid=0.5",)}, r"valid got no text: .*too few documents"),
    ({"a.txt": b"x"}, {"split": ("train=nowhere.txt",)}, r"--split names the sources; leave out the others"),
]


@pytest.mark.parametrize(("files", "changes", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).write_bytes(content)
    config = PrepareConfig(
        **({"sources": tuple(name for name in files if name.startswith("a.")), "split": ALL} | changes)
    )
    with pytest.raises(ValueError, match=message):
        prepare(config, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    # What was wrong with it can be mended in the same folder.
    Path("good.txt").write_bytes(b"all is well")
    prepare(PrepareConfig(sources=("good.txt",), split=ALL), tmp_path / "out")
    assert decoded(tmp_path / "out") == ["all is well"]
    named = {
        file for shard in Corpus("out").splits["train"].shards for file in (shard.token_file.file, shard.ends_file.file)
    }
    assert {path.name for path in Path("out").glob("*-0*")} == named


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or folder nowhere"):
        prepare(PrepareConfig(sources=("nowhere",)), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no files in it"):
        prepare(PrepareConfig(sources=(str(tmp_path / "empty"),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_utf_8_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \xff\xfe ok \xef\xbf\xbd")  # the last is U+FFFD itself
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "lone \\ud800 half"}')
    sources = (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"))
    manifest = prepare(PrepareConfig(sources=sources, split=ALL), tmp_path / "out")
    assert manifest.invalid_utf8 == 3 + 3  # a lone half of a pair is three bytes, none of them allowed
    assert decoded(tmp_path / "out")[0] == "caf\ufffd \ufffd\ufffd ok \ufffd"


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    spec = json.loads(small_tokenizer_json())
    spec["model"]["vocab"]["rare"] = 70_000
    (tmp_path / "large.json").write_text(json.dumps(spec))
    (tmp_path / "a.txt").write_text("a rare word")
    config = PrepareConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / "large.json"), split=ALL)
    manifest = prepare(config, tmp_path / "out")
    corpus = Corpus(tmp_path / "out")
    stream = corpus.stream("train")
    assert manifest.dtype == "uint32"
    assert corpus.vocab_size == 70_001
    assert stream.read(0, 1).dtype == np.uint32
    assert decoded(tmp_path / "out") == ["a rare word"]


def test_a_vocabulary_is_known_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    spec = json.loads(small_tokenizer_json())
    vocab = spec["model"]["vocab"]
    swapped = spec | {"model": spec["model"] | {"vocab": vocab | {"a": vocab["b"], "b": vocab["a"]}}}
    digests = []
    for i, content in enumerate(
        [small_tokenizer_json(), json.dumps(spec, indent=4).encode(), json.dumps(swapped).encode()]
    ):
        (tmp_path / f"{i}.json").write_bytes(content)
        config = PrepareConfig(sources=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / f"{i}.json"), split=ALL)
        prepare(config, tmp_path / f"out-{i}")
        digests.append(Corpus(tmp_path / f"out-{i}").vocabulary)
    prepare(PrepareConfig(sources=(str(tmp_path / "a.txt"),), split=ALL), tmp_path / "bytes")
    digests.append(Corpus(tmp_path / "bytes").vocabulary)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    path = write_small_tokenizer(tmp_path / "small.json")
    (tmp_path / "a.txt").write_text("one")
    make: Callable[[str | None], PrepareConfig] = lambda end: PrepareConfig(  # noqa: E731
        sources=(str(tmp_path / "a.txt"),), tokenizer=str(path), split=ALL, end_of_text=end
    )
    prepare(make(""), tmp_path / "without")
    prepare(make("<|endoftext|>"), tmp_path / "with")
    assert Corpus(tmp_path / "without").end_of_text is None
    assert Corpus(tmp_path / "with").splits["train"].tokens == Corpus(tmp_path / "without").splits["train"].tokens + 1
    with pytest.raises(ValueError, match=r"tokenizer small\.json has no token '</end>'"):
        prepare(make("</end>"), tmp_path / "other")


def test_divided_documents_are_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A large file is in every split. The table then counts more documents than there are files, and a line says so."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, size in (("large", 20_000), ("a", 100), ("b", 100), ("c", 100)):
        (texts / f"{name}.txt").write_text("x" * size)
    with pytest.raises(SystemExit) as left:
        main(["data", "prepare", str(texts), "-o", str(tmp_path / "out")])
    assert left.value.code == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.divided == 1
    assert sum(split.documents for split in manifest.splits.values()) == 4 + 2
    said = capsys.readouterr().out
    assert "divided between the splits: 1 document larger than the smallest split; the table counts the parts" in said
