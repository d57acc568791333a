"""What theory guarantees, as pure functions of numbers: temperature, bias in k, continuity, generalisation.

The guarantees that contain ``e^(2/tau)`` say nothing below a temperature of about 0.3; those of the data
(:func:`bias_bounds_data`) do. Everything here holds for cosines, that is ``|s| <= 1``.
"""

import math
from typing import Any, Literal

import numpy as np
from scipy.special import betaln, expit, logsumexp, softmax

from simcse_weince.search.kernels import Offset, negatives_count, positive_number

Array = np.ndarray


def _range(tau: float | None, delta: float | None = None) -> float:
    """Range of the logits, from exactly one of temperature and range."""
    if (tau is None) == (delta is None):
        raise ValueError("give exactly one of tau and delta")
    return 2 / positive_number(tau, "tau") if delta is None else positive_number(delta, "delta")


def _gain(offset: Offset) -> int:
    """What the offset adds to k, 0 or 1."""
    if offset not in ("log_k", "log_k1"):
        raise ValueError(f"offset must be 'log_k' or 'log_k1', not {offset!r}")
    return int(offset == "log_k1")


def specht(delta: float) -> float:
    """``J(delta) = log((e^delta - 1) / delta) - 1 + delta / (e^delta - 1)``: largest divergence for a logit range."""
    if delta < 1e-2:
        return delta**2 / 8 - delta**4 / 576
    rest = math.exp(-delta)
    return delta - math.log(delta) - 1 + math.log1p(-rest) + delta * rest / (1 - rest)


def kl_bound(tau: float) -> float:
    """Most that ``KL(Q || pi)`` and ``KL(pi || Q)`` can be at temperature ``tau``, ``J(2 / tau)`` in nats; attained."""
    return specht(_range(tau))


def chi2_bound(tau: float) -> float:
    """Most that the chi-square of the search kernel from the corpus can be, ``sinh(1 / tau)^2``; attained."""
    return math.sinh(1 / positive_number(tau, "tau")) ** 2


def tv_bound(tau: float) -> float:
    """Most that the total variation from the corpus can be, ``tanh(1 / (2 tau))``; attained."""
    return math.tanh(0.5 / positive_number(tau, "tau"))


def density_bounds(tau: float) -> tuple[float, float]:
    """Least and most that the density of the search kernel can be, ``e^(-2/tau)`` and ``e^(2/tau)``."""
    return math.exp(-2 / positive_number(tau, "tau")), math.exp(2 / tau)


def uniform_quadrature(d: int, slack: float = 0.0, lost: float = 0.0) -> tuple[Array, Array]:
    """Law of ``b = (1 - s) / 2`` for the cosine of two uniform points of the sphere in d dimensions, as a quadrature.

    ``b`` is Beta((d - 1) / 2, (d - 1) / 2); the trapezoid rule in its log-odds converges exponentially. ``slack`` is
    the range of the logits that will be integrated, in nats, and ``lost`` the power of ``1 / b``, below
    ``(d - 1) / 2``. Returns log-odds of ``b`` and log-weights, both (4001,).
    """
    if negatives_count(d, "d") < 2:
        raise ValueError("d must be at least 2")
    shape = (d - 1) / 2
    decay = (60 + slack) / (2 * (shape - lost))
    edge = 2 * math.acosh(math.exp(decay)) if decay < 300 else 2 * (decay + math.log(2))
    odds, step = np.linspace(-edge, edge, 4001, retstep=True)
    return odds, -shape * (np.logaddexp(0, -odds) + np.logaddexp(0, odds)) - betaln(shape, shape) + math.log(step)


def log_uniform_normaliser(d: int, inverse_temperature: float) -> float:
    """``log E exp(s * inverse_temperature)`` for the cosine of uniform points, ``log 0F1(; d/2; inverse^2 / 4)``."""
    odds, log_weights = uniform_quadrature(d, 2 * inverse_temperature)
    return float(logsumexp(log_weights + inverse_temperature * (1 - 2 * expit(odds))))


def capacity_uniform(d: int, tau: float) -> float:
    """Most information, in nats, that positives can carry if embeddings are uniform on the sphere in d dimensions."""
    return 1 / positive_number(tau, "tau") - log_uniform_normaliser(d, 1 / tau)


def bias_bounds(
    k: int, tau: float | None = None, delta: float | None = None, offset: Offset = "log_k1"
) -> tuple[float, float]:
    """Bounds on ``risk - offset - CE`` for every data law and embedding; O(1/k), and O(1/tau) at any k.

    Give the temperature or, for another link, the range ``delta`` of its logit. The offset is "log_k1" or "log_k".
    """
    delta, k, gain = _range(tau, delta), negatives_count(k), _gain(offset)
    log_k = math.log(k)
    # (e^(delta/2) - 1)^2 / (2k) by its logarithm: it overflows at tau = 0.001.
    log_square = 2 * (delta / 2 + math.log(-math.expm1(-delta / 2))) - math.log(2) - log_k
    low = min(specht(delta), math.exp(min(log_square, 700.0)))
    if not gain:
        return -low, float(np.logaddexp(0, delta - log_k))
    upper = np.logaddexp(0, delta + math.log(-math.expm1(-delta)) - math.log(k + 1))
    return -(delta / (k + 1) + low * (k / (k + 1))), float(upper)


