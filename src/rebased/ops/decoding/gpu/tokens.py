# mypy: allow-untyped-defs
"""The beginning and the end of a decoding step on a GPU: tokens to features, and logits to the next tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import Errors, compare_calls
from rebased.ops.decoding import reference
from rebased.ops.kernel_launch import launch
from rebased.ops.self_check import checked

TILE = 4096  # logits that a program reads at a time
PROGRAMS = 1056  # that share the logits, at least: eight per multiprocessor
STAGES = tl.constexpr(3)  # tiles that are on their way
LEAST = tl.constexpr(-3e38)  # finite, so that the difference of two is not NaN
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def embed_kernel(
    tokens, table, positions, lengths, y, D, last,
    HAS_POSITIONS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y [S, D] = table[tokens] + positions[min(lengths, last)]; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < D
    out = tl.load(table + tl.load(tokens + row) * D + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_POSITIONS:
        place = tl.minimum(tl.load(lengths + row), last)
        out += tl.load(positions + place * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * D + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def scan_kernel(
    logits, seen, penalty, best, places, tops, totals, vocab, share, TILE: tl.constexpr
):  # fmt: skip
    """Of `share` logits of a row: the largest after the penalty and its place, the largest before it, sum of exp."""
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, vocab)
    factor = tl.load(penalty + row)
    columns = tl.arange(0, TILE)
    high = tl.full([TILE], -float("inf"), tl.float32)
    place = tl.full([TILE], 0, tl.int32)
    top = tl.full([TILE], LEAST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = start + columns
        mask = at < end
        x = tl.load(logits + row * vocab + at, mask=mask, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, x)
        total = total * tl.exp(top - new) + tl.exp(x - new)
        top = new
        known = tl.load(seen + row * vocab + at, mask=mask, other=0) != 0
        x = tl.where(known, tl.where(x > 0, x / factor, x * factor), x)
        better = x > high
        high = tl.where(better, x, high)
        place = tl.where(better, at, place)
    highest = tl.max(high, 0)
    largest = tl.max(top, 0)
    out = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + out, highest)
    tl.store(places + out, tl.min(tl.where(high == highest, place, NOWHERE), 0))
    tl.store(tops + out, largest)
    tl.store(totals + out, tl.sum(total * tl.exp(top - largest), 0))


@triton.jit
def gather_kernel(best, places, tops, totals, chosen, log_sums, count, COUNT: tl.constexpr):
    """The token and the log-sum of a row, from those of its `count` shares."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COUNT)
    mask = at < count
    high = tl.load(best + row * count + at, mask=mask, other=-float("inf"))
    place = tl.load(places + row * count + at, mask=mask, other=NOWHERE)
    top = tl.load(tops + row * count + at, mask=mask, other=LEAST)
    total = tl.load(totals + row * count + at, mask=mask, other=0.0)
    largest = tl.max(top, 0)
    tl.store(log_sums + row, largest + tl.log(tl.sum(total * tl.exp(top - largest), 0)))
    found = tl.min(tl.where(high == tl.max(high, 0), place, NOWHERE), 0)
    tl.store(chosen + row, tl.where(found == NOWHERE, 0, found).to(tl.int64))


