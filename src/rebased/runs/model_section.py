"""The model section of a run's config: a preset and changes to it become a complete LMConfig."""

from collections.abc import Callable, Sequence
from typing import Any

from rebased.config import did_you_mean, merge
from rebased.models import LMConfig
from rebased.models.presets import check_heads, preset_to_change


def finish_model(value: Any, build: Callable[[Any], LMConfig], sizes: dict[str, Any]) -> LMConfig:
    """The complete LMConfig of a model section such as {preset: rebased, d_model: 64, mixers: {1: {n_heads: 4}}}.

    `build` validates the merged fields. `sizes` are the vocab_size, max_len and so on that the rest of the run needs;
    the section may override them.
    """
    if not isinstance(value, dict):
        return build(value)
    known = ["preset", "pattern", *LMConfig.model_fields]
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), known)}")
    patch = sizes | value
    base = LMConfig()
    if "preset" in patch:
        given = {key: patch[key] for key in ("d_model", "vocab_size", "max_len") if key in patch}
        typed = LMConfig.model_validate(given)
        base = preset_to_change(str(patch.pop("preset")), **{key: getattr(typed, key) for key in given})
    fields = base.model_dump() | {"mixers": [mixer.model_dump(exclude_unset=True) for mixer in base.mixers]}
    _reset_value_width(fields["mixers"], patch.get("mixers"))
    model = build(merge(fields, patch))
    if "preset" in value:
        check_heads(model)
    return model


def _reset_value_width(mixers: Sequence[dict[str, Any]], changes: Any) -> None:
    """Remove value_width of each mixer whose n_heads changes: its default, d_model // n_heads, then applies.

    A change that names value_width is merged later and wins.
    """
    if isinstance(changes, dict):
        for i, mixer in enumerate(mixers):
            change = changes.get(i, changes.get(str(i)))
            if isinstance(change, dict) and "n_heads" in change:
                mixer.pop("value_width", None)
