"""Peaks over threshold: is there an endpoint above the largest scores, and where?

The excesses ``y = s - u`` of scores over a high threshold follow a generalised Pareto distribution (GPD) with
shape ``xi`` and scale ``sigma``; ``xi < 0`` means that scores end at ``u - sigma / xi``. The location is fixed at 0: a
fit that may move it returns the wrong sign of ``xi`` (scipy#20094).

With ``a = xi / sigma`` both profiles of the likelihood are functions of ``a`` alone: the best shape given the endpoint
``-1 / a`` is ``mean log(1 + a y)`` (Grimshaw, Technometrics 1993), and the shape whose best scale is ``xi / a``
is ``1 / mean(1 / (1 + a y)) - 1``, which is above -1 for every ``a``. So the unbounded likelihood below -1 is never
met, and because the whole curve is searched no starting value can lead astray.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import chi2

Array = np.ndarray
MIN_EXCESSES = 50
_AS_IF_INDEPENDENT, _OVER_ANCHORS = "profile likelihood, as if independent", "bootstrap over anchors"
_SHAPE_LIMIT = 0.995  # a likelihood that is largest nearer to -1 or 1 than this has no maximum inside


@dataclass(frozen=True)
class PotFit:
    """A generalised Pareto fit of the excesses over a threshold; every parameter is None where not ``estimable``.

    Attributes:
        n: Finite scores.
        excesses: Scores above the threshold.
        ties: Excesses that repeat the value of another.
        at_cap: Scores within 1e-6 of the cap.
        non_finite: NaN and infinite scores, left out.
        threshold: The threshold u, None without a finite score.
        cap: Largest possible score, to compare the endpoint with (None: unbounded).
        confidence: Level of the intervals.
        intervals: How the intervals were made.
        estimable: Whether there is a fit.
        reason: One sentence that says why not, empty otherwise.
        shape: Shape xi in (-1, 1).
        shape_interval: Its interval.
        scale: Scale sigma, in units of the scores.
        endpoint: Largest score the fit allows, ``inf`` for a shape of at least 0.
        endpoint_interval: Its interval.
        exponential_scale: Scale of the exponential (Gumbel domain) fitted on its own, the mean excess.
        likelihood_ratio: Twice the gain in log-likelihood of the GPD over that exponential.
        p_value: Probability of so large a ratio for exponential excesses (chi-square, one degree of freedom).
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
        shape, scale = self._parameters(model)
        y = np.asarray(y, np.float64)
        inside = np.maximum(1 + shape * y / scale, 1e-300)
        log_tail = _log_survival(y, shape, scale)
        return np.where((y >= 0) & (inside > 1e-300), np.exp(log_tail) / (scale * inside), 0.0)

    def quantiles(self, p: Array, model: Literal["gpd", "exponential"] = "gpd") -> Array:
        """Excesses that a share ``p`` of excesses stays below, under the GPD or the exponential."""
        return _quantiles(np.asarray(p, np.float64), *self._parameters(model))

    def to_json(self) -> dict[str, Any]:
        """The fields as a dict for ``json.dump``; an infinite endpoint is None."""
        return {key: _jsonable(value) for key, value in asdict(self).items()} | {"domain": self.domain}

    def _parameters(self, model: str) -> tuple[float, float]:
        if self.shape is None or self.scale is None or self.exponential_scale is None:
            raise ValueError(f"there is no fit: {self.reason}")
        return (self.shape, self.scale) if model == "gpd" else (0.0, self.exponential_scale)


