"""Sequence mixers, [B,T,D] -> [B,T,D]. Needs torch alone."""

from rebased.mixers.attention import KVCache, SoftmaxAttention
from rebased.mixers.contract import (
    CONTEXT,
    Divisible,
    Earlier,
    Extendable,
    Isolating,
    can_divide,
    can_extend,
    count_numbers,
    mixer_class,
    mixer_name,
    mixer_names,
    register_mixer,
)
from rebased.mixers.documents import forward_documents, positions_in_documents
from rebased.mixers.hyena import Hyena, HyenaState
from rebased.mixers.mamba import Mamba, MambaState
from rebased.mixers.polynomial import Based, PolynomialAttention, QKTransform, ReBased
from rebased.mixers.rwkv import RWKV, RWKVState
from rebased.mixers.short_conv import ShortConv
from rebased.mixers.sliding_window import SlidingWindow, WindowCache

__all__ = [
    "CONTEXT",
    "RWKV",
    "Based",
    "Divisible",
    "Earlier",
    "Extendable",
    "Hyena",
    "HyenaState",
    "Isolating",
    "KVCache",
    "Mamba",
    "MambaState",
    "PolynomialAttention",
    "QKTransform",
    "RWKVState",
    "ReBased",
    "ShortConv",
    "SlidingWindow",
    "SoftmaxAttention",
    "WindowCache",
    "can_divide",
    "can_extend",
    "count_numbers",
    "forward_documents",
    "mixer_class",
    "mixer_name",
    "mixer_names",
    "positions_in_documents",
    "register_mixer",
]
