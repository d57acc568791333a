"""Which link do winners follow: softmax, power or shortfall, and how far between softmax and shortfall?

Every link of :mod:`simcse_weince.links` is linear in a function of the score, so that the log-likelihood of winners,
``log P(winner) = c . x_winner - log sum_j exp(c . x_j)`` over the candidates of an anchor, is concave:

    softmax    x = s                          slope theta
    power      x = log s                      exponent alpha, scores above 0
    shortfall  x = -log(1 - s + floor)        shape beta, scores up to 1
    nested     both of softmax and shortfall  (theta (1 - lambda), theta lambda), neither below 0
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from scipy.stats import chi2

Array = np.ndarray
MIN_ANCHORS = 50


@dataclass(frozen=True)
class LinkChoice:
    """The links of the trichotomy fitted to winners; parameters are None where not ``estimable``.

    Attributes:
        anchors, held_out_anchors: Anchors used, and those of them on which the links are only compared.
        left_out: Rows without a winner or without a second candidate.
        reason: One sentence that says why there is no fit, empty otherwise.
        slopes: Slope of each link by name ("nested": theta); a link that the scores do not allow is absent.
        blend: lambda of the nested link in [0, 1]: 0 is the softmax, 1 the shortfall link.
        blend_interval: Its 95 % interval, by bootstrap over anchors.
        likelihood_ratio: Twice the gain in log-likelihood of the nested link over the softmax.
        p_value: Probability of so large a ratio under the softmax, which is on the boundary: half 0, half chi-square.
        held_out: Held-out log-likelihood per anchor of each link, in nats.
        best: Link of the largest held-out log-likelihood; "nested" only if it gains more than two standard errors.
    """

    anchors: int
    held_out_anchors: int
    left_out: int
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
    floor: float = 1e-4,
    seed: int = 0,
) -> LinkChoice:
    """Fit softmax, power, shortfall and nested link to the winners among candidates, by maximum likelihood.

    Args:
        scores: Scores of the candidates (A, C); NaN and infinite ones are absent candidates.
        winner: Column of the winner, one for all anchors or (A,).
        bootstrap: Samples for the interval of lambda, each one Newton step from the estimate (0: no interval).
        held_out: Share of the anchors on which the links are compared and not fitted.
        floor: Floor of the shortfall, as in the criterion.
        seed: Seed of the split and of the bootstrap.

    Raises:
        ValueError: An argument is out of range. Winners that cannot be fitted do not raise, see ``reason``.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2 or not 0 < held_out < 1:
        raise ValueError("scores must have two dimensions, anchors and candidates, and held_out be between 0 and 1")
    columns = np.broadcast_to(np.asarray(winner).reshape(-1, 1), (len(scores), 1))
    if len(scores) and not (0 <= columns.min() and columns.max() < scores.shape[1]):
        raise ValueError("winner must name columns of scores")
    present = np.isfinite(scores)
    usable = np.take_along_axis(present, columns, 1)[:, 0] & (present.sum(1) > 1)
    scores, present, columns = scores[usable], present[usable], columns[usable]
    rng = np.random.default_rng(seed)
    test = rng.permutation(len(scores)) < round(held_out * len(scores))
    facts: dict[str, Any] = {"anchors": len(scores), "held_out_anchors": int(test.sum())}
    facts["left_out"] = len(usable) - len(scores)
    if min(test.sum(), (~test).sum()) < MIN_ANCHORS:
        return LinkChoice(**facts, reason=f"Fewer than {MIN_ANCHORS} anchors to fit on or to compare on.")
    if (scores <= np.take_along_axis(scores, columns, 1))[present & ~test[:, None]].all():
        return LinkChoice(**facts, reason="The winner has the highest score for every anchor: slopes are unbounded.")
    scores = np.where(present, scores, 0.5)  # absent candidates: any number that every link allows
    features = {"softmax": scores}
    if scores.min() > 0:
        features["power"] = np.log(scores)
    if scores.max() <= 1 + 1e-3:
        features["shortfall"] = -np.log(np.maximum(1 - scores, 0) + floor)
    models = {name: [name] for name in features}
    if "shortfall" in features:
        models["nested"] = ["softmax", "shortfall"]
    slopes, compared, mean = {}, {}, {}
    for name, names in models.items():
        x = np.stack([features[n] - np.take_along_axis(features[n], columns, 1) for n in names], -1)
        train = _Winners(x[~test], present[~test])
        c = _fit(train)
        compared[name] = _Winners(x[test], present[test]).log_likelihood(c)
        slopes[name], mean[name] = float(c.sum()), float(compared[name].mean())
    if slopes["softmax"] <= 0:
        return LinkChoice(**facts, reason="Winners do not score higher than the other candidates.")
    best = max(features, key=mean.__getitem__)
    nested: dict[str, Any] = {}
    if "nested" in models:  # the last one fitted
        gains = train.log_likelihood(c) - train.log_likelihood(np.array([slopes["softmax"], 0]))
        gain = max(2 * float(gains.sum()), 0.0)
        p_value = float(chi2.sf(gain, 1)) / 2 if gain > 1e-6 else 1.0
        nested = {"blend": float(c[1] / c.sum()), "likelihood_ratio": gain, "p_value": p_value}
        if bootstrap:
            low, high = np.quantile(_resample(train, c, bootstrap, rng), [0.025, 0.975])
            nested["blend_interval"] = (float(low), float(high))
        gains = compared["nested"] - compared[best]
        if gains.mean() > 2 * gains.std() / np.sqrt(len(gains)):
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
        weighted = softmax(self.x @ c + self.absent, axis=1)[..., None] * self.x
        mean = weighted.sum(1)
        return -mean, weighted.swapaxes(1, 2) @ self.x - mean[:, :, None] * mean[:, None, :]


def _fit(winners: _Winners) -> Array:
    """The coefficients of at least 0 that make the winners likeliest."""
    unit = np.sqrt((winners.x**2).mean((0, 1))) + 1e-300

    def loss(c: Array) -> tuple[float, Array]:
        return -winners.log_likelihood(c / unit).mean(), -winners.derivatives(c / unit)[0].mean(0) / unit

    return minimize(loss, 0 * unit, jac=True, bounds=[(0, None)] * len(unit), method="L-BFGS-B", tol=1e-12).x / unit


def _resample(winners: _Winners, c: Array, repeats: int, rng: np.random.Generator) -> Array:
    """Blends of samples in which anchors are drawn with replacement, one Newton step from the estimate each."""
    gradients, curvatures = winners.derivatives(c)
    count, blends = len(gradients), []
    for _ in range(repeats):
        weight = np.bincount(rng.integers(count, size=count), minlength=count)
        g, h = weight @ gradients, np.tensordot(weight, curvatures, 1)
        tilt = g + h @ c  # maximise tilt . c - c h c / 2 over c >= 0
        step = np.linalg.solve(h + 1e-12 * np.trace(h) * np.eye(2), tilt)
        if (step < 0).any():
            edges = np.diag(np.maximum(tilt / np.diag(h), 0))
            step = max(edges, key=lambda e: float(tilt @ e - e @ h @ e / 2))
        blends.append(step[1] / step.sum() if step.sum() > 0 else 0.0)
    return np.array(blends)
