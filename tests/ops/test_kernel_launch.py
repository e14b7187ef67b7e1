"""rebased.ops.kernel_launch: a kernel is looked for once, found again, and never taken for another."""

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.ops import REBASED, poly_attention
from rebased.ops.backend import Backend
from tolerances import assert_small_error

pytest.importorskip("triton")
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource
from triton.runtime import _async_compile

from rebased.ops import kernel_launch
from rebased.ops.kernel_launch import Launch, compile_together, launch

CALLBACKS = len(inspect.signature(_async_compile.AsyncCompileMode.submit).parameters) - 3  # 3.9 has another


@triton.jit
def add_one(x):
    tl.store(x, tl.load(x) + 1)


class Memory:
    """As much of a CUDA tensor as a launch looks at."""

    is_cuda = True

    def __init__(self, address: int = 512, dtype: torch.dtype = torch.float32, device: int = 0) -> None:
        self.address, self.dtype, self.device = address, dtype, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


class Kernel:
    """A stand-in for what triton.jit makes: writes down when it was asked for, and what it handed out was run with."""

    arg_names = ("x", "y", "size", "scale", "WIDE", "BLOCK")

    def __init__(self) -> None:
        self.searches = 0
        self.again: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def search(*args: Any, **constants: Any) -> Any:
            self.searches += 1
            return self.Compiled(self)

        return search

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __init__(self, kernel: "Kernel") -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args: self.kernel.again.append((grid, args))

        def run(self, gridX: int, gridY: int, gridZ: int, stream: str, function: str, *args: Any) -> None:
            assert (stream, function, *args[:4]) == ("stream 0", "function", "metadata", None, None, None)
            self[gridX, gridY, gridZ](*args[4:])


@pytest.fixture(autouse=True)
def _one_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for CUDA, but not where a test needs the real one."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setenv("REBASED_SELF_CHECK", "off")
    monkeypatch.setattr(kernel_launch, "_remembered", {})
    monkeypatch.setattr(kernel_launch, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream="stream {}".format))
    monkeypatch.setattr(kernel_launch, "driver", streams)


X, Y = Memory(), Memory(1024, torch.bfloat16)


def test_the_second_launch_goes_straight_to_the_compiled_kernel() -> None:
    kernel, other = Kernel(), Memory(2048, torch.bfloat16)
    launch(kernel, (7,), X, Y, 64, 0.5, BLOCK=16, WIDE=False, num_warps=4)
    assert (kernel.searches, kernel.again) == (1, [])
    launch(kernel, (9, 2), X, other, 64, 2.5, BLOCK=16, WIDE=False, num_warps=4)  # another grid, address and scale
    assert kernel.searches == 1
    assert kernel.again == [((9, 2, 1), (512, 2048, 64, 2.5, False, 16))]  # constants in the kernel's own order


def test_a_profiler_hears_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Triton's own way calls its hooks."""
    kernel = Kernel()

    def run(self: Any, gridX: int, gridY: int, gridZ: int, stream: str, function: str, *args: Any) -> None:
        pytest.fail("launched without hooks")

    monkeypatch.setattr(Kernel.Compiled, "run", run)
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(kernel_launch.knobs.runtime, hook), "calls", [print])
            launch(kernel, (7,), X, Y, 64, 0.5, BLOCK=16, WIDE=False)
            launch(kernel, (7,), X, Y, 64, 0.5, BLOCK=16, WIDE=False)
    assert (kernel.searches, len(kernel.again)) == (1, 3)


def test_a_launch_that_is_kept_wants_only_tensors() -> None:
    kernel = Kernel()
    kept = Launch(kernel, (7,), 64, 0.5, BLOCK=16, WIDE=False, num_warps=4)
    for x in (X, Memory(2048)):
        kept(x, Y)
    assert (kernel.searches, kernel.again) == (1, [((7, 1, 1), (2048, 1024, 64, 0.5, False, 16))])
    kept(X, Memory(1028, torch.bfloat16))  # not aligned
    assert kernel.searches == 2


def test_launches_that_differ_in_their_grid_share_kernels() -> None:
    """As of packed documents, whose number changes from batch to batch."""
    kernel, constants = Kernel(), {"BLOCK": 16, "WIDE": False}
    for blocks in (7, 8, 9):
        Launch(kernel, (blocks,), 64, 0.5, **constants)(X, Y)
    assert [grid for grid, _ in kernel.again] == [(8, 1, 1), (9, 1, 1)]
    Launch(kernel, (7,), 65, 0.5, **constants)(X, Y)
    assert kernel.searches == 2