def fit_pot(
    scores: Array,
    *,
    quantile: float = 0.99,
    threshold: float | None = None,
    cap: float | None = 1.0,
    confidence: float = 0.95,
    bootstrap: int = 200,
    groups: Array | None = None,
    seed: int = 0,
) -> PotFit:
    """Fit a generalised Pareto distribution to the excesses of ``scores`` over a threshold.

    Args:
        scores: Scores (n,); or excesses, with ``threshold=0``. Non-finite ones are counted and left out.
        quantile: The threshold is this quantile of the finite scores.
        threshold: Threshold in units of the scores, in place of ``quantile``.
        cap: Largest possible score; a sample that piles up there is refused.
        confidence: Level of the intervals.
        bootstrap: Samples of the bootstrap over anchors and of the goodness of fit (0: neither).
        groups: Anchor of each score (n,). A sentence occurs in many pairs, so that its scores depend on each other:
            with ``groups`` whole anchors are resampled, without it the intervals are those of independent scores.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: An argument is out of range. A sample that cannot be fitted does not raise, see ``reason``.
    """
    if not 0 < quantile < 1 or not 0 < confidence < 1:
        raise ValueError("quantile and confidence must be between 0 and 1")
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or (groups is not None and np.shape(groups) != scores.shape):
        raise ValueError("scores must be one-dimensional, and groups of the same length")
    finite = np.isfinite(scores)
    kept = scores[finite]
    if threshold is None and len(kept):
        threshold = float(np.quantile(kept, quantile))
    u = math.inf if threshold is None else threshold
    above = kept > u
    y = kept[above] - u
    resampled = groups is not None and bootstrap > 0
    facts: dict[str, Any] = {
        "n": len(kept),
        "excesses": len(y),
        "ties": len(y) - len(np.unique(y)),
        "at_cap": 0 if cap is None else int((abs(kept[above] - cap) <= 1e-6).sum()),
        "non_finite": len(scores) - len(kept),
        "threshold": threshold,
        "cap": cap,
        "confidence": confidence,
        "intervals": _OVER_ANCHORS if resampled else _AS_IF_INDEPENDENT,
    }
    if reason := _refusal(kept, y, facts["at_cap"]):
        return PotFit(**facts, reason=reason)
    unit = float(y.max())
    profile = _Profile(y / unit)
    best = profile.maximum()
    shape, inverse = profile.shape(best), profile.inverse(best)
    if not -_SHAPE_LIMIT < shape < _SHAPE_LIMIT:
        side = -1 if shape < 0 else 1
        return PotFit(**facts, reason=f"The shape runs to {side}, where the likelihood has no maximum: not estimable.")
    scale = unit * shape / inverse
    exponential = float(y.mean())
    gain = max(2 * len(y) * (profile.by_shape(best) + math.log(exponential / unit) + 1), 0.0)
    rng = np.random.default_rng(seed)
    if resampled:
        anchors = np.unique(np.asarray(groups)[finite], return_inverse=True)[1]
        shapes, ends = _resample(profile, best, anchors, above, bootstrap, rng)
        tails = [(1 - confidence) / 2, (1 + confidence) / 2]
        shape_interval = np.quantile(shapes, tails)
        end_interval = np.quantile(ends, tails, method="nearest")
    else:
        drop = chi2.ppf(confidence, 1) / (2 * len(y))
        shape_interval = np.array([profile.shape(t) for t in profile.crossings(profile.by_shape, best, drop)])
        end_interval = np.array([profile.end(t) for t in profile.crossings(profile.by_end, best, drop)])
    return PotFit(
        **facts,
        estimable=True,
        shape=shape,
        shape_interval=(float(shape_interval[0]), float(shape_interval[1])),
        scale=scale,
        endpoint=u + unit * profile.end(best),
        endpoint_interval=(u + unit * float(end_interval[0]), u + unit * float(end_interval[1])),
        exponential_scale=exponential,
        likelihood_ratio=gain,
        p_value=float(chi2.sf(gain, 1)),
        goodness_p=_goodness(y, shape, scale, bootstrap, rng) if bootstrap else None,
    )


