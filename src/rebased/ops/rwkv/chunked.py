"""WKV in plain torch: all tokens at once, in log depth."""

import torch
from torch import Tensor

from rebased.ops.linear_scan import linear_scan
from rebased.ops.rwkv.reference import output
from rebased.ops.rwkv.state import WKVState


def scan(k: Tensor, v: Tensor, rate: Tensor, u: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    """As reference.scan."""
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [T, B, D]
    m, sums = running_sums(k, torch.stack([v, torch.ones_like(v)], dim=-1), rate.expand(len(k), 1, -1), state)
    num = torch.cat([state.num.unsqueeze(0), sums[..., 0]])  # [T+1, B, D]: before the first token, and after each
    den = torch.cat([state.den.unsqueeze(0), sums[..., 1]])
    y = output(num[:-1], den[:-1], m[:-1], k, v, u)
    return y.transpose(0, 1), WKVState(num[-1], den[-1], m[-1])


def running_sums(exponents: Tensor, terms: Tensor, fade: Tensor, state: WKVState) -> tuple[Tensor, Tensor]:
    """All s_t = e^-fade_t s_{t-1} + e^exponents_t terms_t after a state, in log depth and scaled by e^-m.

    exponents [T, B, D], terms [T, B, D, 2], fade [T, 1, D] -> m [T+1, B, D] (before the first token, and after each)
    and s [T, B, D, 2].
    """
    with torch.no_grad():
        m = torch.cat([state.max.unsqueeze(0), exponents])
        _running_max_(m, torch.cat([fade[:1], fade]))
    # In this order: m - fade was rounded when it became the next m, and the sums must get back what rounding took.
    old, new = (m[:-1] - m[1:]) - fade, torch.exp(exponents - m[1:])
    start = torch.stack([state.num, state.den], dim=-1)
    return m, linear_scan(old.unsqueeze(-1), new.unsqueeze(-1) * terms, start)


def _running_max_(m: Tensor, fade: Tensor) -> None:
    """In place: m_t <- max(m_t, m_{t-1} - fade_t), in log depth as `linear_scan.scan_`."""
    T = len(m)
    if T == 1:
        return
    even = T // 2 * 2
    seconds = m[1:even:2]
    seconds.clamp_min_(m[0:even:2] - fade[1:even:2])
    _running_max_(seconds, fade[1:even:2] + fade[0:even:2])
    m[2::2].clamp_min_(m[1 : T - 1 : 2] - fade[2::2])
