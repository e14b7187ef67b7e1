"""Rows of a table: torch's own on a CPU; the gradient's kernels built for GPUs that are not here and run on one."""

from typing import Any

import pytest
import torch

from ops.embedding_cases import assert_is_the_law, mostly_filler
from rebased.ops import embed, use_backend
from rebased.ops.inspection import compile_launch, record_launches


def test_on_a_cpu() -> None:
    assert_is_the_law(mostly_filler((5, 13), 11), 11, 6)


@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (90, torch.float32)])
def test_every_kernel_builds(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from rebased.ops import backend
    from rebased.ops.embedding import gpu

    launches: list[dict[str, Any]] = []
    for name in ("chunks_kernel", "tokens_kernel"):
        monkeypatch.setattr(gpu, name, record_launches(getattr(gpu, name), launches))
    monkeypatch.setattr(backend, "triton_interpreted", lambda: True)  # so that CPU tensors get this far
    with use_backend("triton"):
        for D in (64, 100, 4096):
            embed(mostly_filler((2, 8), 5), torch.randn(5, D).to(dtype).requires_grad_()).sum().backward()
    assert len(launches) == 6
    for launch in launches:
        assert compile_launch(launch, capability).metadata.shared <= 32 * 1024  # for sums over rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "vocab", "D"), [((512, 256), 8192, 64), ((3, 1001), 50_304, 768), ((64, 2048), 7, 100)]
)
def test_on_a_gpu(shape: tuple[int, ...], vocab: int, D: int) -> None:
    assert_is_the_law(mostly_filler(shape, vocab, device="cuda"), vocab, D)


@pytest.mark.gpu
def test_the_same_sum_every_time() -> None:
    tokens = mostly_filler((512, 256), 8192, device="cuda")
    weight = torch.randn(8192, 64, device="cuda", requires_grad=True)
    dy = torch.randn(512, 256, 64, device="cuda")
    first, second = (torch.autograd.grad(embed(tokens, weight), weight, dy)[0] for _ in range(2))
    assert torch.equal(first, second)
