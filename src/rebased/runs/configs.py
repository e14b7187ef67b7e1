"""The config of a run, of whichever kind its sections say."""

from typing import Any

from rebased.runs import lm_config, synthetic_config  # noqa: F401, they register their kinds
from rebased.runs.run_config import KINDS, RunConfig, RunKind


def run_kind(tree: Any) -> RunKind:
    """The kind of run whose section a config has. Without such a section, or with several, it counts as a run on a
    synthetic task."""
    sections = [section for section in KINDS if isinstance(tree, dict) and section in tree]
    return KINDS[sections[0] if len(sections) == 1 else "task"]


def parse_run(tree: Any) -> RunConfig:
    """The config that this mapping describes; pydantic's ValidationError where it describes none."""
    return run_kind(tree).config_class.model_validate(tree)
