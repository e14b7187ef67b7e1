"""The long convolution by FFT against the direct sum, and the short one against torch's."""

import pytest
import torch
from torch.nn import functional

from rebased.ops import long_conv, long_conv_extend, short_conv, short_conv_extend
from tolerances import assert_near


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "taps"), [(1, 1), (2, 5), (16, 16), (37, 64)])
def test_fft_is_the_direct_sum(T: int, taps: int, dtype: torch.dtype) -> None:
    inputs = [torch.randn(2, T, 3), torch.randn(taps, 3), torch.randn(3)]
    weights, results = torch.randn(2, T, 3), []
    for backend, kind in (("chunked", dtype), ("reference", torch.float64)):
        leaves = [each.to(dtype).to(kind).requires_grad_() for each in inputs]
        y = long_conv(*leaves, backend=backend)  # type: ignore[arg-type]
        results.append([y.detach(), *torch.autograd.grad((y * weights.to(dtype).to(kind)).sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype
        assert_near(actual, expected, T + taps)


def test_is_its_formula() -> None:
    x, taps = torch.randn(1, 5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for t in range(5):
        expected = sum(taps[t - s] * x[:, s] for s in range(t + 1))
        assert_near(long_conv(x, taps)[:, t], expected, 10, size=1.0)  # an FFT is off by its largest number


def test_65536_tokens_in_fp32() -> None:
    """An FFT of 131,072 numbers is 17 sums of two, one after the other."""
    x, taps = torch.randn(1, 65_536, 2), torch.exp(-torch.arange(65_536.0) / 2e4).unsqueeze(1) * torch.randn(65_536, 2)
    assert_near(long_conv(x, taps), long_conv(x.double(), taps.double()), *[2] * 17)


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6]])
def test_any_split_gives_the_same(pieces: list[int]) -> None:
    x, taps, skip = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 12, 3), (12, 3), (3,)))
    past, outputs = x[:, :0], []
    for piece in x.split(pieces, dim=1):
        y, past = long_conv_extend(piece, taps, skip, past)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), long_conv(x, taps, skip), 12)
    assert torch.equal(past, x)


def test_wrong_inputs_are_named() -> None:
    x, taps = torch.randn(2, 9, 3), torch.randn(8, 3)
    with pytest.raises(ValueError, match=r"9 tokens are more than the filter's 8 taps; .* at least 9"):
        long_conv(x, taps)
    with pytest.raises(ValueError, match="9 tokens are more than the filter's 8 taps"):
        long_conv_extend(x[:, 8:], taps, None, x[:, :8])
    with pytest.raises(ValueError, match=r"taps \[L,D\]; they are"):
        long_conv(x, taps.T)
    with pytest.raises(ValueError, match=r"another shape: \[1, 4, 3\]"):
        long_conv_extend(x, taps, None, x[:1, :4])
    with pytest.raises(ValueError, match=r"needs weight \[3, 4\] and state \[2, 3, 3\]"):
        short_conv_extend(x, torch.randn(3, 4), None, x[:, :2])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 3, 20])
def test_short_conv_is_torchs_with_gradients(T: int, width: int) -> None:
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, T, 3), (3, width), (3,))]
    x, weight, bias = inputs
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    expected = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=3).transpose(1, 2)
    actual, weights = short_conv(x, weight, bias), torch.randn(2, T, 3, dtype=torch.float64)
    assert_near(actual, expected, width)
    for a, e in zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (actual, expected)), strict=True):
        assert_near(a, e, 2 * T)


@pytest.mark.gpu
def test_fft_on_a_gpu() -> None:
    x, taps = torch.randn(8, 2048, 64, device="cuda"), torch.randn(2048, 64, device="cuda")
    assert_near(long_conv(x, taps), long_conv(x.double(), taps.double()), *[2] * 12)