def bias_bounds_data(
    r_pos: Array, chi2: Array, k: int, a: "Array | float | None" = None, *, delta: float | None = None,
    ce: float | None = None, offset: Offset = "log_k1",
) -> tuple[float, float]:  # fmt: skip
    """Bounds on ``risk - offset - CE`` from the density at the positive and the chi-square of each anchor, (n,).

    ``a`` is the smallest density, one or per anchor (n,), by default ``e^-delta`` for a logit of range ``delta``, and
    ``ce`` the cross-entropy, for the lower bound with "log_k1", by default its largest value ``delta``.
    """
    k, gain, most = negatives_count(k), _gain(offset), delta if ce is None else ce
    if (a is None and delta is None) or (gain and most is None):
        raise ValueError("give a or delta, and for offset 'log_k1' ce or delta")
    log_floor = np.log(a) if a is not None else -positive_number(delta, "delta")
    direct = np.exp(np.minimum(np.log(np.maximum(chi2, 1e-300)) - log_floor, 700)) / (2 * k)
    rate = 1 / (1 + chi2)
    rest = np.logaddexp(0, np.log1p(chi2) - math.log(k) - log_floor)
    spread = 2 * np.exp(rate) * chi2 / k + np.exp(-k * rate / 2) * rest
    low = min(float(np.mean(direct)), float(np.mean(spread)))
    lower = -(most + k * low) / (k + 1) if gain and most is not None else -low
    return lower, float(np.log1p((r_pos - gain) / (k + gain)).mean())


def loss_range(k: int, tau: float) -> float:
    """Largest loss less the smallest, ``log((1 + k e^(2/tau)) / (1 + k e^(-2/tau)))``, between 2/tau and 4/tau."""
    delta, log_k = _range(tau), math.log(negatives_count(k))
    return float(np.logaddexp(0, log_k + delta) - np.logaddexp(0, log_k - delta))


def averaged_sensitivity(
    a: Array, tau: float, beta: float | None = None, weights: Array | None = None
) -> "Array | np.floating":
    """The average of sensitivities that a tuple's loss obeys, over the last axis.

    By default the expectile at level ``sigmoid(2 / tau)``, which holds for every embedding: between the mean (hot) and
    the maximum (cold). With ``weights``, similarities (..., m), the average under ``softmax(beta * weights)``, where
    ``beta`` defaults to ``1 / tau``.
    """
    a = np.asarray(a, dtype=np.float64)
    small = math.exp(-_range(tau))  # numerator and denominator are divided by e^(2/tau)
    if weights is not None:
        return (softmax((1 / tau if beta is None else beta) * np.asarray(weights, np.float64), axis=-1) * a).sum(-1)
    if beta is not None:
        raise ValueError("beta needs weights")
    m = a.shape[-1]
    top = np.cumsum(-np.sort(-a, axis=-1), axis=-1)
    count = np.arange(1, m + 1)
    return ((top + small * (top[..., -1:] - top)) / (count + small * (m - count))).max(-1)


def continuity_bound(
    emb_a: Array, emb_b: Array, tau: float, kind: Literal["softmax", "tempered", "expectile", "max"] = "softmax",
    beta: float | None = None,
) -> float:  # fmt: skip
    """Bound on the change of one tuple's loss between two embeddings of it.

    ``emb_a`` and ``emb_b`` hold unit vectors (k + 2, d) of the same anchor, positive and negatives. "softmax" is the
    tightest kind; "tempered" averages at inverse temperature ``beta`` (0: uniformly); "expectile" needs only that
    similarities are cosines; "max" is the usual Lipschitz bound.
    """
    tau = positive_number(tau, "tau")
    first, second = (np.asarray(e, np.float64)[1:] @ np.asarray(e, np.float64)[0] for e in (emb_a, emb_b))
    change = second - first
    a = np.abs(change - change[0])
    if kind == "softmax":
        return max(float(averaged_sensitivity(a, tau, weights=s)) for s in (first, second)) / tau
    if kind == "tempered":
        if beta is None or beta < 0:
            raise ValueError("kind='tempered' needs beta of at least 0")
        spread = max(np.ptp(first[1:]), np.ptp(second[1:]))
        factor = math.exp(abs(1 / tau - beta) * spread)
        if beta == 0:  # a weight of the softmax is at most rho / (rho + k)
            factor = min(factor, (len(a) - 1) * float(expit(2 / tau - math.log(len(a) - 1))))
        mean = max(float(averaged_sensitivity(a[1:], tau, beta, weights=s[1:])) for s in (first, second))
        return factor * mean / tau
    if kind == "expectile":
        return float(averaged_sensitivity(a, tau)) / tau
    if kind == "max":
        return float(a.max()) / tau
    raise ValueError(f"kind must be 'softmax', 'tempered', 'expectile' or 'max', not {kind!r}")


def generalization_bound(
    n: int, p: int, LB: float, tau: float, k: int, delta: float = 0.05, bias: "float | Literal['worst']" = "worst"
) -> dict[str, Any]:
    """Uniform bound on ``|CE - (empirical risk - log(k + 1))|`` for n independent tuples, with probability 1 - delta.

    Shared in-batch negatives make tuples dependent: they are not covered. It is loose, and useless unless ``n`` is
    above ``n_min``. ``p`` counts parameters, ``LB`` is the Lipschitz constant of the embedding in them times the radius
    of their ball, and ``bias`` a bound on the bias in k, "worst" for that of :func:`bias_bounds`.
    """
    for name, value in (("n", n), ("p", p), ("k", k)):
        negatives_count(value, name)
    positive_number(LB, "LB"), positive_number(delta, "delta", below=1)
    span = loss_range(k, tau)
    complexity = math.sqrt(2 * math.pi * p / n) * 4 * LB / tau
    variability = span * math.sqrt(math.log(2 / delta) / (2 * n))
    error = max(map(abs, bias_bounds(k, tau))) if bias == "worst" else float(bias)
    total, useless = complexity + variability + error, complexity + variability >= span
    return {"complexity": complexity, "variability": variability, "bias": error, "total": total, "loss_range": span,
            "gap_vacuous": useless, "n_min": 2 * math.pi * p * LB**2}  # fmt: skip
