"""Time of the criteria, forward and backward, as ratios measured in one run.

Each repetition times all criteria one after the other, several calls each, so that whatever else the machine does hits
them alike. "floor" is what no criterion can avoid: the three matrix products of cosines and their two gradients.

    python scripts/benchmarks/criterion_speed.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from simcse_weince import InfoNCE, Weince

WIDTH = 768


def floor(first: Tensor, second: Tensor) -> None:
    """Three N x N x d matrix products."""
    with torch.no_grad():
        cosine = first @ second.T
        cosine @ second
        cosine.T @ first


def step(criterion: torch.nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Forward and backward of a criterion."""

    def run(first: Tensor, second: Tensor) -> None:
        first.grad = second.grad = None
        criterion(first, second).backward()

    return run


def seconds(call: Callable[[Tensor, Tensor], None], batch: tuple[Tensor, Tensor], calls: int) -> float:
    """Mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call(*batch)
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    arms = {
        "InfoNCE": step(InfoNCE()),
        "WEINCE": step(Weince()),
        "WEINCE, likelihood": step(Weince(evidence="likelihood")),
        "floor": floor,
    }
    rows = [("WEINCE", "InfoNCE"), ("WEINCE, likelihood", "InfoNCE"), ("WEINCE", "floor"), ("InfoNCE", "floor")]
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, width {WIDTH}, {options.repetitions} repetitions")
    print("ratio, median (lowest to highest)".ljust(34), *(f"{f'N = {size}':>22}" for size in options.sizes))
    ratios: dict[tuple[str, str], list[list[float]]] = {row: [] for row in rows}
    for size in options.sizes:
        first = torch.randn(size, WIDTH)
        second = (first + 0.5 * torch.randn(size, WIDTH)).requires_grad_()
        batch = (first.requires_grad_(), second)
        calls = max(1, 2**17 // size**2 * 2)
        for call in arms.values():  # a first call that nobody times
            call(*batch)
        times = [{name: seconds(call, batch, calls) for name, call in arms.items()} for _ in range(options.repetitions)]
        for row in rows:
            ratios[row].append([time[row[0]] / time[row[1]] for time in times])
    for (one, other), columns in ratios.items():
        cells = [f"{statistics.median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in columns]
        print(f"{one} / {other}".ljust(34), *(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