@triton.jit
def advance_kernel(
    chosen, logits, log_sums, active, tokens, lengths, drawn, seen, logprobs, S, vocab, ROWS: tl.constexpr
):  # fmt: skip
    """Log-probabilities of the chosen tokens [S], which the active slots take."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = rows < S
    token = tl.load(chosen + rows, mask=mask, other=0)
    at = rows * vocab + token
    logit = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(logprobs + rows, logit - tl.load(log_sums + rows, mask=mask, other=0.0), mask=mask)
    on = mask & (tl.load(active + rows, mask=mask, other=0) != 0)
    tl.store(tokens + rows, token, mask=on)
    tl.store(lengths + rows, tl.load(lengths + rows, mask=on, other=0) + 1, mask=on)
    tl.store(drawn + rows, tl.load(drawn + rows, mask=on, other=0) + 1, mask=on)
    tl.store(seen + at, tl.full([ROWS], 1, tl.uint8), mask=on)


def _some_rows(args, results):
    """The same rows from tables without those that nobody asks for."""
    tokens, table, positions, lengths = args
    chosen, tokens = tokens.unique(return_inverse=True)
    if positions is not None:
        places, lengths = lengths.clamp(max=len(positions) - 1).unique(return_inverse=True)
        positions = positions[places]
    return (tokens, table[chosen], positions, lengths), results


@checked(reference.embed, sample=_some_rows)
def embed(tokens: Tensor, table: Tensor, positions: Tensor | None, lengths: Tensor) -> Tensor:
    """See api.embed_step."""
    D = table.shape[1]
    y = table.new_empty(len(tokens), D)
    width = triton.next_power_of_2(D)
    launch(
        embed_kernel, (len(tokens),),
        tokens, table, positions, lengths, y, D, 0 if positions is None else len(positions) - 1,
        HAS_POSITIONS=positions is not None, WIDTH=width, num_warps=max(1, min(8, width // 256)),
    )  # fmt: skip
    return y


def _compare_best(args, result) -> Errors:
    """Errors of log-sums, and of the chosen logits: of near ones another may be chosen."""
    chosen, log_sums = result

    def law(logits, seen, penalty):
        best, log_sums = reference.best(logits, seen, penalty)
        return log_sums, _penalised(logits, seen, penalty, best)

    logits, seen, penalty = args
    parts = [log_sums, _penalised(logits, seen, penalty, chosen)]
    return compare_calls(law, [(args, parts)], parts)


def _penalised(logits, seen, penalty, tokens):
    """Logits at these tokens [S] after the penalty, in fp32 or fp64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    at = tokens.unsqueeze(1)
    logit, known = logits.to(wide).gather(1, at).squeeze(1), seen.gather(1, at).squeeze(1)
    return torch.where(known, torch.where(logit > 0, logit / penalty, logit * penalty), logit)


@checked(reference.best, compare=_compare_best)
def best(logits: Tensor, seen: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """See api.best_tokens."""
    S, vocab = logits.shape
    shares = max(1, min(triton.cdiv(vocab, TILE), PROGRAMS // S))
    share = triton.cdiv(triton.cdiv(vocab, shares), TILE) * TILE
    shares = triton.cdiv(vocab, share)
    high, tops, totals = (torch.empty(S, shares, device=logits.device, dtype=torch.float32) for _ in range(3))
    places = torch.empty(S, shares, device=logits.device, dtype=torch.int32)
    launch(
        scan_kernel, (shares, S),
        logits.contiguous(), seen.view(torch.uint8), penalty, high, places, tops, totals, vocab, share,
        TILE=TILE, num_warps=8,
    )  # fmt: skip
    chosen = torch.empty(S, device=logits.device, dtype=torch.int64)
    log_sums = torch.empty(S, device=logits.device, dtype=torch.float32)
    launch(
        gather_kernel, (S,),
        high, places, tops, totals, chosen, log_sums, shares, COUNT=triton.next_power_of_2(shares), num_warps=1,
    )  # fmt: skip
    return chosen, log_sums


@checked(reference.advance_)
def advance_(
    chosen: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    active: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    drawn: Tensor,
    seen: Tensor,
) -> Tensor:
    """See api.advance_slots_."""
    S, vocab = logits.shape
    logprobs = torch.empty_like(log_sums)
    rows = min(256, triton.next_power_of_2(S))
    launch(
        advance_kernel, (triton.cdiv(S, rows),),
        chosen, logits, log_sums, active.view(torch.uint8), tokens, lengths, drawn, seen.view(torch.uint8), logprobs,
        S, vocab, ROWS=rows, num_warps=1, overwrites=(tokens, lengths, drawn, seen),
    )  # fmt: skip
    return logprobs
