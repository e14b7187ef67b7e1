"""The config of a run, of whichever kind its sections say."""

from typing import Any

from rebased.runs import lm_config, synthetic_config  # noqa: F401, they register their kinds
from rebased.runs.run_config import KINDS, RunConfig


def parse_run(tree: Any) -> RunConfig:
    """The config that this mapping describes, of the kind whose section it has; pydantic's ValidationError where it
    describes none. A mapping without any such section, or with several, counts as a run on a synthetic task."""
    sections = [section for section in KINDS if isinstance(tree, dict) and section in tree]
    return KINDS[sections[0] if len(sections) == 1 else "task"].config_class.model_validate(tree)
