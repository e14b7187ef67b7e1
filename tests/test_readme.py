"""What the README says is true: its code is an example, its configs load, its times are the records."""

import json
import re
import shlex
from pathlib import Path

from docs.images.make_speed import nanoseconds_per_token, newest_record
from docs.images.make_suite import draw as draw_suite
from docs.images.style import save

from docs_text import PAGES, ROOT, blocks, shell_lines
from rebased.cli.imports import import_user_code
from rebased.config import load_config
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig

README = (ROOT / "README.md").read_text()
RECORD = newest_record()
TOKENS = 32_768


def test_its_python_is_the_example() -> None:
    """tests/test_examples.py runs the example."""
    (layer,) = blocks(README, "python")
    example = (ROOT / "examples" / "layer.py").read_text()
    lines = [line for line in layer.splitlines() if line]
    assert [line for line in lines if line not in example.splitlines()] == []
    assert sorted(lines, key=example.index) == lines


def test_training_commands_make_a_config() -> None:
    """Those of every page that train a shipped config."""
    kinds = {"train": ("run", SyntheticRunConfig), "lm train": ("lm", LMRunConfig)}
    seen = set()
    for page in PAGES:
        for command in shell_lines(page.read_text()):
            found = re.search(r"rebased (lm train|train) (--.*--config|--config) (\S+)(.*)", command)
            if found and not found[3].endswith(".yaml"):
                words = [word for word in shlex.split(f"{found[2]} {found[3]}{found[4]}") if word != "--resume"]
                options = dict(zip(words[::2], words[1::2], strict=True))
                options.pop("--out", None)
                if "--import" in options and not (ROOT / options["--import"]).is_file():
                    continue  # a file that the page has the reader write
                if "--import" in options:
                    import_user_code(str(ROOT / options.pop("--import")))
                kind, cls = kinds[found[1]]
                path = find_config(Path(options.pop("--config")), kind)
                load_config(cls, path, {key.removeprefix("--"): value for key, value in options.items()})
                seen.add(found[1])
    assert seen == set(kinds)


def test_the_picture_of_the_suite_is_that_of_its_results(tmp_path: Path) -> None:
    """`make figures` draws it. The texts are compared: names, sizes, and whether results are partial."""
    save("suite", tmp_path, draw_suite)
    for theme in ("light", "dark"):
        drawn, committed = (folder / f"suite-{theme}.svg" for folder in (tmp_path, ROOT / "docs" / "images"))
        texts = [re.findall(r"<!-- (.*?) -->", path.read_text()) for path in (drawn, committed)]
        assert texts[0] == texts[1]
        assert "bytes of state" in texts[0]


def test_the_speed_table_is_the_record() -> None:
    lengths = [
        int(text.replace(",", ""))
        for text in re.findall(r"T = ([\d,]+)", README.split("CUDA graphs |")[1].split("\n")[0])
    ]
    rows = {
        "| rebased |": "ours",
        "| FlashAttention-2": "SDPA Flash",
        "| cuDNN": "SDPA cuDNN",
        "| flash-linear-attention's `parallel_rebased`": "fla parallel_rebased",
    }
    assert f"ops-{RECORD['date'][:10]}" in README
    assert RECORD["command"] in README
    for start, way in rows.items():
        (line,) = (line for line in README.splitlines() if line.startswith(start))
        times = nanoseconds_per_token(RECORD, way)
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        expected = [f"{times[T] * TOKENS / 1e6:.2f} ms" if T in times else "not timed: dq is 6 % off" for T in lengths]
        assert cells == expected


def test_what_it_says_about_cpus_is_the_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "poly_cpu-2026-11-16.json").read_text())[-1]
    ratio = {row["T"]: row["ratio"] for row in record["time"] if row["pass"] == "forward+backward"}
    said = " ".join(README.split())
    assert f"{ratio[1024]:.1f} times as fast as softmax attention at T = 1,024" in said
    assert f"{ratio[4096]:.1f} times at 4,096 and {ratio[16384]:.0f} times at 16,384" in said
    assert ratio[256] < 1 < ratio[512]
    assert "softmax attention is faster below T = 512" in said
