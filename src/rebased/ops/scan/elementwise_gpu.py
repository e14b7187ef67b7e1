# mypy: allow-untyped-defs
"""The step size softplus(dt + bias) and the gate y silu(gate) on a GPU: one kernel each way for either.

With the gradients the step size is 5 passes over memory, 6 in plain torch, and the gate is 8 instead of 14.

They are not inside the scan's kernels, where they would be no pass and 3. There four lanes hold the same channel and
would all compute the same numbers: 56 more instructions a token forward and 153 backward, on 95 and 329. The scan is
slow because of instructions, not of bytes, so these would take longer than the passes that they save. That is an
estimate from a profile, not a measurement.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rebased.ops.comparison import differentiate, some_channels
from rebased.ops.kernel_launch import launch, strided_rows
from rebased.ops.self_check import checked

ROWS, CHANNELS, WARPS = 32, 64, 4  # per program; a row is one token of one sequence


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + z) with z = exp(-|x|), which is at most 1.

    log(1 + z) is z times a polynomial, with a relative error of 3e-8. The hardware's logarithm of a number near 1 has
    an absolute error, and step sizes are small. Above 20 the sum is x to the last bit, as in torch.
    """
    z = tl.exp2(tl.abs(x) * -1.4426950408889634)  # log2(e)
    p = 0.0052326943 * z - 0.0295052389
    p = p * z + 0.0782259521
    p = p * z - 0.136632458
    p = p * z + 0.191060068
    p = p * z - 0.248429822
    p = p * z + 0.333190968
    p = p * z - 0.499994931
    p = p * z + 0.99999997
    return tl.maximum(x, 0.0) + p * z


