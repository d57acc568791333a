"""Which link do winners follow: softmax, power or shortfall, and how far between softmax and shortfall?

Every link of :mod:`simcse_weince.links` is linear in a function of the score, so that the log-likelihood of winners,
``log P(winner) = c . x_winner - log sum_j exp(c . x_j)`` over the candidates of an anchor, is concave:

    softmax    x = s                          slope theta
    power      x = log s                      exponent alpha, scores above 0
    shortfall  x = -log(1 - s + floor)        shape beta, scores up to 1
    nested     both of softmax and shortfall  (theta (1 - lambda), theta lambda), neither below 0
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.special import logsumexp
from scipy.stats import chi2

Array = np.ndarray
MIN_ANCHORS = 50
SINGLE_LINKS = ("softmax", "power", "shortfall")


@dataclass(frozen=True)
class LinkChoice:
    """The links of the trichotomy fitted to winners; parameters are None where not ``estimable``.

    Attributes:
        anchors: Anchors used, held out ones included.
        left_out: Rows without a winner or without a second candidate.
        held_out_anchors: Anchors on which the links are compared.
        confidence: Level of the interval.
        estimable: Whether there is a fit.
        reason: One sentence that says why not, empty otherwise.
        slopes: Slope of each link by name ("nested": theta); a link that the scores do not allow is absent.
        blend: lambda of the nested link in [0, 1]: 0 is the softmax, 1 the shortfall link.
        blend_interval: Its interval, by bootstrap over anchors.
        likelihood_ratio: Twice the gain in log-likelihood of the nested link over the softmax.
        p_value: Probability of so large a ratio if winners follow the softmax, which is on the boundary: half 0,
            half chi-square with one degree of freedom.
        held_out: Held-out log-likelihood per anchor of each link, in nats.
        best: Link of the largest held-out log-likelihood; "nested" only if it gains more than two standard errors.
    """

    anchors: int
    left_out: int
    held_out_anchors: int
    confidence: float
    estimable: bool = False
    reason: str = ""
    slopes: dict[str, float] = field(default_factory=dict)
    blend: float | None = None
    blend_interval: tuple[float, float] | None = None
    likelihood_ratio: float | None = None
    p_value: float | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    best: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as a dict for ``json.dump``."""
        return asdict(self)


def choose_link(
    scores: Array,
    winner: "int | Array" = 0,
    *,
    bootstrap: int = 200,
    held_out: float = 0.3,
    confidence: float = 0.95,
    floor: float = 1e-4,
    groups: Array | None = None,
    seed: int = 0,
) -> LinkChoice:
    """Fit softmax, power, shortfall and nested link to the winners among candidates, by maximum likelihood.

    Args:
        scores: Scores of the candidates (A, C); NaN and infinite ones are absent candidates.
        winner: Column of the winner, one for all anchors or (A,).
        bootstrap: Samples for the interval of lambda, each one Newton step from the estimate (0: no interval).
        held_out: Share of the anchors on which the links are compared and not fitted.
        confidence: Level of the interval.
        floor: Floor of the shortfall, as in the criterion.
        groups: Rows with the same number (A,) are held out and resampled together; by default each row alone.
        seed: Seed of the split and of the bootstrap.

    Raises:
        ValueError: An argument is out of range. Winners that cannot be fitted do not raise, see ``reason``.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2:
        raise ValueError("scores must have two dimensions, anchors and candidates")
    if not 0 < held_out < 1 or not 0 < confidence < 1:
        raise ValueError("held_out and confidence must be between 0 and 1")
    columns = np.broadcast_to(np.asarray(winner), len(scores))
    if len(scores) and not (0 <= columns.min() and columns.max() < scores.shape[1]):
        raise ValueError("winner must name columns of scores")
    present = np.isfinite(scores)
    usable = present[np.arange(len(scores)), columns] & (present.sum(1) > 1)
    scores, present, columns = scores[usable], present[usable], columns[usable]
    labels = np.arange(len(usable)) if groups is None else np.asarray(groups)
    groups = np.unique(labels[usable], return_inverse=True)[1]
    rng = np.random.default_rng(seed)
    order = rng.permutation(groups.max() + 1) if len(scores) else np.empty(0, int)
    test = np.isin(groups, order[: round(held_out * len(order))])
    facts: dict[str, Any] = {
        "anchors": len(scores),
        "left_out": int((~usable).sum()),
        "held_out_anchors": int(test.sum()),
        "confidence": confidence,
    }
    won = scores[np.arange(len(scores)), columns][:, None]
    excess = np.where(present, scores - won, -np.inf)[~test]
    if min(len(excess), test.sum()) < MIN_ANCHORS:
        return LinkChoice(**facts, reason=f"Fewer than {MIN_ANCHORS} anchors to fit on or to compare on.")
    if (excess <= 0).all():
        return LinkChoice(**facts, reason="The winner has the highest score for every anchor: slopes are unbounded.")
    features = {"softmax": scores}
    if scores[present].min() > 0:
        features["power"] = np.log(scores, where=present, out=np.zeros_like(scores))
    if scores[present].max() <= 1 + 1e-3:
        features["shortfall"] = -np.log(np.maximum(1 - np.where(present, scores, 0), 0) + floor)
    models = {name: [name] for name in features}
    if "shortfall" in features:
        models["nested"] = ["softmax", "shortfall"]
    slopes, compared, fitted = {}, {}, {}
    for name, names in models.items():
        x = np.stack([features[n] - np.take_along_axis(features[n], columns[:, None], 1) for n in names], -1)
        train = _Winners(x[~test], present[~test])
        c = _edges_then_inside(train) if name == "nested" else _maximum(train, np.zeros(1))
        slopes[name], fitted[name] = float(c.sum()), (train, c)
        compared[name] = _Winners(x[test], present[test]).log_likelihood(c)
    if slopes["softmax"] <= 0:
        return LinkChoice(**facts, reason="Winners do not score higher than the other candidates.")
    nested: dict[str, Any] = {}
    if "nested" in models:
        train, c = fitted["nested"]
        gain = 2 * float(
            train.log_likelihood(c).sum() - fitted["softmax"][0].log_likelihood(fitted["softmax"][1]).sum()
        )
        nested = {
            "blend": float(c[1] / c.sum()),
            "likelihood_ratio": max(gain, 0.0),
            "p_value": 1.0 if gain <= 1e-9 else float(chi2.sf(gain, 1)) / 2,
        }
        if bootstrap:
            blends = _resample(train, c, groups[~test], bootstrap, rng)
            low, high = np.quantile(blends, [(1 - confidence) / 2, (1 + confidence) / 2])
            nested["blend_interval"] = (float(low), float(high))
    mean = {name: float(values.mean()) for name, values in compared.items()}
    best = max((name for name in SINGLE_LINKS if name in mean), key=mean.__getitem__)
    if "nested" in mean:
        totals = np.bincount(groups[test], compared["nested"] - compared[best])
        if totals.sum() > 2 * math.sqrt(float(totals @ totals)):
            best = "nested"
    return LinkChoice(**facts, estimable=True, slopes=slopes, held_out=mean, best=best, **nested)


class _Winners:
    """Log-likelihood of winners in coefficients (F,) of features relative to the winner's, (A, C, F)."""

    def __init__(self, x: Array, present: Array) -> None:
        self.x, self.absent = np.where(present[..., None], x, 0.0), np.where(present, 0.0, -np.inf)

    def log_likelihood(self, c: Array) -> Array:
        """Log-probability of each winner (A,)."""
        return -logsumexp(self.x @ c + self.absent, axis=1)

    def derivatives(self, c: Array) -> tuple[Array, Array]:
        """Gradients (A, F) and negative Hessians (A, F, F) of each anchor."""
        logits = self.x @ c + self.absent
        p = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))[..., None]
        mean = (p * self.x).sum(1)
        return -mean, (p * self.x).swapaxes(1, 2) @ self.x - mean[:, :, None] * mean[:, None, :]


