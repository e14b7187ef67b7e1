"""rebased.ops.backend: which path "auto" takes on which device, and what "triton" says where there is no way."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from rebased.ops import backend, use_backend
from rebased.ops.backend import choose_path

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    """Answers are cached: here each test asks on its own."""
    caches = (backend._why_not_on, backend._is_new_enough, backend._log_once)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def install_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), hip: str | None = None) -> None:
    """Stand-ins for a GPU, and for a Triton that is new enough."""
    monkeypatch.delenv("REBASED_BACKEND", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "find_spec", lambda name: True)
    monkeypatch.setattr(backend, "version", lambda name: "3.10.1")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_ampere_and_newer_take_the_kernels(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch, capability)
    assert choose_path("auto", GPU) == choose_path("triton", GPU) == "triton"


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((7, 5), None, "the kernels need compute capability 8.0, and this GPU has 7.5"),
        ((9, 4), "6.4", "the kernels are for NVIDIA GPUs, and this one is of AMD"),  # 9.4: an MI300
    ],
)
def test_other_gpus_take_plain_torch_and_the_log_says_why(
    capability: tuple[int, int],
    hip: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install_gpu(monkeypatch, capability, hip)
    assert [choose_path("auto", GPU) for _ in range(2)] == ["chunked", "chunked"]
    assert caplog.messages == [f"backend 'auto' on cuda takes the 'chunked' path: {reason}"]
    refusal = f"backend 'triton' on cuda:0: {reason}; use backend='auto' or 'chunked'"
    with pytest.raises(ValueError) as refused:
        choose_path("triton", GPU)
    assert str(refused.value) == refusal
    with use_backend("triton"), pytest.raises(ValueError) as refused:
        choose_path("auto", GPU)
    assert str(refused.value) == refusal


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_devices_without_cuda_take_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch)
    assert choose_path("auto", torch.device(name)) == "chunked"


def test_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each GPU the machine has; a call to CUDA per operation would slow down short sequences."""
    asked: list[torch.device] = []
    install_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (len(asked) + 6, 0))
    paths = [choose_path("auto", torch.device("cuda", index)) for index in (0, 1, 0, 1)]
    assert paths == ["chunked", "triton"] * 2
    assert [device.index for device in asked] == [0, 1]


def test_an_old_triton_is_as_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """torch 2.7 and 2.8 bring Triton 3.3 and 3.4; then torch computes without kernels, and says so once."""
    install_gpu(monkeypatch)
    monkeypatch.setattr(backend, "version", lambda name: "3.4.0")
    assert [choose_path("auto", GPU) for _ in range(2)] == ["chunked", "chunked"]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["Triton 3.4.0 is older than 3.5, which the GPU kernels need: torch computes without"]


def test_triton_under_another_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as triton-windows: its version is not asked for."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    install_gpu(monkeypatch)
    monkeypatch.setattr(backend, "version", version)
    assert choose_path("auto", GPU) == "triton"
