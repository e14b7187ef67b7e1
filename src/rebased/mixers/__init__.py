"""Sequence mixers: torch modules [B,T,D] -> [B,T,D] that never look ahead, and their register. Needs torch only."""

from rebased.mixers.attention import KVCache, SoftmaxAttention
from rebased.mixers.attention_maps import HasAttentionMap, HasSimilarity, attention_map, has_attention_map
from rebased.mixers.checks import (
    MixerFailed,
    call_extend,
    call_init_state,
    check_extended,
    check_mixer_causality,
    check_output,
    check_state_size,
    eval_mode,
    named_errors,
)
from rebased.mixers.contract import (
    CONTEXT,
    FACTORY,
    AttendsAt,
    Extendable,
    Isolating,
    can_extend,
    describe_mixer,
    find_residual_projections,
    mixer_class,
    mixer_name,
    mixer_names,
    register_mixer,
    rows_at,
    unwrap,
)
from rebased.mixers.delta import KDA, DeltaReBased, GatedDeltaNet
from rebased.mixers.documents import (
    ExtendsDocuments,
    extend_documents,
    forward_documents,
    positions_in_documents,
    start_numbers,
)
from rebased.mixers.gated import GatedBased, GatedLinearAttention, GatedReBased
from rebased.mixers.hyena import Hyena, HyenaState
from rebased.mixers.linear_recurrent import GLA, Mamba2
from rebased.mixers.mamba import Mamba, MambaState
from rebased.mixers.polynomial import PolynomialAttention
from rebased.mixers.previous_token import PreviousToken
from rebased.mixers.qk_norm import QKTransform
from rebased.mixers.rebased import Based, LinearAttention, ReBased
from rebased.mixers.recurrent import RecurrentMixer, RecurrentState
from rebased.mixers.rwkv import RWKV, RWKVState
from rebased.mixers.short_conv import ShortConv
from rebased.mixers.sliding_window import SlidingWindow, WindowCache
from rebased.mixers.slots import (
    FusedSlots,
    HasSlots,
    Slots,
    count_numbers,
    has_rows,
    init_slots,
    map_tensors,
    split_rows,
    tensors_of,
)
from rebased.mixers.wrapper import WrappedMixer, WrappedState, wrap

__all__ = [
    "CONTEXT",
    "FACTORY",
    "GLA",
    "KDA",
    "RWKV",
    "AttendsAt",
    "Based",
    "DeltaReBased",
    "Extendable",
    "ExtendsDocuments",
    "FusedSlots",
    "GatedBased",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedReBased",
    "HasAttentionMap",
    "HasSimilarity",
    "HasSlots",
    "Hyena",
    "HyenaState",
    "Isolating",
    "KVCache",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "MambaState",
    "MixerFailed",
    "PolynomialAttention",
    "PreviousToken",
    "QKTransform",
    "RWKVState",
    "ReBased",
    "RecurrentMixer",
    "RecurrentState",
    "ShortConv",
    "SlidingWindow",
    "Slots",
    "SoftmaxAttention",
    "WindowCache",
    "WrappedMixer",
    "WrappedState",
    "attention_map",
    "call_extend",
    "call_init_state",
    "can_extend",
    "check_extended",
    "check_mixer_causality",
    "check_output",
    "check_state_size",
    "count_numbers",
    "describe_mixer",
    "eval_mode",
    "extend_documents",
    "find_residual_projections",
    "forward_documents",
    "has_attention_map",
    "has_rows",
    "init_slots",
    "map_tensors",
    "mixer_class",
    "mixer_name",
    "mixer_names",
    "named_errors",
    "positions_in_documents",
    "register_mixer",
    "rows_at",
    "split_rows",
    "start_numbers",
    "tensors_of",
    "unwrap",
    "wrap",
]