def test_a_length_that_is_new_finds_the_kernels_of_others_like_it() -> None:
    """As a server meets prompts. Triton asks of an integer whether it is 1, divisible by 16, and fits into 32 bits."""
    kernel, constants = Kernel(), {"BLOCK": 16, "WIDE": False}
    for length in (65, 66, 127):
        Launch(kernel, (7,), length, 0.5, **constants)(X, Y, length)
    assert kernel.searches == 1
    assert [args[2:4] for _, args in kernel.again] == [(66, 66), (127, 127)]
    for others in (64, 129, 1, 2, 0, 2**31 - 1, 2**31, 2**31 + 1, -3):
        Launch(kernel, (7,), others, 0.5, **constants)(X, Y)
    assert kernel.searches == 10


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((X, Memory(1028, torch.bfloat16), 64, 0.5), {}),
        ((X, Memory(1024, torch.float16), 64, 0.5), {}),
        ((X, None, 64, 0.5), {}),
        ((X, Memory(1024, torch.bfloat16, device=-1), 64, 0.5), {}),  # on the CPU: Triton says so
        ((X, Y, 65, 0.5), {}),
        ((X, Y, 64, 0.5), {"BLOCK": 32}),
        ((X, Y, 64, 0.5), {"WIDE": True}),
        ((X, Y, 64, 0.5), {"num_warps": 8}),
        ((X, Y, 64, 0.5), {"maxnreg": 128}),
    ],
)
def test_what_may_be_compiled_otherwise_is_looked_for(args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel, usual = Kernel(), {"BLOCK": 16, "WIDE": False, "num_warps": 4}
    launch(kernel, (1,), X, Y, 64, 0.5, **usual)
    launch(kernel, (1,), *args, **usual | constants)
    assert (kernel.searches, kernel.again) == (2, [])


def test_each_kernel_has_its_own() -> None:
    one, two = Kernel(), Kernel()
    for kernel in (one, two):
        launch(kernel, (1,), X, Y, 64, 0.5, BLOCK=16, WIDE=False)
    assert (one.searches, two.searches) == (1, 1)


def test_on_the_device_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches where torch is, not where the tensors are."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel, seen = Kernel(), []
    monkeypatch.setattr(Kernel, "__getitem__", lambda *_: lambda *__, **___: seen.append(current[-1]))
    for index in (1, 0, 1):
        launch(kernel, (1,), Memory(device=index), Y, 64, 0.5, BLOCK=16, WIDE=False)
        kernel_launch._remembered.clear()  # what these launches hand out cannot run
    assert (seen, current) == ([1, 0, 1], [0])


def test_no_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "LARGEST", 3)
    kernel = Kernel()
    for size in range(10):
        launch(kernel, (1,), X, Y, size, 0.5, BLOCK=16, WIDE=False)
        launch(kernel, (1,), X, Y, 64, 0.5, BLOCK=size, WIDE=False)
        assert len(kernel_launch._remembered) <= 3
        assert max(map(len, kernel_launch._remembered.values())) <= 3


def changed_triton(change: str) -> Kernel:
    """A kernel whose compiled ones differ from what this package knows."""
    kernel = Kernel()

    class Changed(Kernel.Compiled):
        if change == "no metadata":
            packed_metadata = property()
        elif change == "another argument":

            def run(self, gridX: int, gridY: int, gridZ: int, stream: str, cluster: int, *args: Any) -> None: ...

        elif change == "written in C":
            run = getattr

    kernel.Compiled = Changed
    return kernel


@pytest.mark.parametrize("change", ["no metadata", "another argument", "written in C"])
def test_a_changed_triton_launches_in_its_own_way(change: str, caplog: pytest.LogCaptureFixture) -> None:
    kernel = changed_triton(change)
    kept = Launch(kernel, (7,), 64, 0.5, BLOCK=16, WIDE=False)
    assert kept.is_new
    for _ in range(3):
        kept(X, Y)
    assert (kernel.searches, kernel.again, kept.is_new) == (3, [], False)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_without_knobs_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "knobs", None)
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (7,), X, Y, 64, 0.5, BLOCK=16, WIDE=False)
    assert (kernel.searches, kernel.again) == (2, [])