def threshold_stability(
    scores: Array,
    quantiles: Sequence[float] = (0.9, 0.925, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998),
    **options: Any,
) -> list[dict[str, Any]]:
    """The shape at several thresholds: a threshold is high enough where the shape stays put above it.

    Args:
        scores: Scores (n,).
        quantiles: Quantiles to put the threshold at.
        **options: Of :func:`fit_pot`; ``bootstrap`` counts only with ``groups``.

    Returns:
        A row per quantile: quantile, threshold, excesses, shape, low, high, and the reason where there is no shape.
    """
    if options.get("groups") is None:
        options["bootstrap"] = 0
    rows: list[dict[str, Any]] = []
    for quantile in quantiles:
        fit = fit_pot(scores, quantile=quantile, **options)
        low, high = fit.shape_interval or (None, None)
        rows.append(
            {"quantile": quantile, "threshold": fit.threshold, "excesses": fit.excesses}
            | {"shape": fit.shape, "low": low, "high": high, "reason": fit.reason}
        )
    return rows


def mean_residual_life(
    scores: Array, quantiles: Sequence[float] = tuple(np.linspace(0.9, 0.999, 34)), confidence: float = 0.95
) -> list[dict[str, Any]]:
    """Mean excess over rising thresholds: a falling line for a bounded tail, level for an exponential one.

    Intervals are those of a mean of independent excesses. Thresholds with fewer than 10 excesses are left out.

    Returns:
        A row per quantile: quantile, threshold, excesses, mean, low, high.
    """
    scores = np.asarray(scores, np.float64)
    scores = np.sort(scores[np.isfinite(scores)])
    width = math.sqrt(chi2.ppf(confidence, 1))
    rows = []
    for quantile in quantiles if len(scores) else ():
        threshold = float(np.quantile(scores, quantile))
        y = scores[np.searchsorted(scores, threshold, "right") :] - threshold
        if len(y) >= 10:
            mean, error = float(y.mean()), width * float(y.std(ddof=1)) / math.sqrt(len(y))
            rows.append(
                {"quantile": float(quantile), "threshold": threshold, "excesses": len(y)}
                | {"mean": mean, "low": mean - error, "high": mean + error}
            )
    return rows


class _Profile:
    """Mean log-likelihood of excesses with maximum 1 along ``a = exp(t) - 1``; ``t -> -inf`` is the endpoint 1."""

    def __init__(self, y: Array, weights: Array | None = None) -> None:
        self.y, self.weights = y, weights

    def _mean(self, values: Array) -> float:
        return float(values.mean() if self.weights is None else values @ self.weights)

    def inverse(self, t: float) -> float:
        """The parameter ``a``, kept off 0, where formulas are continuous but divide by it."""
        return math.expm1(t) if abs(t) > 1e-9 else 1e-9

    def shape(self, t: float) -> float:
        """The shape whose best scale is ``shape / a``, in (-1, inf), increasing in t."""
        a = self.inverse(t)
        inner = 1 / (1 + a * self.y)
        return self._mean(a * self.y * inner) / self._mean(inner)

    def end(self, t: float) -> float:
        """The endpoint, infinite for ``a >= 0``."""
        return -1 / math.expm1(t) if t < 0 else math.inf

    def by_shape(self, t: float) -> float:
        """Profile of the shape: the mean log-likelihood at its best scale."""
        a, shape = self.inverse(t), self.shape(t)
        return math.log(a / shape) - (1 / shape + 1) * self._mean(np.log1p(a * self.y))

    def by_end(self, t: float) -> float:
        """Profile of the endpoint: the mean log-likelihood at its best shape, which is kept above -1."""
        a = self.inverse(t)
        mean_log = self._mean(np.log1p(a * self.y))
        shape = max(mean_log, -1.0)
        return math.log(a / shape) - (1 / shape + 1) * mean_log

    def maximum(self, near: float | None = None) -> float:
        """The t of the largest likelihood, over the whole curve or within 2 of ``near``."""
        grid = np.arange(-20.0, 20.0) if near is None else near + np.arange(-2.0, 3.0)
        peak = min(max(int(np.argmax([self.by_shape(t) for t in grid])), 1), len(grid) - 2)
        bounds = (grid[peak - 1], grid[peak + 1])
        options = {"xatol": 1e-7 if near is None else 1e-3}
        return float(minimize_scalar(lambda t: -self.by_shape(t), bounds=bounds, method="bounded", options=options).x)

    def crossings(self, profile: Callable[[float], float], best: float, drop: float) -> tuple[float, float]:
        """Where ``profile`` has fallen by ``drop`` on either side of its maximum; the end of the curve if nowhere."""
        level = profile(best) - drop
        found = []
        for sign in (-1, 1):
            step = 0.25
            while step < 40 and profile(best + sign * step) > level:
                step *= 2
            outer = best + sign * min(step, 40)
            crosses = profile(outer) < level
            found.append(brentq(lambda t: profile(t) - level, best, outer, xtol=1e-6) if crosses else outer)
        return found[0], found[1]


