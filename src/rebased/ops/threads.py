"""One computation on several Python threads, each with single-threaded torch.

For many small operations on independent rows. Where bmm has no batched kernel (every CPU build without MKL), torch
splits each small matmul among its threads instead, and these threads synchronise thousands of times per call. For
polynomial attention at T = 4,096 that is a fifth slower on two idle cores, and three times slower where another process
uses one of them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")


def run_on_threads(function: Callable[[Item], None], items: Sequence[Item], threads: int, device: torch.device) -> None:
    """Calls function(item) once for each item, on at most `threads` threads; 1 means the caller's own thread.

    Autocast is off for the device. New threads record no gradients. An exception in a function reaches the caller.
    """
    workers = min(threads, len(items))
    if workers <= 1:
        with torch.autocast(device.type, enabled=False):
            for item in items:
                function(item)
        return
    process_threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    started = Barrier(workers + 1)

    def limit_threads() -> None:
        torch.get_num_threads()  # a thread takes the process's number when it first asks, so it asks before changing it
        torch.set_num_threads(1)
        started.wait()

    def run(item: Item) -> None:
        # a new thread does not inherit the caller's modes
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast(device.type, enabled=False):
            function(item)

    with ThreadPoolExecutor(workers, initializer=limit_threads) as pool:
        done = pool.map(run, items)
        started.wait()
        torch.set_num_threads(process_threads)  # for threads started later; the workers keep their 1
        list(done)