def test_the_installed_triton_is_known() -> None:
    """Its own class of compiled kernels, and its own launcher; only a GPU could make the latter ready."""
    source = ASTSource(add_one, signature={"x": "*fp32"}, constexprs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    compiled._run = CudaLauncher.__new__(CudaLauncher)
    assert kernel_launch._has_known_parts(compiled)


class OneThread:
    """AsyncCompileMode of Triton 3.5: an error of one kernel ends all."""

    def __init__(self, executor: Any) -> None:
        raise AssertionError("not to be used")


@pytest.mark.parametrize("mode", [None, OneThread])
def test_without_the_mode_for_threads_each_launch_compiles(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "AsyncCompileMode", mode)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compile_together(lambda: pytest.fail("nothing to plan for"), torch.device("cuda"))


@pytest.mark.skipif(not kernel_launch._compiles_in_threads(), reason="Triton 3.5 compiles one kernel after the other")
def test_kernels_are_compiled_together_and_errors_wait_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are under way at once; what cannot be compiled does not stop the others, nor the call."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    all_here, loaded = threading.Barrier(3, timeout=20), set[str]()

    class Compiles(Kernel):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Any:
            assert args == (torch.float32, None, 64)
            mode = _async_compile.active_mode.get()
            assert mode is not None
            return mode.submit(self.name, self.compile, *[lambda kernel: None] * CALLBACKS)

        def compile(self) -> Any:
            all_here.wait()
            if self.name == "wrong":
                raise ValueError("this kernel needs too much shared memory")
            return Loads(self.name)

    class Loads:
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def run(self) -> None:
            loaded.add(self.name)

    def run() -> None:
        x = torch.empty(4, device="meta")
        for name in ("one", "wrong", "two"):
            Launch(Compiles(name), (7,), 64, BLOCK=16)(x, None)

    compile_together(run, torch.device("cuda"))
    assert loaded == {"one", "two"}


@pytest.mark.gpu
@pytest.mark.parametrize("T", [192, 3000])
def test_aligned_and_not_in_turns(T: int) -> None:
    """The same call on views of one buffer, whose addresses are multiples of 16 bytes, then not, then again."""
    size = 2 * T * 3 * 16
    buffer = torch.randn(4, size + 8, device="cuda").to(torch.bfloat16)
    for shift in (0, 1, 0, 3, 8, 1):
        given = [x[shift : shift + size].view(2, T, 3, 16) for x in buffer]
        got, want = attend(given, "triton"), attend([x.double() for x in given], "chunked")
        assert_small_error(got, want, ("o", "dq", "dk", "dv"), torch.bfloat16)


def attend(given: list[Tensor], backend: Backend) -> list[Tensor]:
    """o, dq, dk, dv of q, k, v, do."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    o = poly_attention(q, k, v, coefficients=REBASED, backend=backend)
    return [o, *torch.autograd.grad(o, (q, k, v), given[3])]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [100, 3000])
def test_a_first_call_compiles_all_kernels_together(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the backward pass too; nothing is left for Triton to compile when they are launched."""
    compiled: list[bool] = []

    def listen(**event: Any) -> None:
        compiled.append(event["is_manual_warmup"])

    monkeypatch.setattr(kernel_launch.knobs.runtime, "jit_cache_hook", listen)
    given = [torch.randn(2, T, 3, width, device="cuda") for width in (11, 11, 7, 7)]
    got, want = attend(given, "triton"), attend([x.double() for x in given], "chunked")
    assert compiled == [True] * (3 if T == 100 else 7)
    assert_small_error(got, want, ("o", "dq", "dk", "dv"), torch.float32)


BACKWARD = """
import torch
from rebased.ops import REBASED, poly_attention
options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
given = [torch.randn(8, 512, 4, width, **options) for width in (16, 16, 64)]
torch.autograd.grad(poly_attention(*given, coefficients=REBASED), given, torch.ones_like(given[2]))
"""


@pytest.mark.gpu
def test_processes_that_end_after_a_gradient_end_well() -> None:
    """Without the wait at exit up to one in five was aborted on a busy machine; see _settle_gradient_threads."""
    processes = [subprocess.Popen([sys.executable, "-c", BACKWARD]) for _ in range(12)]
    assert [process.wait() for process in processes] == [0] * 12
