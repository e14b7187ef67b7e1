"""The config of a language model: everything that decides its parameters and what it computes."""

import inspect
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, create_model, model_validator
from torch import nn

from rebased.config import Config, check_added_later, short
from rebased.mixers import CONTEXT, FACTORY, mixer_class
from rebased.mixers.checks import is_own
from rebased.mixers.wrapper import OPTIONS


class MixerConfig(Config):
    """A mixer's name and the arguments of its constructor.

    Each mixer has a subclass with its own fields. `mixer_schema` makes it from the constructor's signature, so a new
    mixer needs no config class.
    """

    around: ClassVar[tuple[str, ...]] = ()
    """Fields that are no arguments of the constructor: options that every mixer can have (mixers/wrapper.py)."""

    name: str

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the mixer's constructor."""
        return {key: value for key, value in self if key not in ("name", *self.around)}

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `wrap`."""
        return {key: getattr(self, key) for key in self.around}

    def chosen_options(self) -> dict[str, Any]:
        """Return those of these options that do not have their defaults; empty if nothing is around the mixer."""
        return {key: value for key, value in self.options().items() if value != OPTIONS[key][1]}


@cache  # one class per mixer: configs of two classes are never equal
def mixer_schema(name: str, cls: type[nn.Module]) -> type[MixerConfig]:
    """Return the config class of a registered mixer: its constructor's arguments with their types and defaults.

    Arguments that the model fills in (CONTEXT, FACTORY) are no fields. Options that the mixer does not have itself are.
    """
    fields: dict[str, Any] = {"name": (Literal[name], name)}
    for parameter in inspect.signature(cls, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"mixer {name!r} takes *{parameter.name}; name every argument, so that a misspelt one is found"
            )
        if parameter.name not in (*CONTEXT, *FACTORY):
            kind = Any if parameter.annotation is parameter.empty else parameter.annotation
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (kind, default)
    around = tuple(key for key in OPTIONS if key not in (*fields, *getattr(cls, "built_in", ())))
    for key in around:
        kind, default, meaning = OPTIONS[key]
        fields[key] = (kind, Field(default, description=meaning))
    schema = create_model(f"{name}Config", __base__=MixerConfig, **fields)
    schema.around, schema.added_later = around, (*getattr(cls, "added_later", ()), *around)
    check_added_later(schema)
    return schema


def _parse_mixer(value: Any) -> Any:
    """Return the config of a mixer given as a name, a mapping with a name, or a config already."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, MixerConfig):
        value = value.model_dump()
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(
            f"a mixer is a name, or a mapping with one ({{name: rebased, n_heads: 8}}); got {short(value)}"
        )
    cls = mixer_class(value["name"])
    return mixer_schema(value["name"], cls).model_validate(value)  # type: ignore[arg-type]  # classes are hashable


AnyMixer = Annotated[SerializeAsAny[MixerConfig], BeforeValidator(_parse_mixer)]


def _repeated(mixers: Any, pattern: str) -> list[Any]:
    """Return the mixers of a pattern: [a, b] and "3:1" give [a, a, a, b]."""
    counts = [int(n) if n.isdecimal() and len(n) < 6 else 0 for n in pattern.split(":")]
    if 0 in counts or not isinstance(mixers, list | tuple) or len(counts) != len(mixers):
        raise ValueError(
            f"pattern {short(pattern)} is not one number per mixer, such as 3:1; mixers is {short(mixers)}"
        )
    return [mixer for mixer, n in zip(mixers, counts, strict=True) for _ in range(n)]


