"""Checksums of the user's own mixers: what changes them, and where records and reports say so."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from fake_records import fake_run
from rebased.report.prose import warn_about_code, warn_about_records
from rebased.runs.collect import Collection, gather, write_bundle
from rebased.runs.finished import Run
from rebased.runs.own_code import KEY, changed_code, checksum, own_code, recorded_code
from rebased.runs.synthetic_config import SyntheticRunConfig

OWN = """
from torch import nn
from rebased import register_mixer

@register_mixer("own")
class Own(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x
"""


def load(folder: Path, source: str) -> ModuleType:
    path = folder / "own_mixer.py"
    path.write_text(source)
    spec = spec_from_file_location("own_mixer", path)
    assert spec
    assert spec.loader
    module = sys.modules["own_mixer"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_counts_and_comments_do_not(tmp_path: Path) -> None:
    first = checksum(load(tmp_path, OWN).Own)
    assert checksum(load(tmp_path, OWN.replace("    def", "\n    # a remark\n    def") + "\n\n").Own) == first
    assert checksum(load(tmp_path, OWN.replace("return x", "return 2 * x")).Own) != first
    assert checksum(type("Nowhere", (), {"__module__": "nowhere"})) is None


def test_a_record_is_compared_with_the_code_of_today(tmp_path: Path) -> None:
    load(tmp_path, OWN)
    config = SyntheticRunConfig.model_validate(
        {
            "task": {split: [{"seq_len": 32, "kv_pairs": 4, "examples": 10}] for split in ("train", "test")},
            "model": {"mixers": ["short_conv", "own"], "d_model": 24},
        }
    )
    sums = own_code(config)
    assert list(sums) == ["mixer 'own'"]
    run = {"type": "run", KEY: sums}
    assert changed_code([run], config) == []
    assert changed_code([{"type": "run"}], config) == []  # an old record does not tell
    assert changed_code([{"type": "run", KEY: "what a stranger wrote"}], config) == []
    assert changed_code([run | {KEY: {"mixer 'own'": "0123"}}], config) == ["mixer 'own'"]
    assert recorded_code([run | {KEY: {"mixer 'own'": "0123"}}, {"type": "resume", KEY: sums}]) == sums


def test_a_report_warns_of_two_versions_of_a_mixer_and_of_settings_it_cannot_check() -> None:
    runs = [fake_run(seed=seed) for seed in (1, 2)]
    for run, value in zip(runs, "ab", strict=True):
        run.lines[0][KEY] = {"mixer 'own'": value}
    warnings = list(warn_about_code(runs))
    assert warnings[-1].startswith("The file of mixer 'own' was changed between these runs: they have 2 versions of it")
    assert list(warn_about_records(Collection(runs=runs), runs)) == []
    runs[0].settings["model"]["mixers"][0]["name"] = "a_strangers"
    (warning,) = warn_about_records(Collection(runs=runs), runs)
    assert warning.startswith("1 record with mixers, tasks or settings that are not known here: their settings could")


def test_a_run_without_a_readable_epoch_is_damaged_and_no_result(tmp_path: Path) -> None:
    run = fake_run()
    assert run.status == "done"
    lost = Run(run.folder, [run.lines[0], run.lines[-1]])
    assert lost.status == "damaged"
    write_bundle([lost], tmp_path / "lost.jsonl.gz")
    (found,) = gather([tmp_path / "lost.jsonl.gz"]).runs
    assert found.status == "damaged"
    diverged = fake_run(accuracies=(), status="diverged")
    assert (diverged.status, diverged.best.accuracy) == ("diverged", 0.0)
