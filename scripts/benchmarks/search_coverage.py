"""Do the intervals of simcse_weince.search cover the truth? A table on a model whose answers are known.

    python scripts/benchmarks/search_coverage.py [--repeats 200]
    python scripts/benchmarks/search_coverage.py --repeats 0 --large

A corpus with hubs, all anchors facing the same small pool: share of 95 % intervals that hold the truth, with the error
of the anchors alone and with that of the pool. With --large the time and the peak memory of 10,000 anchors against a
pool of 100,000, random unit vectors of 384 dimensions.
"""

import argparse
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np

from simcse_weince.search import (
    CosineRows,
    DiscreteModel,
    SmallPoolWarning,
    bias_curve,
    risk_curve,
    search_cross_entropy,
)


def hub_corpus() -> DiscreteModel:
    """Forty items; every anchor searches itself and item 0, a fifth of the corpus. Samples are logits."""
    pi = np.r_[0.2, np.full(39, 0.8 / 39)]
    logits = 3 * np.eye(40)
    logits[:, 0] += 1.2
    return DiscreteModel(pi, 0.5 * np.eye(40) + 0.5 * pi, logits=logits)


def intervals(
    model: DiscreteModel, seed: int, ks: list[int], size: tuple[int, int]
) -> Iterator[tuple[str, bool, bool]]:
    """Yield (quantity, whether the pool's error is counted, whether the interval holds the truth)."""
    pos, neg = model.sample(*size, seed)
    options: dict = {"tau": 1.0, "unbounded": True}
    for pool in (False, True):
        risk = risk_curve(pos, neg, ks, offset="none", shared_pool=pool, **options)
        for k, lo, hi in zip(ks, risk.lo, risk.hi, strict=True):
            yield f"risk, k = {k}", pool, lo < model.risk(k) < hi
        ce = search_cross_entropy(pos, neg, shared_pool=pool, **options)
        yield "cross-entropy", pool, ce.lo < model.ce < ce.hi
        bias = bias_curve(pos, neg, ks, shared_pool=pool, **options)
        for k, lo, hi in zip(ks, bias.lo, bias.hi, strict=True):
            yield f"bias, k = {k}", pool, lo < model.bias(k) < hi
        yield "constant cA", pool, abs(bias.cA - model.cA) < 1.96 * bias.cA_se


def cover(repeats: int) -> None:
    """Print how often the intervals hold the truth."""
    model, size, ks = hub_corpus(), (2500, 80), [1, 8, 32]
    hubs = model.corpus @ model.density
    print(f"chi2(pi Q || pi) = {float((hubs - 1) ** 2 @ model.corpus):.3f}, n = {size[0]}, N = {size[1]}")
    hits: Counter[tuple[str, bool]] = Counter()
    for seed in range(repeats):
        for name, pool, inside in intervals(model, seed, ks, size):
            hits[name, pool] += inside
    print(f"{'95 % interval of':20}{'anchors alone':>15}{'and pool':>10}   ({repeats} corpora)")
    for name in dict.fromkeys(name for name, _ in hits):
        print(f"{name:20}{hits[name, False] / repeats:15.2f}{hits[name, True] / repeats:10.2f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", SmallPoolWarning)

    if options.repeats:
        cover(options.repeats)
    if options.large:
        rng = np.random.default_rng(0)
        rows = CosineRows(*(rng.normal(size=(m, 384)).astype(np.float32) for m in (10_000, 100_000)))
        start, pos = time.perf_counter(), np.full(10_000, 0.5)
        found = search_cross_entropy(pos, rows, tau=0.1)
        seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"10,000 anchors, pool of 100,000: cross-entropy {found.value:.4f} +- {1.96 * found.se:.4f}")
        print(f"{seconds:.0f} s, peak memory of the process {memory:.2f} GB")


if __name__ == "__main__":
    main()
