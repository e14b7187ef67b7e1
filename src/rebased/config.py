"""The base of every config: typed, frozen, and strict about its keys."""

import difflib
import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def did_you_mean(word: str, known: list[str]) -> str:
    """How to end an error about an unknown word: the nearest known one, or all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


class Config(BaseModel):
    """A config is finished before step 0 and never rewritten; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), list(cls.model_fields))}")
        return values

    def digest(self) -> str:
        """Twelve hex digits that name this config: equal configs, and only those, share them."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]
