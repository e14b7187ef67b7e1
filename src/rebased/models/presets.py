"""The paper's models by name, as configs."""

import logging
from typing import Any

from rebased.config import did_you_mean
from rebased.models.config import LMConfig

_log = logging.getLogger("rebased")

HEADS, KEY_WIDTH = 12, 16  # of Based and ReBased at every width of the paper's Figure 1
_LINEAR = ("rebased", "based", "linear_attention")


_MQAR: dict[str, tuple[str, ...]] = {
    "rebased": ("short_conv", "rebased"),
    "based": ("short_conv", "based"),
    "conv_attention": ("short_conv", "attention"),
    "attention": ("attention", "attention"),
    "rwkv": ("rwkv", "rwkv"),
    "conv_rwkv": ("short_conv", "rwkv"),
    "mamba": ("mamba", "mamba"),
    "hyena": ("hyena", "hyena"),
    "conv_sliding": ("short_conv", "sliding_window"),  # not in the paper: shows what a window of 64 recalls
    "linear_attention": ("short_conv", "linear_attention"),  # not in the paper: shows what degree 1 recalls
}

_LM = {"paper-text": (12, 16), "paper-checkpoint": (8, 128)}  # heads x key width of the 18-layer language models

MODERN_MODEL: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "positions": "none"}
MODERN_ATTENTION = {"qkv_bias": False, "out_bias": False, "qk_norm": True, "rotary": True, "dropout": 0.0}


def mqar_preset_names() -> list[str]:
    """Return the names of the MQAR presets."""
    return list(_MQAR)


def preset_names() -> list[str]:
    """Return the names of all presets: the MQAR models, then the language models ("lm-...")."""
    published = (f"lm-{name}-{mixer}" for name in _LM for mixer in ("rebased", "based"))
    return [*_MQAR, *published, "lm-attention", "lm-modern"]


def preset(
    name: str, *, d_model: int | None = None, vocab_size: int | None = None, max_len: int | None = None
) -> LMConfig:
    """Return the config of a model of the paper: an MQAR model or a language model of Table 9; or of "lm-modern".

    Args:
        name: one of preset_names(). MQAR models have two layers and no MLP; "lm-..." models have 12 or 18 layers.
            "lm-modern" is the Transformer of today: RMSNorm, rotary positions, norms of q and k, SwiGLU, no biases.
        d_model: width D. Default 128 (MQAR) or 768 (lm).
        vocab_size: number of tokens. Default 8,192 (MQAR) or 50,304 (lm).
        max_len: longest sequence. Default 256 (MQAR) or 4,096 (lm).

    Example:
        >>> model = LanguageModel(preset("rebased", d_model=96))
    """
    config = preset_to_change(name, d_model=d_model, vocab_size=vocab_size, max_len=max_len)
    check_heads(config)
    return config


def check_heads(config: LMConfig) -> None:
    """Log a warning if n_heads * value_width is not d_model, as often with the paper's 12 heads."""
    for mixer in config.mixers:
        arguments = mixer.arguments()
        n_heads, value_width = arguments.get("n_heads"), arguments.get("value_width")
        if n_heads is None or value_width is None:
            continue
        if value_width < 1:
            raise ValueError(
                f"d_model {config.d_model} is below the {n_heads} heads of the paper's {mixer.name!r}; "
                f"choose at least {n_heads}, or fewer heads"
            )
        if n_heads * value_width != config.d_model:
            _log.warning(
                "d_model %d is not divisible by %d heads: as in the paper, values are %d x %d = %d wide",
                *(config.d_model, n_heads, n_heads, value_width, n_heads * value_width),
            )


def preset_to_change(
    name: str, *, d_model: int | None = None, vocab_size: int | None = None, max_len: int | None = None
) -> LMConfig:
    """Return `preset(...)` without its warning, for callers that change heads first and call `check_heads` after."""
    mixers: list[Any]
    if name in _MQAR:
        d_model, vocab_size, max_len = d_model or 128, vocab_size or 8192, max_len or 256
        sizes = {"n_heads": HEADS, "key_width": KEY_WIDTH, "value_width": d_model // HEADS}
        mixers = [{"name": mixer, **sizes} if mixer in _LINEAR else mixer for mixer in _MQAR[name]]
        shape: dict[str, Any] = {"n_layers": 2}
        if name == "mamba":
            shape |= {"block": "mamba", "embed_dropout": 0.0}
    elif name in preset_names():
        d_model, vocab_size, max_len = d_model or 768, vocab_size or 50304, max_len or 4096
        shape = {"n_layers": 12, "mlp_ratio": 4, "embed_dropout": 0.0}
        if name == "lm-modern":
            mixers = [{"name": "attention", "n_heads": 12, **MODERN_ATTENTION}]
            shape |= MODERN_MODEL
        elif name == "lm-attention":
            mixers = [{"name": "attention", "n_heads": 12, "qkv_bias": False, "dropout": 0.0}]
        else:
            family, _, mixer = name.removeprefix("lm-").rpartition("-")
            n_heads, key_width = _LM[family]
            mixers = ["short_conv", {"name": mixer, "n_heads": n_heads, "key_width": key_width}]
            shape["n_layers"] = 18
    else:
        raise ValueError(f"unknown preset {name!r}; {did_you_mean(name, preset_names())}")
    return LMConfig(vocab_size=vocab_size, d_model=d_model, max_len=max_len, mixers=tuple(mixers), **shape)
