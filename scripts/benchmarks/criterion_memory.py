"""Memory and time of the criteria, forward and backward, for growing batches.

    python scripts/benchmarks/criterion_memory.py --sizes 1024 4096 32768 --device cuda

Memory is the peak above the two views and their gradients; time is also given as a ratio to InfoNCE. Every size runs in
a process of its own, because a process does not give memory back. On a CPU this needs Linux.
"""

import argparse
import multiprocessing
import resource
import time
from pathlib import Path

import torch

from simcse_weince import InfoNCE, Weince

CRITERIA = {"infonce": InfoNCE, "weince": Weince}


def measure(name: str, rows: int, width: int, device: str) -> tuple[float, float]:
    """Peak memory in MB and the time of the fastest of three calls (of one, for large batches) in seconds."""
    criterion, generator = CRITERIA[name](), torch.Generator().manual_seed(0)
    first = torch.randn(rows, width, generator=generator)
    views = [
        view.to(device).requires_grad_() for view in (first, first + torch.randn(rows, width, generator=generator))
    ]
    criterion(*(view[:64] for view in views)).backward()  # loads what the first call loads, and makes the gradients

    def peak() -> float:
        if device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return torch.cuda.max_memory_allocated() / 2**20

    del first
    if device == "cpu":
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    else:
        before = torch.cuda.memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(1 if rows > 8192 else 3):
        start = time.perf_counter()
        criterion(*views).backward()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return peak() - before, min(seconds)


def main() -> None:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    print(
        f"{'batch':>6} {'InfoNCE MB':>11} {'WEINCE MB':>10} {'InfoNCE s':>10} {'WEINCE s':>9} {'ratio':>6}", flush=True
    )
    context = multiprocessing.get_context("spawn")
    for rows in arguments.sizes:
        results = []
        for name in CRITERIA:
            with context.Pool(1) as pool:
                results.append(pool.apply(measure, (name, rows, arguments.width, arguments.device)))
        (plain_memory, plain), (memory, seconds) = results
        ratio = seconds / plain
        print(f"{rows:6d} {plain_memory:11.0f} {memory:10.0f} {plain:10.3f} {seconds:9.3f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
