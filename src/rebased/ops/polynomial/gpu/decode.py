"""One token of decoding, from the state alone: the state is read once and written once."""

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q, k, v, kv, z, kv_after, z_after, o, first, second, weights, g,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, g_batch, g_head,
    H, eps,
    F: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BF: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """o [B, H, V] and the state after one token: kv_after [B, H, F, V] and z_after [B, H, F]; one program per head.

    Feature f is x_first[f] x_second[f], where x_K means 1; `weights` [F] multiply it on the query side.
    GATED: the state fades by e^g first, g [B, H].
    """
    pid = tl.program_id(0)
    batch = (pid // H).to(tl.int64)
    h = (pid % H).to(tl.int64)
    q += batch * q_batch + h * q_head
    k += batch * k_batch + h * k_head
    columns = tl.arange(0, VP)
    inside = columns < V
    value = tl.load(v + batch * v_batch + h * v_head + columns, mask=inside, other=0.0).to(tl.float32)
    here = pid.to(tl.int64) * F
    acc = tl.zeros([VP], tl.float32)
    total = tl.zeros([BF], tl.float32)
    if GATED:
        fade = tl.exp(tl.load(g + batch * g_batch + h * g_head).to(tl.float32))
    for start in tl.range(0, F, BF, num_stages=STAGES):
        f = start + tl.arange(0, BF)
        known = f < F
        i = tl.load(first + f, mask=known, other=K)
        j = tl.load(second + f, mask=known, other=K)
        phi_k = tl.load(k + i, mask=known & (i < K), other=1.0).to(tl.float32)
        phi_k *= tl.load(k + j, mask=known & (j < K), other=1.0).to(tl.float32)
        phi_q = tl.load(q + i, mask=known & (i < K), other=1.0).to(tl.float32)
        phi_q *= tl.load(q + j, mask=known & (j < K), other=1.0).to(tl.float32)
        phi_q *= tl.load(weights + f, mask=known, other=0.0)
        at = (here + f)[:, None] * V + columns[None, :]
        mask = known[:, None] & inside[None, :]
        before = tl.load(kv + at, mask=mask, other=0.0)
        if GATED:
            before *= fade
        state = before + phi_k[:, None] * value[None, :]
        tl.store(kv_after + at, state, mask=mask)
        acc += tl.sum(phi_q[:, None] * state, 0)
        sums = tl.load(z + here + f, mask=known, other=0.0)
        if GATED:
            sums *= fade
        sums += phi_k
        tl.store(z_after + here + f, sums, mask=known)
        total += phi_q * sums
    out = acc / (tl.sum(total, 0) + eps)
    tl.store(o + pid.to(tl.int64) * V + columns, out.to(o.dtype.element_ty), mask=inside)