class LMConfig(Config):
    """The config of a LanguageModel: everything that decides its parameters and what it computes. Frozen.

    Args:
        vocab_size: number of tokens, at least 2. Default 8,192.
        d_model: width D of the residual stream. Default 128.
        n_layers: number of layers (blocks), at most 10,000. Default 2.
        max_len: number of learned positions, the longest sequence the model takes. Default 256. Without positions it
            bounds nothing but mixers that are built for a length (Hyena).
        mixers: the mixers of the layers from first to last, repeated until there are n_layers. Each is a name
            ("rebased"; rebased.mixer_names() lists them) or a mapping with a name and arguments of the mixer's
            constructor ({"name": "rebased", "n_heads": 8}). Default ("short_conv", "rebased").
        pattern: how often each of `mixers` follows itself, such as "3:1" for a hybrid: three layers of the first, one
            of the second, and so on. The config keeps the mixers that come of it.
        mlp_ratio: hidden width of the MLP divided by d_model. Default 0: no MLP, as in the paper's MQAR models.
        mlp: "gelu" (default): two linear layers with biases. "swiglu": W2 (silu(W1 x) * W3 x) without biases; its
            hidden width is two thirds of mlp_ratio * d_model, up to a multiple of 8, so it has as many weights.
        block: "double_norm" (default): two norms and residuals per layer. "mamba": one RMSNorm and residual.
        norm: "layer" (default): LayerNorm. "rms": RMSNorm, which has no mean and no bias.
        embed_dropout: dropout of the sum of token and position embeddings, in [0, 1). Default 0.1.
        positions: "learned" (default): an embedding per position is added to that of the token. "none": nothing is
            added. Mixers must then see the order themselves, as short convolutions do, and sequences may be of any
            length.
        readout: "each" (default): the logits of a position are those of its features. "last": a small decoder tells all
            positions from the features of the last one (the task `compression`). Such a model does not generate.

    Example:
        >>> config = LMConfig(d_model=96, n_layers=4, mixers=("short_conv", {"name": "rebased", "n_heads": 8}))
        >>> model = LanguageModel(config)
    """

    added_later: ClassVar[tuple[str, ...]] = ("positions", "readout", "norm", "mlp")

    vocab_size: int = Field(8192, ge=2)
    d_model: int = Field(128, ge=1)
    n_layers: int = Field(2, ge=1, le=10_000)
    max_len: int = Field(256, ge=1)
    mixers: tuple[AnyMixer, ...] = Field(("short_conv", "rebased"), validate_default=True)
    mlp_ratio: int = Field(0, ge=0)
    mlp: Literal["gelu", "swiglu"] = "gelu"
    block: Literal["double_norm", "mamba"] = "double_norm"
    norm: Literal["layer", "rms"] = "layer"
    embed_dropout: float = Field(0.1, ge=0, lt=1)
    positions: Literal["learned", "none"] = "learned"
    readout: Literal["each", "last"] = "each"

    @model_validator(mode="before")
    @classmethod
    def _repeat_mixers(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "pattern" not in values:
            return values
        rest = {key: value for key, value in values.items() if key != "pattern"}
        mixers = rest.get("mixers", cls.model_fields["mixers"].default)
        return rest | {"mixers": _repeated(mixers, str(values["pattern"]))}

    @model_validator(mode="after")
    def _pattern_fits(self) -> "LMConfig":
        if not self.mixers:
            raise ValueError("mixers is empty; name at least one, for example [short_conv, rebased]")
        if len(self.mixers) > self.n_layers:
            raise ValueError(f"{len(self.mixers)} mixers do not fit into {self.n_layers} layers; raise n_layers")
        if self.block == "mamba" and self.mlp_ratio:
            raise ValueError(f"Mamba's block has no MLP; set mlp_ratio to 0 (it is {self.mlp_ratio}) or another block")
        return self

    @property
    def length_limit(self) -> int | None:
        """The longest sequence that the model takes: max_len, or None if nothing bounds it.

        Learned positions bound it, and so do mixers that are built for a length, such as Hyena.
        """
        signatures = (inspect.signature(mixer_class(name)) for name in {mixer.name for mixer in self.mixers})
        is_bounded = self.positions == "learned" or any("max_len" in each.parameters for each in signatures)
        return self.max_len if is_bounded else None

    def own_mixers(self) -> dict[str, type[nn.Module]]:
        """Return the classes of a user's own mixers, by name."""
        classes = {mixer.name: mixer_class(mixer.name) for mixer in self.mixers}
        return {name: cls for name, cls in classes.items() if is_own(cls)}

    def own_modules(self) -> list[str]:
        """Return the modules of a user's own mixers, which whoever loads the model imports first.

        `imported_my` is my.py, given with --import. "my_mixers" stands for a script or a notebook.
        """
        own = {cls.__module__.removeprefix("imported_") for cls in self.own_mixers().values()}
        return sorted("my_mixers" if module == "__main__" else module for module in own)

    def mixer_of(self, layer: int) -> MixerConfig:
        """Return the config of this layer's mixer (from 0): `mixers` is repeated over the layers."""
        return self.mixers[layer % len(self.mixers)]
