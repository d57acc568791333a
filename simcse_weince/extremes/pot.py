"""Peaks over threshold: is there an endpoint above the largest scores, and where?

The excesses ``y = s - u`` of scores over a high threshold follow a generalised Pareto distribution (GPD) with
shape ``xi`` and scale ``sigma``; ``xi < 0`` means that scores end at ``u - sigma / xi``. The location is fixed at 0: a
fit that may move it returns the wrong sign of ``xi`` (scipy#20094).

With ``a = xi / sigma`` both profiles of the likelihood are functions of ``a`` alone: the best shape given the endpoint
``-1 / a`` is ``mean log(1 + a y)`` (Grimshaw, Technometrics 1993), and the shape whose best scale is ``xi / a`` is
``1 / mean(1 / (1 + a y)) - 1``, always above -1. So the unbounded likelihood below -1 is never met, and because the
whole curve is searched no starting value can lead astray.

Below a shape of -1/2 the largest excesses decide and the plain profile interval is too narrow. The one given here is of
the likelihood with the scale integrated out (Laplace's method under ``d sigma / sigma``: the likelihood of the ratios
of excesses). The endpoint has its plain profile. Coverage of both: scripts/benchmarks/pot_coverage.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import chi2, genpareto

Array = np.ndarray
MIN_EXCESSES = 50


@dataclass(frozen=True)
class PotFit:
    """A generalised Pareto fit of the excesses over a threshold; every parameter is None where not ``estimable``.

    Attributes:
        n, excesses: Finite scores, and those above the threshold.
        ties, at_cap: Excesses that repeat the value of another, and scores within 1e-6 of the cap.
        non_finite: NaN and infinite scores, left out.
        threshold, cap: The threshold u (None without a finite score), and the largest possible score.
        confidence, intervals: Level of the intervals, and how they were made.
        reason: One sentence that says why there is no fit, empty otherwise.
        shape, scale: Shape xi in (-1, 1), and scale sigma in units of the scores.
        endpoint: Largest score the fit allows, ``inf`` for a shape of at least 0.
        exponential_scale: Scale of the exponential (Gumbel domain) fitted on its own, the mean excess.
        likelihood_ratio: Twice the gain in log-likelihood of the GPD over that exponential.
        p_value: Probability of so large a ratio for independent exponential excesses (chi-square with 1 degree).
        goodness_p: p-value of the Anderson-Darling test of the GPD, by parametric bootstrap, as if independent.
    """

    n: int
    excesses: int
    ties: int
    at_cap: int
    non_finite: int
    threshold: float | None
    cap: float | None
    confidence: float
    intervals: str
    estimable: bool = False
    reason: str = ""
    shape: float | None = None
    shape_interval: tuple[float, float] | None = None
    scale: float | None = None
    endpoint: float | None = None
    endpoint_interval: tuple[float, float] | None = None
    exponential_scale: float | None = None
    likelihood_ratio: float | None = None
    p_value: float | None = None
    goodness_p: float | None = None

    @property
    def domain(self) -> Literal["weibull", "gumbel", "frechet"] | None:
        """Domain of attraction that the interval of the shape allows; "gumbel" where it holds 0."""
        if self.shape_interval is None:
            return None
        low, high = self.shape_interval
        return "weibull" if high < 0 else "frechet" if low > 0 else "gumbel"

    def density(self, y: Array, model: Literal["gpd", "exponential"] = "gpd") -> Array:
        """Density of the excesses ``y`` under the GPD or under the exponential fitted on its own."""
        return self._distribution(model).pdf(y)

    def quantiles(self, p: Array, model: Literal["gpd", "exponential"] = "gpd") -> Array:
        """Excess that a share ``p`` of excesses stays below, under the GPD or the exponential."""
        return self._distribution(model).ppf(p)

    def to_json(self) -> dict[str, Any]:
        """The fields as a dict for ``json.dump``; an infinite endpoint is None."""
        record = asdict(self) | {"domain": self.domain}
        if self.endpoint_interval is not None:
            ends = [end if math.isfinite(end) else None for end in (self.endpoint or 0.0, *self.endpoint_interval)]
            record |= {"endpoint": ends[0], "endpoint_interval": ends[1:]}
        return record

    def _distribution(self, model: str) -> Any:
        if not self.estimable:
            raise ValueError(f"there is no fit: {self.reason}")
        return genpareto(self.shape, scale=self.scale) if model == "gpd" else genpareto(0, scale=self.exponential_scale)


def fit_pot(
    scores: Array,
    *,
    quantile: float = 0.99,
    threshold: float | None = None,
    total: int | None = None,
    cap: float | None = 1.0,
    confidence: float = 0.95,
    bootstrap: int = 200,
    groups: Array | None = None,
    seed: int = 0,
) -> PotFit:
    """Fit a generalised Pareto distribution to the excesses of ``scores`` over a threshold.

    Args:
        scores: Scores (n,); or excesses, with ``threshold=0``. Non-finite ones are counted and left out.
        quantile: The threshold is this quantile of the finite scores, or of ``total`` scores.
        threshold: Threshold in units of the scores, in place of ``quantile``.
        total: How many scores there are, where ``scores`` are only the largest of them. A quantile below all that are
            given is the smallest of them.
        cap: Largest possible score; a sample that piles up there is refused.
        confidence: Level of the intervals.
        bootstrap: Samples of the bootstrap over ``groups`` and of the goodness of fit (0: neither).
        groups: The anchor of each score (n,), or both members of its pair (n, 2). A sentence occurs in many pairs, so
            that its scores depend on each other: with ``groups`` whole anchors or members are resampled, without it
            the intervals are those of independent scores. A pair, to be given once, counts as often as one member
            times as often as the other (pigeonhole bootstrap; Owen, Annals of Applied Statistics 2007): rather too
            wide than too narrow, because the variance of single pairs enters up to three times.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: An argument is out of range. A sample that cannot be fitted does not raise, see ``reason``.
    """
    scores = np.asarray(scores, np.float64)
    if not 0 < quantile < 1 or not 0 < confidence < 1:
        raise ValueError("quantile and confidence must be between 0 and 1")
    groups = None if groups is None else np.asarray(groups)
    if scores.ndim != 1 or (groups is not None and groups.shape not in (scores.shape, (len(scores), 2))):
        raise ValueError("scores must be one-dimensional, and groups of the same length, with one or two columns")
    finite = np.isfinite(scores)
    kept = scores[finite]
    total = len(kept) if total is None else total
    if total < len(kept):
        raise ValueError(f"total must be at least the number of scores, {len(kept)}, got {total}")
    if threshold is None and len(kept):
        threshold = float(np.quantile(kept, max(0.0, 1 - (1 - quantile) * (total / len(kept)))))
    u = math.inf if threshold is None else threshold
    above = kept > u
    y = kept[above] - u
    at_cap = 0 if cap is None else int((abs(kept - cap) <= 1e-6).sum())
    facts: dict[str, Any] = {"n": len(kept), "excesses": len(y), "ties": len(y) - len(np.unique(y)), "at_cap": at_cap}
    facts |= {"non_finite": len(scores) - len(kept), "threshold": threshold, "cap": cap, "confidence": confidence}
    facts["intervals"] = "profile likelihood, as if independent"
    if groups is not None and bootstrap:
        facts["intervals"] = f"bootstrap over {'anchors' if groups.ndim == 1 else 'both members of the pairs'}"
    if reason := _refusal(kept, y, at_cap, total, u):
        return PotFit(**facts, reason=reason)
    unit = float(y.max())
    profile = _Profile(y / unit)
    best = profile.maximum(profile.by_shape)
    shape, inverse = profile.shape(best), profile.inverse(best)
    if abs(shape) > 0.995:  # the end of the curve, not a maximum inside
        return PotFit(**facts, reason=f"The shape runs to {np.sign(shape):.0f}, where it is not estimable.")
    scale, mean = unit * shape / inverse, float(y.mean())
    gain = max(2 * len(y) * (profile.by_shape(best) + math.log(mean / unit) + 1), 0.0)
    rng = np.random.default_rng(seed)
    if groups is not None and bootstrap:
        samples = _resample(profile, best, groups[finite][above], bootstrap, rng)
        levels = [(1 - confidence) / 2, (1 + confidence) / 2]
        (low, high), (start, end) = np.quantile(samples, levels, axis=0, method="nearest").T
    else:
        drop = chi2.ppf(confidence, 1) / (2 * len(y))
        adjusted = partial(profile.by_shape, adjusted=True)
        peak = profile.maximum(adjusted, near=best)
        low, high = (profile.shape(t) for t in profile.interval(adjusted, peak, drop))
        start, end = (profile.end(t) for t in profile.interval(profile.by_end, best, drop))
    facts |= {"shape": shape, "shape_interval": (float(low), float(high)), "scale": scale, "exponential_scale": mean}
    facts["endpoint"] = u + unit * profile.end(best)
    facts["endpoint_interval"] = (float(u + unit * start), float(u + unit * end))
    facts |= {"likelihood_ratio": gain, "p_value": float(chi2.sf(gain, 1))}
    if bootstrap:
        facts["goodness_p"] = _goodness(y, shape, scale, bootstrap, rng)
    return PotFit(**facts, estimable=True)


def threshold_stability(
    scores: Array, quantiles: Sequence[float] = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998), **options: Any
) -> list[dict[str, Any]]:
    """The shape at several thresholds: a threshold is high enough where the shape stays put above it.

    Options are those of :func:`fit_pot`; ``bootstrap`` counts only with ``groups``.

    Returns:
        A row per quantile: quantile, threshold, excesses, shape, low, high, and the reason where there is no shape.
    """
    if options.get("groups") is None:
        options["bootstrap"] = 0
    rows: list[dict[str, Any]] = []
    for quantile in quantiles:
        fit = fit_pot(scores, quantile=quantile, **options)
        low, high = fit.shape_interval or (None, None)
        row = {"quantile": quantile, "threshold": fit.threshold, "excesses": fit.excesses, "shape": fit.shape}
        rows.append(row | {"low": low, "high": high, "reason": fit.reason})
    return rows


def mean_residual_life(
    scores: Array, quantiles: Sequence[float] = tuple(np.linspace(0.9, 0.999, 34)), *, total: int | None = None
) -> list[dict[str, float]]:
    """Mean excess over rising thresholds: a falling line for a bounded tail, level for an exponential one.

    Args:
        scores: Scores (n,); non-finite ones are left out.
        quantiles: Of the finite scores, or of ``total`` scores.
        total: How many scores there are, where ``scores`` are only the largest of them.

    Returns:
        A row per quantile with at least 10 excesses: quantile, threshold, excesses, mean, and low and high of the 95 %
        interval of a mean of independent excesses.
    """
    scores = np.asarray(scores, np.float64)
    scores = np.sort(scores[np.isfinite(scores)])
    rows = []
    for quantile in quantiles if len(scores) else ():
        among = max(0.0, 1 - (1 - quantile) * (total or len(scores)) / len(scores))
        threshold = float(np.quantile(scores, among))
        y = scores[np.searchsorted(scores, threshold, "right") :] - threshold
        if len(y) >= 10:
            mean, error = float(y.mean()), 1.96 * float(y.std(ddof=1)) / math.sqrt(len(y))
            row = {"quantile": float(quantile), "threshold": threshold, "excesses": len(y), "mean": mean}
            rows.append(row | {"low": mean - error, "high": mean + error})
    return rows


class _Profile:
    """Mean log-likelihood of excesses with maximum 1 along ``a = exp(t) - 1``; ``t -> -inf`` is the endpoint 1."""

    def __init__(self, y: Array, weights: Array | None = None) -> None:
        self.y, self.weights = y, np.full(len(y), 1 / len(y)) if weights is None else weights

    def inverse(self, t: float) -> float:
        """The parameter ``a``, kept off 0, where formulas are continuous but divide by it."""
        return math.expm1(t) if abs(t) > 1e-6 else 1e-6

    def shape(self, t: float) -> float:
        """The shape whose best scale is ``shape / a``, in (-1, inf), increasing in t."""
        return 1 / float(1 / (1 + self.inverse(t) * self.y) @ self.weights) - 1

    def end(self, t: float) -> float:
        """The endpoint, infinite for ``a >= 0``."""
        return -1 / math.expm1(t) if t < 0 else math.inf

    def by_shape(self, t: float, adjusted: bool = False) -> float:
        """Profile of the shape at its best scale; ``adjusted``: with the scale integrated out instead (Laplace)."""
        a = self.inverse(t)
        inner = 1 / (1 + a * self.y)
        mean = float(inner @ self.weights)
        shape = 1 / mean - 1
        value = math.log(a / shape) + (1 / shape + 1) * float(np.log(inner) @ self.weights)
        if adjusted:  # information on log sigma
            value -= math.log((1 / shape + 1) * (mean - inner * inner @ self.weights)) / (2 * len(self.y))
        return value

    def by_end(self, t: float) -> float:
        """Profile of the endpoint: the mean log-likelihood at its best shape, which is kept above -1."""
        a, mean_log = self.inverse(t), float(np.log(1 + self.inverse(t) * self.y) @ self.weights)
        shape = max(mean_log, -1.0)
        return math.log(a / shape) - (1 / shape + 1) * mean_log

    def maximum(self, profile: Callable[[float], float], near: float | None = None, precision: float = 1e-7) -> float:
        """The t of the largest value, over the whole curve or within 2 of ``near``."""
        grid = np.arange(-20.0, 21.0, 2.0) if near is None else near + np.arange(-2.0, 3.0)
        peak = min(max(int(np.argmax([profile(t) for t in grid])), 1), len(grid) - 2)
        bounds, options = (grid[peak - 1], grid[peak + 1]), {"xatol": precision}
        return float(minimize_scalar(lambda t: -profile(t), bounds=bounds, method="bounded", options=options).x)

    def interval(self, profile: Callable[[float], float], peak: float, drop: float) -> tuple[float, float]:
        """The t where ``profile`` has fallen by ``drop`` below its peak, to both sides; -30 or 30 if nowhere."""
        level, ends = profile(peak) - drop, []
        for end in (-30.0, 30.0):
            crosses = profile(end) < level
            ends.append(brentq(lambda t: profile(t) - level, peak, end, xtol=1e-6) if crosses else end)
        return ends[0], ends[1]


def _refusal(scores: Array, y: Array, at_cap: int, total: int, threshold: float) -> str:
    """Why there can be no fit of the excesses ``y``, in one sentence; empty if there can."""
    n, m = len(scores), len(y)
    if n >= MIN_EXCESSES and scores.min() == scores.max():  # of fewer it is no wonder
        return f"The {n} largest of {total} scores are equal."
    tied = int((scores == threshold).sum())
    if m < MIN_EXCESSES <= tied:
        where = "are at the cap" if at_cap >= tied else "equal the threshold"
        return f"{tied} of {total} scores {where}, which no continuous distribution allows: leave duplicates out."
    if m < MIN_EXCESSES:
        lower = math.floor(1e4 * (1 - MIN_EXCESSES / max(total, 1))) / 1e4
        enough = n > MIN_EXCESSES and lower >= 0.5
        remedy = f"a quantile of at most {lower:g} leaves them" if enough else "too few rows, give more"
        return f"{m} of {total} scores are above the threshold and a fit needs {MIN_EXCESSES}: {remedy}."
    tied = max(at_cap, int((y == y.max()).sum()))
    if tied > 0.05 * m:
        where = "are at the cap" if tied == at_cap else "share the largest value"
        return f"{tied} of {m} excesses {where}, which no continuous distribution allows: leave duplicates out."
    return ""


def _resample(profile: _Profile, best: float, groups: Array, repeats: int, rng: np.random.Generator) -> Array:
    """Shape and endpoint (repeats, 2), in units of the largest excess, of samples in which groups are drawn again.

    Only groups that occur are drawn: others have no weight, and shares of weights are all that a fit knows.
    """
    members = np.unique(groups, return_inverse=True)[1].reshape(len(groups), -1)
    count = int(members.max()) + 1
    found: list[tuple[float, float]] = []
    while len(found) < repeats:
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)[members].prod(1)
        if not drawn.any():  # no pair has both its members in this sample
            continue
        sample = _Profile(profile.y[drawn > 0], drawn[drawn > 0] / drawn.sum())
        t = sample.maximum(sample.by_shape, best, 1e-3)
        found.append((sample.shape(t), sample.end(t)))
    return np.array(found)


def _anderson_darling(y: Array, shape: float, scale: float) -> float:
    log_tail = genpareto.logsf(np.sort(y), shape, scale=scale)
    odd = 2 * np.arange(len(y)) + 1
    return float(-len(y) - odd @ (np.log(-np.expm1(log_tail)) + log_tail[::-1]) / len(y))


def _goodness(y: Array, shape: float, scale: float, repeats: int, rng: np.random.Generator) -> float:
    """Share of samples of the fit, each fitted again, whose Anderson-Darling statistic is at least that of ``y``.

    The statistic's distribution depends on the shape and hardly on the size, so that 1,000 excesses a sample suffice.
    """
    observed, larger = _anderson_darling(y, shape, scale), 1
    for _ in range(repeats):
        sample = genpareto.rvs(shape, size=min(len(y), 1000), random_state=rng)
        sample /= sample.max()
        profile = _Profile(sample)
        t = profile.maximum(profile.by_shape, precision=1e-4)
        refitted = profile.shape(t)
        larger += _anderson_darling(sample, refitted, refitted / profile.inverse(t)) >= observed
    return larger / (repeats + 1)
