"""Sequence mixers, [B,T,D] -> [B,T,D]. Needs torch alone."""

from rebased.mixers.attention import KVCache, SoftmaxAttention
from rebased.mixers.contract import (
    CONTEXT,
    Extendable,
    can_extend,
    count_numbers,
    mixer_class,
    mixer_name,
    mixer_names,
    register_mixer,
)
from rebased.mixers.polynomial import Based, PolynomialAttention, QKTransform, ReBased
from rebased.mixers.short_conv import ShortConv

__all__ = [
    "CONTEXT",
    "Based",
    "Extendable",
    "KVCache",
    "PolynomialAttention",
    "QKTransform",
    "ReBased",
    "ShortConv",
    "SoftmaxAttention",
    "can_extend",
    "count_numbers",
    "mixer_class",
    "mixer_name",
    "mixer_names",
    "register_mixer",
]
