"""The model section of a run's config: a preset and what is said beside it, made into a whole LMConfig."""

from collections.abc import Callable, Sequence
from typing import Any

from rebased.config import did_you_mean, merge
from rebased.models import LMConfig
from rebased.models.presets import check_heads, preset_to_change


def finish_model(value: Any, build: Callable[[Any], LMConfig], sizes: dict[str, int]) -> LMConfig:
    """{preset: rebased, d_model: 64, mixers: {1: {n_heads: 4}}} -> the whole LMConfig, which `build` makes.

    `sizes` are what the rest of the run asks of the model (vocab_size, max_len), unless the section says otherwise.
    """
    if not isinstance(value, dict):
        return build(value)
    known = ["preset", *LMConfig.model_fields]
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), known)}")
    patch = sizes | value
    base = LMConfig()
    if "preset" in patch:
        given = {key: patch[key] for key in ("d_model", "vocab_size", "max_len") if key in patch}
        typed = LMConfig.model_validate(given)
        base = preset_to_change(str(patch.pop("preset")), **{key: getattr(typed, key) for key in given})
    fields = base.model_dump()
    _share_width_anew(fields["mixers"], patch.get("mixers"))
    model = build(merge(fields, patch))
    if "preset" in value:
        check_heads(model)
    return model


def _share_width_anew(mixers: Sequence[dict[str, Any]], changes: Any) -> None:
    """Other heads than a preset's are d_model // n_heads wide, unless the change says how wide."""
    if isinstance(changes, dict):
        for i, mixer in enumerate(mixers):
            change = changes.get(i, changes.get(str(i)))
            if "value_width" in mixer and isinstance(change, dict) and "n_heads" in change:
                mixer["value_width"] = None
