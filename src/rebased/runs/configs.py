"""The config of a run, of whichever kind its sections say."""

from typing import Any

from rebased.runs.lm_config import LMRunConfig
from rebased.runs.run_config import RunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig

KINDS: dict[str, type[RunConfig]] = {kind.section: kind for kind in (SyntheticRunConfig, LMRunConfig)}
"""All kinds of runs, by their sections."""


def run_kind(tree: Any) -> type[RunConfig]:
    """The kind of run whose section a config has. Without such a section, or with several, it counts as a run on a
    synthetic task."""
    sections = [section for section in KINDS if isinstance(tree, dict) and section in tree]
    return KINDS[sections[0] if len(sections) == 1 else "task"]


def parse_run(tree: Any) -> RunConfig:
    """The config that this mapping describes; pydantic's ValidationError where it describes none."""
    return run_kind(tree).model_validate(tree)
