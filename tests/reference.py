"""The criteria written from their formulas, one anchor and one candidate at a time, in float64: slow on purpose."""

import math
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np


@dataclass
class Row:
    """One anchor: the cosine of its positive and those of its unmasked negatives."""

    positive: float
    negatives: list[float]


@dataclass
class Expected:
    """What the criterion should say, one entry per anchor."""

    losses: list[float] = field(default_factory=list)
    blend: list[float] = field(default_factory=list)
    shape: list[float] = field(default_factory=list)
    shape_raw: list[float] = field(default_factory=list)
    hardness: list[float] = field(default_factory=list)
    evidence: list[float] = field(default_factory=list)
    r_squared: list[float] = field(default_factory=list)
    pivot: float = math.nan


def rows(first, second, negatives=(), layout="cross_view", keep=None):
    """Lay out a batch of numpy arrays (N, d)."""
    first, second, *negatives = ([np.asarray(v, dtype=np.float64) for v in e] for e in (first, second, *negatives))
    count = len(first)
    if layout == "both_views":
        anchors = candidates = [*first, *second]
    else:
        anchors, candidates = first, [*second, *(vector for column in negatives for vector in column)]
    table = []
    for i, anchor in enumerate(anchors):
        partner = (i + count) % (2 * count) if layout == "both_views" else i
        row = Row(math.nan, [])
        for j, candidate in enumerate(candidates):
            cosine = float(anchor @ candidate) / math.sqrt(float(anchor @ anchor) * float(candidate @ candidate))
            if j == partner:
                row.positive = cosine
            elif not (layout == "both_views" and i == j) and (keep is None or keep[i][j]):
                row.negatives.append(cosine)
        table.append(row)
    return table


def cross_entropy(positive, others):
    top = max([positive, *others])
    return top + math.log(sum(math.exp(logit - top) for logit in [positive, *others])) - positive


def infonce(table, temperature):
    return [cross_entropy(row.positive / temperature, [s / temperature for s in row.negatives]) for row in table]


def least_squares(x, y):
    """Slope, sum of squared errors and R2 of the line through (x, y)."""
    mean_x, mean_y = fmean(x), fmean(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    error = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, error, 1 - error / sum((b - mean_y) ** 2 for b in y)


def tail(shortfalls, fraction, minimum, evidence):
    """Shape, R2, evidence and number of points of one tail; None where it has too few negatives or no spread."""
    count = len(shortfalls)
    size = min(count, max(minimum, round(fraction * count)))
    d = [max(value, 1e-6) for value in sorted(shortfalls)[:size]]
    burn = max(1, size // 20)
    if count < 10 or size - burn <= 2 or d[-1] - d[burn] <= 1e-5:
        return None
    rank = [(k + 1) / (size + 1) for k in range(size)]
    x = [math.log(value) for value in d[burn:]]
    slope, weibull, r_squared = least_squares(x, [math.log(value) for value in rank[burn:]])
    points = size - burn
    if evidence == "regression":
        gumbel_slope, gumbel, _ = least_squares(x, [math.log(-math.log(value)) for value in rank[burn:]])
        weibull += 1e6 if slope <= 0 else 0
        gumbel += 1e6 if gumbel_slope >= 0 else 0
        aic = [points * math.log(error / points) + 4 for error in (gumbel, weibull)]
        return max(slope, 0), r_squared, aic[0] - aic[1], points
    u, inner = d[-1], d[:-1]
    shape = len(inner) / sum(math.log(u / value) for value in inner)
    scale = fmean(u - value for value in inner)
    weibull = sum(math.log(shape) + (shape - 1) * math.log(value) - shape * math.log(u) for value in inner)
    gumbel = sum(-(u - value) / scale - math.log(scale) for value in inner)
    return shape, r_squared, 2 * (weibull - gumbel), points


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def weince(
    table,
    temperature,
    gate="both",
    evidence="regression",
    shape="anchor",
    floor=1e-4,
    tail_fraction=0.10,
    min_tail_size=32,
    pivot=None,
    pivot_quantile=0.2,
    hardness_sharpness=10.0,
    evidence_sharpness=1.0,
    evidence_margin=2.0,
    shape_bounds=(0.5, 16.0),
):
    shortfalls = [[max(0.0, 1 - s) for s in row.negatives] for row in table]
    expected = Expected()
    expected.hardness = [max(1e-6, min(d, default=2.0)) for d in shortfalls]
    ordered = sorted(h for h, d in zip(expected.hardness, shortfalls, strict=True) if d)
    expected.pivot = pivot or (ordered[round(pivot_quantile * (len(ordered) - 1))] if ordered else 2.0)
    pooled = tail([value for d in shortfalls for value in d], 0.05, 1024, evidence)
    for row, d, hardness in zip(table, shortfalls, expected.hardness, strict=True):
        fit = tail(d, tail_fraction, min_tail_size, evidence)
        estimate, r_squared, score, points = fit or (0.0, 0.0, 0.0, 0)
        blend = 1.0
        if gate in ("both", "hardness"):
            blend *= sigmoid(hardness_sharpness * (math.log(expected.pivot) - math.log(hardness)))
        if gate in ("both", "evidence"):
            blend *= sigmoid(evidence_sharpness * (score - evidence_margin))
        if not isinstance(gate, str):
            blend = gate
        if fit is None and (isinstance(gate, str) or isinstance(shape, str)):
            blend = 0.0
        if shape == "anchor":
            beta = min(max(estimate, shape_bounds[0]), shape_bounds[1])
        elif shape == "shrunk":
            weight = points * r_squared / (points * r_squared + 100)
            beta = weight * estimate + (1 - weight) * (pooled[0] if pooled else 0.0)
            beta = min(max(beta, shape_bounds[0]), shape_bounds[1])
        else:
            beta = shape

        def logit(s, blend=blend, beta=beta):
            return (1 - blend) * s / temperature - blend * beta * math.log(max(0.0, 1 - s) + floor)

        expected.losses.append(cross_entropy(logit(row.positive), [logit(s) for s in row.negatives]))
        for name, value in dict(
            blend=blend, shape=beta, shape_raw=estimate, evidence=score, r_squared=r_squared
        ).items():
            getattr(expected, name).append(value)
    return expected
