"""The config of a run, of whichever kind its sections say."""

from typing import Any

from rebased.runs.lm_config import LMRunConfig
from rebased.runs.run_config import RunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig


def run_class(tree: Any) -> type[SyntheticRunConfig] | type[LMRunConfig]:
    """The class of a run's config: a run with a section `data` trains on text, any other on a synthetic task."""
    is_text = isinstance(tree, dict) and "data" in tree and "task" not in tree
    return LMRunConfig if is_text else SyntheticRunConfig


def parse_run(tree: Any) -> RunConfig:
    """The config that this mapping describes; pydantic's ValidationError where it describes none."""
    return run_class(tree).model_validate(tree)
