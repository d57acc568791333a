"""Do the intervals of simcse_weince.search cover the truth? Two tables on models whose answers are known.

    python scripts/benchmarks/search_coverage.py [--repeats 200] [--large]

1. A corpus with hubs, all anchors facing the same small pool: share of 95 % intervals that hold the truth, with the
   error of the anchors alone and with that of the pool.
2. The estimated bias times k, which tends to a constant, beside the naive 1/sqrt(k) bound.
With --large also time and memory of 10,000 anchors against a pool of 100,000.
"""

import argparse
import math
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
    SoftmaxLink,
    VonMisesFisherModel,
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", SmallPoolWarning)

    model, size, ks = hub_corpus(), (2500, 80), [1, 8, 32]
    hubs = model.corpus @ model.density
    print(f"chi2(pi Q || pi) = {float((hubs - 1) ** 2 @ model.corpus):.3f}, n = {size[0]}, N = {size[1]}")
    hits: Counter[tuple[str, bool]] = Counter()
    for seed in range(options.repeats):
        for name, pool, inside in intervals(model, seed, ks, size):
            hits[name, pool] += inside
    print(f"{'95 % interval of':20}{'anchors alone':>15}{'and pool':>10}   ({options.repeats} corpora)")
    for name in dict.fromkeys(name for name, _ in hits):
        print(f"{name:20}{hits[name, False] / options.repeats:15.2f}{hits[name, True] / options.repeats:10.2f}")

    sphere = VonMisesFisherModel(16, 10, SoftmaxLink(0.1))
    curve = bias_curve(
        *sphere.sample(2000, 2000, 0), [4**i for i in range(9)], tau=0.1, offset="log_k", max_anchors=2000
    )
    print(f"\n{'k':>7}{'exact bias':>12}{'estimate':>12}{'+-':>9}{'k * estimate':>14}{'naive bound':>13}")
    for k, bias, se in zip(curve.k.tolist(), curve.bias, curve.se, strict=True):
        naive = math.expm1(20) / (2 * math.sqrt(k)) + math.exp(20) / k
        print(f"{k:7d}{sphere.bias(k, 'log_k'):12.5f}{bias:12.5f}{1.96 * se:9.5f}{k * bias:14.3f}{naive:13.3g}")
    print(f"limit of k * bias: exact {sphere.cA:.3f}, estimate {curve.cA:.3f} +- {1.96 * curve.cA_se:.3f}")

    if options.large:
        rng = np.random.default_rng(0)
        rows = CosineRows(*(rng.normal(size=(m, 64)).astype(np.float32) for m in (10_000, 100_000)))
        start, pos = time.perf_counter(), np.full(10_000, 0.5)
        search_cross_entropy(pos, rows, tau=0.1)
        seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"\n10,000 anchors, pool of 100,000: {seconds:.0f} s, peak memory {memory:.2f} GB")


if __name__ == "__main__":
    main()
