"""Parts of one computation in threads of their own, each with single-threaded torch.

For many small operations on independent rows. Where bmm has no batched kernel (every CPU build without MKL), torch
would split each small matmul among its threads instead, and they would meet thousands of times a call: a third slower
on an idle machine, and twenty times slower where another process takes one of the cores.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

Part = TypeVar("Part")


def run_parts(function: Callable[[Part], None], parts: Sequence[Part], threads: int) -> None:
    """function(part) for all parts, without gradients, on this many threads; 1 is the caller's own."""
    workers = min(threads, len(parts))
    if workers == 1:
        for part in parts:
            function(part)
        return
    process_threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    started = Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes the process's number when it first asks, so it asks before changing it
        torch.set_num_threads(1)
        started.wait()

    def run(part: Part) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # modes belong to a thread: these do not inherit ours
            function(part)

    with ThreadPoolExecutor(workers, initializer=start) as pool:
        done = pool.map(run, parts)
        started.wait()
        torch.set_num_threads(process_threads)  # the workers keep their 1; threads that others start must not get it
        list(done)
