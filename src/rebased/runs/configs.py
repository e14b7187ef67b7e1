"""The config of a run, of whichever kind its sections say."""

from typing import Any

from rebased.runs.base_config import BaseRunConfig
from rebased.runs.lm_config import TextRunConfig
from rebased.runs.synthetic_config import RunConfig


def run_class(tree: Any) -> type[RunConfig] | type[TextRunConfig]:
    """The class of a run's config: a run with a section `data` trains on text, any other on a synthetic task."""
    is_text = isinstance(tree, dict) and "data" in tree and "task" not in tree
    return TextRunConfig if is_text else RunConfig


def parse_run(tree: Any) -> BaseRunConfig:
    """The config that this mapping describes; pydantic's ValidationError where it describes none."""
    return run_class(tree).model_validate(tree)