def _refusal(scores: Array, y: Array, at_cap: int) -> str:
    """Why there can be no fit of the excesses ``y``, in one sentence; empty if there can."""
    n, m = len(scores), len(y)
    if n and scores.min() == scores.max():
        return f"All {n} scores are equal."
    if m < MIN_EXCESSES:
        remedy = (
            f"a quantile of at most {math.floor(1e4 * (1 - MIN_EXCESSES / n)) / 1e4:g} leaves them"
            if n > 2 * MIN_EXCESSES
            else "more scores are needed"
        )
        return f"{m} of {n} scores are above the threshold and a fit needs {MIN_EXCESSES}: {remedy}."
    tied = max(at_cap, int((y == y.max()).sum()))
    if tied > 0.05 * m:
        where = "are at the cap" if tied == at_cap else "share the largest value"
        return f"{tied} of {m} excesses {where}, which no continuous distribution allows: leave duplicates out."
    return ""


def _log_survival(y: Array, shape: float, scale: float) -> Array:
    if shape == 0:
        return -y / scale
    return -np.log1p(np.maximum(shape * y / scale, np.nextafter(-1, 0))) / shape


def _quantiles(p: Array, shape: float, scale: float) -> Array:
    return -scale * np.log1p(-p) if shape == 0 else scale * np.expm1(-shape * np.log1p(-p)) / shape


def _resample(
    profile: _Profile, best: float, anchors: Array, above: Array, repeats: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Shape and endpoint (in the unit of the profile) of samples in which whole anchors are drawn with replacement."""
    count = int(anchors.max()) + 1
    shapes, ends = [], []
    for _ in range(repeats):
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)[anchors[above]]
        used = drawn > 0
        sample = _Profile(profile.y[used], drawn[used] / max(drawn.sum(), 1))
        t = sample.maximum(near=best)
        shapes.append(sample.shape(t))
        ends.append(sample.end(t))
    return np.array(shapes), np.array(ends)


def _anderson_darling(y: Array, shape: float, scale: float) -> float:
    tail = _log_survival(np.sort(y), shape, scale)
    body = np.log(-np.expm1(np.minimum(tail, -1e-300)))
    m = len(y)
    return float(-m - (2 * np.arange(1, m + 1) - 1) @ (body + tail[::-1]) / m)


def _goodness(y: Array, shape: float, scale: float, repeats: int, rng: np.random.Generator) -> float:
    """Share of samples of the fit, each fitted again, whose Anderson-Darling statistic is at least that of ``y``.

    The statistic's distribution depends on the shape and hardly on the size, so that 1,000 excesses a sample suffice.
    """
    observed, larger = _anderson_darling(y, shape, scale), 1
    for _ in range(repeats):
        sample = _quantiles(rng.random(min(len(y), 1000)), shape, 1.0)
        sample /= sample.max()
        profile = _Profile(sample)
        t = profile.maximum()
        xi = profile.shape(t)
        larger += _anderson_darling(sample, xi, xi / profile.inverse(t)) >= observed
    return larger / (repeats + 1)


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
