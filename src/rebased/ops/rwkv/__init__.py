"""WKV, the recurrence of RWKV-4."""

from rebased.ops.rwkv.api import wkv, wkv_extend
from rebased.ops.rwkv.state import WKVState, init_wkv_state

__all__ = ["WKVState", "init_wkv_state", "wkv", "wkv_extend"]