def _maximum(winners: _Winners, c: Array) -> Array:
    """Newton's method with step halving on the concave log-likelihood, within ``c >= 0``."""
    value = winners.log_likelihood(c).mean()
    for _ in range(100):
        gradient, curvature = (d.mean(0) for d in winners.derivatives(c))
        step = np.linalg.solve(curvature + 1e-12 * np.trace(curvature) * np.eye(len(c)) + 1e-300, gradient)
        while True:
            trial = np.maximum(c + step, 0)
            trial_value = winners.log_likelihood(trial).mean()
            if trial_value >= value or np.abs(step).max() < 1e-12:
                break
            step = step / 2
        gained, c, value = trial_value - value, trial, trial_value
        if gained < 1e-13:
            break
    return c


def _edges_then_inside(winners: _Winners) -> Array:
    """Maximum in two coefficients of at least 0: on an edge if the other slope does not help there, else inside."""
    edges = []
    for kept in (0, 1):
        alone = _Winners(winners.x[..., [kept]], winners.absent == 0)
        c = np.zeros(2)
        c[kept] = _maximum(alone, np.zeros(1))[0]
        if winners.derivatives(c)[0].mean(0)[1 - kept] <= 0:
            return c
        edges.append(c)
    return _maximum(winners, (edges[0] + edges[1]) / 2)


def _resample(winners: _Winners, c: Array, groups: Array, repeats: int, rng: np.random.Generator) -> Array:
    """Blends of samples in which whole groups are drawn with replacement, one Newton step from the estimate each."""
    gradients, curvatures = winners.derivatives(c)
    groups = np.unique(groups, return_inverse=True)[1]
    count = int(groups.max()) + 1
    blends = []
    for _ in range(repeats):
        weight = np.bincount(rng.integers(count, size=count), minlength=count)[groups]
        g, h = weight @ gradients, np.tensordot(weight, curvatures, 1)
        tilt = g + h @ c  # maximise tilt . c - c h c / 2 over c >= 0
        inside = np.linalg.solve(h + 1e-12 * np.trace(h) * np.eye(2), tilt)
        if (inside < 0).any():
            edges = np.diag(np.maximum(tilt / np.diag(h), 0))
            inside = max(edges, key=lambda e: float(tilt @ e - e @ h @ e / 2))
        blends.append(inside[1] / inside.sum() if inside.sum() > 0 else 0.0)
    return np.array(blends)
