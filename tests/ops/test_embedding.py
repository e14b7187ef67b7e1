"""Rows of a table: torch's own on a CPU; the kernels built for GPUs that are not here and run on one."""

import subprocess
import sys

import pytest
import torch

from ops.builds import BUILDS, KernelLaunches
from ops.embedding_cases import assert_adds_positions, assert_is_the_law, mostly_filler
from rebased.kernels.machine_code import compile_launch
from rebased.ops import embed, use_backend


def test_on_a_cpu() -> None:
    assert_is_the_law(mostly_filler((5, 13), 11), 11, 6)
    assert_adds_positions(mostly_filler((5, 13), 11), 11, 6)


def test_positions_of_another_length() -> None:
    with pytest.raises(
        ValueError, match=r"positions must be \[3, 4\], a row for each position; their shape is \[1, 4\]"
    ):
        embed(torch.zeros(2, 3, dtype=torch.int64), torch.randn(5, 4), torch.randn(1, 4))


@pytest.mark.recorded("embedding", keep=0)
@pytest.mark.parametrize(("capability", "dtype"), BUILDS)
def test_every_kernel_builds(capability: int, dtype: torch.dtype, kernel_launches: KernelLaunches) -> None:
    from rebased.ops.embedding import gpu

    launches = kernel_launches(gpu)
    with use_backend("triton"):
        for D in (64, 100, 4096):
            weight, positions = (torch.randn(n, D).to(dtype).requires_grad_() for n in (5, 8))
            embed(mostly_filler((2, 8), 5), weight, positions).sum().backward()
            embed(mostly_filler((2, 8), 5), weight)
    assert len(launches) == 12
    asserting = 0
    for launch in launches:
        compiled = compile_launch(launch, capability)
        assert compiled.metadata.shared <= 32 * 1024  # for sums over rows
        asserting += "__assertfail" in compiled.asm["ptx"]
    assert asserting == 6  # all that read rows: a token that is not in the vocabulary stops the device


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "vocab", "D"), [((512, 256), 8192, 64), ((3, 1001), 50_304, 768), ((64, 2048), 7, 100)]
)
def test_on_a_gpu(shape: tuple[int, ...], vocab: int, D: int) -> None:
    tokens = mostly_filler(shape, vocab, device="cuda")
    assert_is_the_law(tokens, vocab, D)
    assert_adds_positions(tokens, vocab, D)
    assert_adds_positions(tokens.int(), vocab, D, torch.bfloat16)


@pytest.mark.gpu
def test_the_same_sum_every_time() -> None:
    tokens = mostly_filler((512, 256), 8192, device="cuda")
    weight = torch.randn(8192, 64, device="cuda", requires_grad=True)
    dy = torch.randn(512, 256, 64, device="cuda")
    first, second = (torch.autograd.grad(embed(tokens, weight), weight, dy)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_that_is_not_in_the_vocabulary_stops_the_device(token: int) -> None:
    call = f"embed(torch.tensor([[0, {token}]], device='cuda'), torch.randn(5, 4, device='cuda')).sum().item()"
    code = f"import torch; from rebased.ops import embed; {call}"  # the device is of no use to this process afterwards
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr
