"""What a handful of seeds can say: means with intervals, paired differences, and how many seeds would be enough."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats


def spread(values: Sequence[float]) -> dict[str, Any]:
    """``n``, ``mean``, ``sd`` and the 95 % Student interval ``low`` to ``high``; None where one value has no spread.

    Raises:
        ValueError: `values` is empty.
    """
    if not len(values):
        raise ValueError("values must hold at least one number")
    n, mean, sd, margin = len(values), float(np.mean(values)), None, math.nan
    if n > 1:
        sd = float(np.std(values, ddof=1))
        margin = sd / math.sqrt(n) * float(stats.t.ppf(0.975, n - 1))
    low, high = (None, None) if sd is None else (mean - margin, mean + margin)
    return {"n": n, "mean": mean, "sd": sd, "low": low, "high": high}


def paired_difference(first: Sequence[float], second: Sequence[float], comparisons: int = 1) -> dict[str, Any]:
    """Compare two arms seed by seed: the `spread` of the differences, ``p``, and the seeds for 0.5 and 1.0 points.

    ``p`` is two-sided, of the permutation test that flips the signs of the differences: exact up to 16 seeds, from
    65,536 random flips above. With n seeds it cannot be below 2 / 2^n, however large the difference.

    Args:
        first: Scores in points. Shape: (seeds,).
        second: Scores of the baseline with the same seeds, in the same order.
        comparisons: How many differences are tested together, which is what the seeds have to be enough for.

    Raises:
        ValueError: The lengths differ, or are 0.
    """
    if len(first) != len(second):
        raise ValueError(f"first and second must have equal lengths, got {len(first)} and {len(second)}")
    differences = np.subtract(first, second).tolist()
    result = spread(differences)
    p = 1.0  # of one difference, which scipy refuses: either sign is as far from 0
    if len(differences) > 1:
        # Whole numbers, whose sums are exact: rounded ones of equal size would be told apart, and p be too small.
        whole = np.rint(np.multiply(differences, 1e9))
        p = stats.permutation_test(
            (whole,), np.mean, permutation_type="samples", n_resamples=2**16, vectorized=True, random_state=0
        ).pvalue
    sd = result["sd"]
    needed = [None if sd is None else seeds_needed(sd, points, comparisons) for points in (0.5, 1.0)]
    return {**result, "p": float(p), "seeds_for_half_a_point": needed[0], "seeds_for_a_point": needed[1]}


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for their number, step by step (Holm, 1979): controls the chance of any false discovery."""
    order = np.argsort(p_values)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    return np.minimum(adjusted, 1).tolist()


def fewest_seeds(comparisons: int) -> int:
    """The smallest number of seeds with which a difference among `comparisons` can have a p after Holm of 0.05."""
    return math.ceil(math.log2(comparisons * 2 / 0.05))


def seeds_needed(sd: float, difference: float, comparisons: int = 1, power: float = 0.8) -> int:
    """About the number of seeds with which a true difference is found, after correction, with probability `power`.

    By a paired t test at 5 % divided by `comparisons`, the first step of Holm's correction. It is at least
    `fewest_seeds`, and more where so few would have to agree in sign and would not with that probability. With ten
    seeds the exact test finds up to 8 % fewer differences than the t test.

    Args:
        sd: Standard deviation of the paired differences, itself an estimate.
        difference: True mean difference, in the unit of `sd`.
        comparisons: How many differences are tested together.
        power: Probability of finding it.
    """
    level, fewest = 0.05 / comparisons, fewest_seeds(comparisons)
    effect = difference / max(sd, 0.01 * difference)  # below that the fewest are enough anyway
    if stats.norm.cdf(effect) ** fewest < power:
        fewest += 1
    # The normal approximation is a lower bound, a few steps away.
    start = ((stats.norm.isf(level / 2) + stats.norm.ppf(power)) / effect) ** 2
    return next(n for n in itertools.count(max(fewest, int(start))) if _power(effect, n, level) >= power)


def _power(effect: float, n: int, level: float) -> float:
    """Power of the t test, from the noncentral t distribution; the tail of the wrong sign is left out."""
    shift = min(effect * math.sqrt(n), 37.0)  # above, scipy gives NaN
    return float(stats.nct.sf(stats.t.isf(level / 2, n - 1), n - 1, shift))
