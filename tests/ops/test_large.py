"""Sequences of 2**31 numbers and more: kernels that compute offsets in 32 bits refuse them, or are not chosen."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rebased.ops import (
    WKVState,
    selective_scan_extend,
    short_conv_extend,
    token_shift,
    use_backend,
    wkv_extend,
)
from rebased.ops.backend import kernel_path

T, D = 2**20, 2**11


def zeros(*shape: int) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros(1).expand(shape)


def convolution() -> None:
    short_conv_extend(zeros(1, T, D), zeros(D, 3), None, zeros(1, 2, D), backend="triton")


def strided_convolution() -> None:
    x = torch.zeros(1).as_strided((1, 1, 8), (0, 2**31, 0)).expand(1, 1, 8)
    short_conv_extend(x, zeros(8, 3), None, zeros(1, 2, 8), backend="triton")


def shift() -> None:
    token_shift(zeros(1, T, D), zeros(1, D), zeros(3, D), backend="triton")


def average() -> None:
    state = WKVState(zeros(1, D), zeros(1, D), zeros(1, D))
    wkv_extend(zeros(1, T, D), zeros(1, T, D), zeros(D), zeros(D), state, backend="triton")


def scan(width: int = D, states: int = 16) -> None:
    x, B = zeros(1, T, width), zeros(1, T, states)
    selective_scan_extend(x, x, zeros(width, states), B, B, None, zeros(1, width, states), backend="triton")


def scan_of_many_states() -> None:
    scan(D // 4, 64)


@pytest.mark.parametrize("call", [convolution, strided_convolution, shift, average, scan, scan_of_many_states])
def test_kernels_refuse_them(call: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 numbers; this one has 2,147,483,648 .*backend='chunked'"):
        call()


def test_auto_chooses_another_path() -> None:
    with use_backend("triton"):
        assert kernel_path("auto", torch.zeros(1), offset=2**31) == "chunked"
        with pytest.raises(ValueError, match="need CUDA tensors"):  # this path would be the kernels'
            kernel_path("auto", torch.zeros(1), offset=2**31 - 1)
