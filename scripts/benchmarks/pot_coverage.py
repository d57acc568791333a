"""Do the intervals of fit_pot cover the truth? Two tables on samples whose shape is known, one on embeddings.

    python scripts/benchmarks/pot_coverage.py [--repeats 400]

1. Generalised Pareto samples: share of 95 % intervals of shape and endpoint that hold the truth. The endpoint has a
   plain profile, whose chi-square limit fails below a shape of -1/2.
2. Cosines of uniform points on the sphere in d dimensions: the shape approaches -2/(d - 1) as the threshold rises.
3. Cosines of fresh samples of embeddings, which share sentences: share of 95 % intervals of the shape that hold the
   mean estimate, over both members of the pairs as `diagnose` draws them, and over anchors with each pair twice. A
   quarter of the repeats.
"""

import argparse
import math
import time

import numpy as np
from scipy.stats import genpareto

from simcse_weince.extremes.pot import fit_pot, threshold_stability
from simcse_weince.extremes.scores import stream_scores


def isotropic(rng: np.random.Generator, n: int) -> np.ndarray:
    """Normal points in 8 dimensions."""
    return rng.normal(size=(n, 8)).astype(np.float32)


def hubs(rng: np.random.Generator, n: int) -> np.ndarray:
    """Normal points in 16 dimensions, some of them far out in one direction: these are near to each other."""
    points = rng.normal(size=(n, 16))
    points[:, 0] += 2 * rng.exponential(size=n)
    return points.astype(np.float32)


def embeddings(repeats: int) -> None:
    """Print the third table."""
    columns = ("mean estimate", "sd", "over members", "over anchors", "ms a sample")
    print(f"\n{'embeddings':>10}{'n':>6}" + "".join(f"{column:>15}" for column in columns))
    for make in (isotropic, hubs):
        for n in (200, 600):
            start, shapes, intervals = time.perf_counter(), [], []
            for seed in range(repeats):
                scores = stream_scores(make(np.random.default_rng([n, seed]), n))
                pairs, tail = scores.exceedance_pairs, scores.exceedances
                options: dict = {"bootstrap": 100, "seed": seed}
                both = fit_pot(tail, total=scores.total, groups=pairs, **options)
                anchors = fit_pot(np.tile(tail, 2), total=2 * scores.total, groups=pairs.T.ravel(), **options)
                if both.estimable and anchors.estimable:
                    shapes.append(both.shape)
                    intervals.append((both.shape_interval, anchors.shape_interval))
            ms, mean = 1000 * (time.perf_counter() - start) / repeats, np.mean(shapes)
            low, high = np.moveaxis(np.array(intervals), -1, 0)
            held = ((low <= mean) & (mean <= high)).mean(0)
            row = f"{make.__name__:>10}{n:6d}{mean:15.3f}{np.std(shapes, ddof=1):15.3f}"
            print(row + "".join(f"{share:15.3f}" for share in held) + f"{ms:15.1f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    repeats = parser.parse_args().repeats

    columns = ("mean estimate", "shape held", "endpoint held", "refused", "ms a fit")
    print(f"{'shape':>6}{'n':>7}" + "".join(f"{column:>15}" for column in columns))
    for shape in (-0.7, -0.39, -0.1, 0.0, 0.3):
        for n in (500, 5000):
            rng, start = np.random.default_rng([n, round(100 * (1 + shape))]), time.perf_counter()
            samples = (0.05 * genpareto.rvs(shape, size=n, random_state=rng) for _ in range(repeats))
            fits = [fit_pot(sample, threshold=0, cap=None, bootstrap=0) for sample in samples]
            ms = 1000 * (time.perf_counter() - start) / repeats
            kept = [fit for fit in fits if fit.shape is not None and fit.shape_interval and fit.endpoint_interval]
            end = -0.05 / shape if shape < 0 else math.inf
            held = np.mean([fit.shape_interval[0] <= shape <= fit.shape_interval[1] for fit in kept])
            reached = np.mean([fit.endpoint_interval[0] <= end <= fit.endpoint_interval[1] for fit in kept])
            mean = np.mean([fit.shape for fit in kept])
            print(f"{shape:6.2f}{n:7d}{mean:15.3f}{held:15.3f}{reached:15.3f}{repeats - len(kept):15d}{ms:15.1f}")

    quantiles = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
    print(f"\n{'d':>4}{'-2/(d-1)':>10}" + "".join(f"{f'q = {q:g}':>11}" for q in quantiles) + "   (1,000,000 cosines)")
    for d in (4, 6, 9, 16):
        rng = np.random.default_rng(d)
        cosines = np.sqrt(rng.beta(0.5, (d - 1) / 2, 1_000_000)) * rng.choice([-1, 1], 1_000_000)
        rows = threshold_stability(cosines, quantiles)
        print(f"{d:4d}{-2 / (d - 1):10.3f}" + "".join(f"{row['shape']:11.3f}" for row in rows))
        print(f"{'+-':>14}" + "".join(f"{(row['high'] - row['low']) / 2:11.3f}" for row in rows))

    embeddings(max(1, repeats // 4))


if __name__ == "__main__":
    main()
