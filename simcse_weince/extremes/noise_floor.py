"""What the wrong link costs: the noise floor of the softmax when winners follow the shortfall law, and the trichotomy.

The log-odds of two candidates are estimated from n winners. Under the right link the squared error falls like
``c / n``; under the wrong one it stays on the squared bias of its best fit, however many winners are seen.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import softmax

Array = np.ndarray


@dataclass(frozen=True)
class NoiseFloor:
    """Mean squared errors of the log-odds of the top candidate against the lowest, and their closed forms.

    Attributes:
        rows: Per number of winners: n, shortfall_mse, shortfall_se, softmax_mse, softmax_se (Monte Carlo standard
            errors), shortfall_closed = ``fisher_constant / n`` and softmax_closed =
            ``squared_bias + softmax_constant / n``.
        log_odds: The true log-odds.
        fisher_constant: c of the shortfall link, from the Fisher information.
        squared_bias: Floor of the softmax, the squared error of the slope that infinitely many winners give.
        softmax_constant: n times the variance of the softmax estimate (the sandwich formula).
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

    Args:
        n_values: Numbers of winners.
        repeats: Samples of each number.
        seed: Seed of the simulation.
        scores: Scores of the candidates, below 1; the log-odds are those of the largest against the smallest.
        shape: Shape beta of the shortfall law.
    """
    s = np.asarray(scores, np.float64)
    x = -np.log1p(-s)
    p = softmax(shape * x)
    top, low = s.argmax(), s.argmin()
    truth = shape * (x[top] - x[low])
    slope = match_mean(s, p @ s)
    rows = []
    closed = {
        "fisher_constant": (x[top] - x[low]) ** 2 / _variance(x, p),
        "squared_bias": (slope * (s[top] - s[low]) - truth) ** 2,
        "softmax_constant": (s[top] - s[low]) ** 2 * _variance(s, p) / _variance(s, softmax(slope * s)) ** 2,
    }
    rng = np.random.default_rng(seed)
    for n in n_values:
        share = rng.multinomial(n, p, size=repeats) / n
        row = {"n": float(n)}
        for name, feature in (("shortfall", x), ("softmax", s)):
            error = (match_mean(feature, share @ feature) * (feature[top] - feature[low]) - truth) ** 2
            row |= {f"{name}_mse": error.mean(), f"{name}_se": error.std(ddof=1) / np.sqrt(repeats)}
        row["shortfall_closed"] = closed["fisher_constant"] / n
        row["softmax_closed"] = closed["squared_bias"] + closed["softmax_constant"] / n
        rows.append({key: float(value) for key, value in row.items()})
    return NoiseFloor(rows=rows, log_odds=float(truth), **{key: float(value) for key, value in closed.items()})


def trichotomy(
    scores: Sequence[float] = (0.15, 0.45, 0.70, 0.90), draws: int = 200_000, attempts: int = 1000, seed: int = 0
) -> list[dict[str, Any]]:
    """Let candidates compete under noise of each domain of attraction, and see which link the winners follow.

    A candidate's result is the best of ``attempts`` noisy scores, and the winner is the best candidate. The noise is
    exponential and added (Gumbel domain), Pareto and multiplied (Frechet), or a power law that shrinks the shortfall
    (Weibull): none has the limit law itself, only its domain.

    Returns:
        A row per domain: domain, the link it calls for, the winners' shares, and per link its best slope and the
        Kullback-Leibler divergence of the shares from its probabilities, in nats.
    """
    s = np.asarray(scores, np.float64)
    rng = np.random.default_rng(seed)
    features = {"softmax": s, "power": np.log(s), "shortfall": -np.log1p(-s)}
    rows = []
    for domain, link in (("gumbel", "softmax"), ("frechet", "power"), ("weibull", "shortfall")):
        # survival probability of the best of the attempts: the noise is its inverse
        tail = -np.expm1(np.log(rng.random((draws, len(s)))) / attempts)
        if domain == "gumbel":
            result = s - 0.3 * np.log(tail)
        elif domain == "frechet":
            result = s * tail ** (-1 / 2)
        else:
            result = 1 - (1 - s) * tail ** (1 / 0.8)
        share = np.bincount(result.argmax(1), minlength=len(s)) / draws
        row: dict[str, Any] = {"domain": domain, "link": link, "shares": share.tolist()}
        for name, x in features.items():
            slope = float(match_mean(x, share @ x))
            fitted = softmax(slope * x)
            divergence = float((share * np.log(np.maximum(share, 1e-300) / fitted)).sum())
            row[name] = {"slope": slope, "divergence": divergence, "probabilities": fitted.tolist()}
        rows.append(row)
    return rows


def match_mean(x: Array, mean: "float | Array") -> Array:
    """Slope at which ``softmax(slope * x)`` has these means of x: the maximum of the likelihood, by Newton's method.

    Args:
        x: A feature of each candidate (C,).
        mean: Its mean over winners, strictly between its extremes; any shape.
    """
    mean = np.asarray(mean, np.float64)
    if (mean <= x.min()).any() or (mean >= x.max()).any():
        raise ValueError("all winners are the same extreme candidate: the slope is unbounded; draw more of them")
    slope = np.zeros(mean.shape)
    for _ in range(200):
        p = softmax(slope[..., None] * x, axis=-1)
        step = np.clip((mean - p @ x) / _variance(x, p), -2 / np.ptp(x), 2 / np.ptp(x))
        slope = slope + step
        if np.abs(step).max() < 1e-10:
            break
    return slope


def _variance(x: Array, p: Array) -> Array:
    return p @ x**2 - (p @ x) ** 2
