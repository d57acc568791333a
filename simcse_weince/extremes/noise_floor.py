"""What the wrong link costs: the noise floor of the softmax when winners follow the shortfall law, and the trichotomy.

The log-odds of two candidates are estimated from n winners. Under the right link the squared error falls like
``c / n``; under the wrong one it stays on the squared bias of its best fit, however many winners are seen.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import rel_entr, softmax

Array = np.ndarray


@dataclass(frozen=True)
class NoiseFloor:
    """Mean squared errors of the log-odds of the top candidate against the lowest, and their closed forms.

    Attributes:
        rows: Per ``n`` winners, for "shortfall" and "softmax": ``_mse`` simulated, its standard error ``_se``,
            and ``_closed`` to first order in 1/n: ``fisher_constant / n``, ``squared_bias + softmax_constant / n``.
        log_odds: The true log-odds.
        fisher_constant: Of the shortfall link, from the Fisher information.
        squared_bias: Floor of the softmax: the squared error of the slope that infinitely many winners give.
        softmax_constant: n times the variance of the softmax estimate (sandwich formula).
    """

    rows: list[dict[str, float]]
    log_odds: float
    fisher_constant: float
    squared_bias: float
    softmax_constant: float

    def to_json(self) -> dict[str, Any]:
        """The fields as a dict for ``json.dump``."""
        return asdict(self)


def noise_floor(
    n_values: Sequence[int] = (100, 300, 1000, 3000, 10_000),
    repeats: int = 2000,
    seed: int = 0,
    *,
    scores: Sequence[float] = (0.15, 0.45, 0.70, 0.90),
    shape: float = 0.8,
) -> NoiseFloor:
    """Simulate winners of the shortfall law with endpoint 1, and estimate log-odds by shortfall link and softmax.

    ``repeats`` samples are drawn for each number of winners; ``scores`` are those of the candidates, below 1, and
    ``shape`` is beta of the shortfall law.
    """
    s = np.asarray(scores, np.float64)
    x = -np.log1p(-s)
    top, low = s.argmax(), s.argmin()
    p, truth = softmax(shape * x), shape * (x[top] - x[low])
    slope = match_mean(s, p @ s)
    constants = {
        "fisher_constant": (x[top] - x[low]) ** 2 / _variance(x, p),
        "squared_bias": (slope * (s[top] - s[low]) - truth) ** 2,
        "softmax_constant": (s[top] - s[low]) ** 2 * _variance(s, p) / _variance(s, softmax(slope * s)) ** 2,
    }
    rng, rows = np.random.default_rng(seed), []
    for n in n_values:
        share = rng.multinomial(n, p, size=repeats) / n
        row = {"n": float(n)}
        for name, feature in (("shortfall", x), ("softmax", s)):
            error = (match_mean(feature, share @ feature) * (feature[top] - feature[low]) - truth) ** 2
            row |= {f"{name}_mse": float(error.mean()), f"{name}_se": float(error.std(ddof=1) / np.sqrt(repeats))}
        row["shortfall_closed"] = float(constants["fisher_constant"] / n)
        row["softmax_closed"] = float(constants["squared_bias"] + constants["softmax_constant"] / n)
        rows.append(row)
    return NoiseFloor(rows, float(truth), **{key: float(value) for key, value in constants.items()})


def trichotomy(
    scores: Sequence[float] = (0.15, 0.45, 0.70, 0.90), draws: int = 200_000, attempts: int = 1000, seed: int = 0
) -> list[dict[str, Any]]:
    """Let candidates compete under noise of each domain of attraction, and see which link the winners follow.

    A candidate's result is the best of ``attempts`` noisy scores, and the winner is the best candidate. The noise is
    exponential and added (Gumbel domain), Pareto and multiplied (Frechet), or a power law that shrinks the shortfall
    (Weibull): none has the limit law itself, only its domain.

    Returns:
        A row per domain: domain, the link it calls for, the winners' shares, and under each link's name its best slope,
        probabilities, and the Kullback-Leibler divergence of the shares from them, in nats.
    """
    s = np.asarray(scores, np.float64)
    features = {"softmax": s, "power": np.log(s), "shortfall": -np.log1p(-s)}
    # Survival probability of the best of the attempts: the noise is its inverse.
    tail = -np.expm1(np.log(np.random.default_rng(seed).random((draws, len(s)))) / attempts)
    results = {
        ("gumbel", "softmax"): s - 0.3 * np.log(tail),
        ("frechet", "power"): s * tail ** (-1 / 2),
        ("weibull", "shortfall"): 1 - (1 - s) * tail ** (1 / 0.8),
    }
    rows = []
    for (domain, link), result in results.items():
        share = np.bincount(result.argmax(1), minlength=len(s)) / draws
        row: dict[str, Any] = {"domain": domain, "link": link, "shares": share.tolist()}
        for name, x in features.items():
            slope = float(match_mean(x, share @ x))
            fitted = softmax(slope * x)
            divergence = float(rel_entr(share, fitted).sum())
            row[name] = {"slope": slope, "probabilities": fitted.tolist(), "divergence": divergence}
        rows.append(row)
    return rows


def match_mean(x: Array, mean: "float | Array") -> Array:
    """Slope at which ``softmax(slope * x)`` has these means of x (C,): the likelihood's maximum, by Newton's method."""
    mean = np.asarray(mean, np.float64)
    if (mean <= x.min()).any() or (mean >= x.max()).any():
        raise ValueError("all winners are the same extreme candidate: the slope is unbounded; draw more of them")
    slope = np.zeros(mean.shape)
    for _ in range(60):
        p = softmax(slope[..., None] * x, axis=-1)
        slope = slope + np.clip((mean - p @ x) / _variance(x, p), -2 / np.ptp(x), 2 / np.ptp(x))
    return slope


def _variance(x: Array, p: Array) -> Array:
    return p @ x**2 - (p @ x) ** 2