@triton.jit
def _locate(rows, D, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The rows [ROWS, 1] and channels [1, CHANNELS] of this program, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return row, channels, (row < rows) & (channels < D)


@triton.jit
def step_kernel(dt, bias, step, rows, D, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """step = softplus(dt + bias): dt and step [rows, D], bias [D]."""
    row, channels, mask = _locate(rows, D, ROWS, CHANNELS)
    x = tl.load(dt + row * D + channels, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + channels, mask=channels < D, other=0.0)
    tl.store(step + row * D + channels, _softplus(x), mask=mask)


@triton.jit
def step_backward_kernel(dt, bias, dstep, ddt, sums, rows, D, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """ddt [rows, D], and sums [rows/ROWS, D]: the share of each program's rows in the gradient of bias."""
    row, channels, mask = _locate(rows, D, ROWS, CHANNELS)
    x = tl.load(dt + row * D + channels, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + channels, mask=channels < D, other=0.0)
    dx = tl.load(dstep + row * D + channels, mask=mask, other=0.0) * tl.sigmoid(x)
    tl.store(ddt + row * D + channels, dx.to(ddt.dtype.element_ty), mask=mask)
    tl.store(sums + tl.program_id(0) * D + channels, tl.sum(dx, 0)[None, :], mask=channels < D)


@triton.jit
def gate_kernel(y, gate, out, rows, D, stride, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """out = y silu(gate): y, gate and out [rows, D]. stride: the distance of two rows of gate in memory."""
    row, channels, mask = _locate(rows, D, ROWS, CHANNELS)
    a = tl.load(y + row * D + channels, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * stride + channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + channels, (a * x * tl.sigmoid(x)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward_kernel(y, gate, dout, dy, dgate, rows, D, stride, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """dy and dgate [rows, D]. The slope of silu is s + silu (1 - s), where s is the logistic function of the gate."""
    row, channels, mask = _locate(rows, D, ROWS, CHANNELS)
    a = tl.load(y + row * D + channels, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * stride + channels, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dout + row * D + channels, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(x)
    silu = x * s
    tl.store(dy + row * D + channels, (d * silu).to(dy.dtype.element_ty), mask=mask)
    tl.store(dgate + row * D + channels, (d * a * (s + silu * (1 - s))).to(dgate.dtype.element_ty), mask=mask)


def _launch(kernel, tensors: list[Tensor], *numbers: int) -> None:
    """Launches a kernel over the rows of the first tensor [B, T, D]. numbers: those that follow D."""
    batch, T, D = tensors[0].shape
    grid = (triton.cdiv(batch * T, ROWS), triton.cdiv(D, CHANNELS))
    launch(kernel, grid, *tensors, batch * T, D, *numbers, ROWS=ROWS, CHANNELS=CHANNELS, num_warps=WARPS)


def _step_in_torch(dt, bias):
    """As _step."""
    return functional.softplus(dt.to(bias.dtype) + bias)


def _step_backward_in_torch(dt, bias, dstep):
    """As _step_backward."""
    return tuple(differentiate(_step_in_torch, (dt, bias), dstep))


def _gate_in_torch(y, gate):
    """As _gate."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.to(wide) * functional.silu(gate.to(wide))).to(y.dtype)


def _gate_backward_in_torch(y, gate, dout):
    """As _gate_backward."""
    return tuple(differentiate(_gate_in_torch, (y, gate), dout))


@torch.library.custom_op("rebased::step_size", mutates_args=())
@checked(_step_in_torch, sample=some_channels)
def _step(dt: Tensor, bias: Tensor) -> Tensor:
    """softplus(dt + bias) in fp32: dt [B, T, D], bias [D] in fp32."""
    step = torch.empty_like(dt, dtype=torch.float32)
    _launch(step_kernel, [dt, bias, step])
    return step


@_step.register_fake
def _(dt, bias):
    return torch.empty_like(dt, dtype=torch.float32)


@torch.library.custom_op("rebased::step_size_backward", mutates_args=())
@checked(_step_backward_in_torch, sample=some_channels)
def _step_backward(dt: Tensor, bias: Tensor, dstep: Tensor) -> tuple[Tensor, Tensor]:
    ddt = torch.empty_like(dt)
    sums = bias.new_empty(triton.cdiv(dt.shape[0] * dt.shape[1], ROWS), len(bias))
    _launch(step_backward_kernel, [dt, bias, dstep, ddt, sums])
    return ddt, sums.sum(0)


@_step_backward.register_fake
def _(dt, bias, dstep):
    return torch.empty_like(dt), torch.empty_like(bias)


def _step_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _step_autograd(ctx, dstep):
    return _step_backward(*ctx.saved_tensors, dstep.contiguous())


_step.register_autograd(_step_autograd, setup_context=_step_setup)


@torch.library.custom_op("rebased::gate", mutates_args=())
@checked(_gate_in_torch, sample=some_channels)
def _gate(y: Tensor, gate: Tensor) -> Tensor:
    """y silu(gate) in the dtype of y: both [B, T, D]."""
    out = torch.empty_like(y)
    rows, stride = strided_rows(gate)
    _launch(gate_kernel, [y, rows, out], stride)
    return out


@_gate.register_fake
def _(y, gate):
    return torch.empty_like(y)


@torch.library.custom_op("rebased::gate_backward", mutates_args=())
@checked(_gate_backward_in_torch, sample=some_channels)
def _gate_backward(y: Tensor, gate: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    dy, dgate = torch.empty_like(y), torch.empty_like(gate, memory_format=torch.contiguous_format)
    rows, stride = strided_rows(gate)
    _launch(gate_backward_kernel, [y, rows, dout, dy, dgate], stride)
    return dy, dgate


@_gate_backward.register_fake
def _(y, gate, dout):
    return torch.empty_like(y), torch.empty_like(gate, memory_format=torch.contiguous_format)


def _gate_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gate_autograd(ctx, dout):
    return _gate_backward(*ctx.saved_tensors, dout.contiguous())


_gate.register_autograd(_gate_autograd, setup_context=_gate_setup)


def step_size(dt: Tensor, bias: Tensor) -> Tensor:
    """softplus(dt + bias) in fp32: dt [B, T, D], bias [D]."""
    return _step(dt.contiguous(), bias.float())


def apply_gate(y: Tensor, gate: Tensor) -> Tensor:
    """y silu(gate) in the dtype of y, computed in fp32: y [B, T, D]; the rows of gate [B, T, D] may be strided."""
    return _gate(y, gate)
