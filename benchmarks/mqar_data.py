"""How fast MQAR examples are made: python benchmarks/mqar_data.py [--device cuda] [--examples 100000]"""

import argparse
import time

import torch

from rebased.tasks import MQAR

TASKS = [MQAR(), MQAR(seq_len=256, kv_pairs=32), MQAR(seq_len=2048, kv_pairs=512), MQAR(seq_len=2048, kv_pairs=32)]


def seconds(task: MQAR, n_examples: int, device: str) -> float:
    start = time.perf_counter()
    examples = task.build(n_examples, seed=42, device=device)
    int(examples.labels[-1, -1])  # waits for the device
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast MQAR examples are made.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--examples", type=int, default=100_000)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads")
    for task in TASKS:
        task.build(1, seed=0, device=arguments.device)
        took = seconds(task, arguments.examples, arguments.device)
        rate = arguments.examples / took
        print(f"T {task.seq_len:5} n {task.kv_pairs:4}: {took:6.2f} s, {rate:10,.0f} examples/s")


if __name__ == "__main__":
    main()
