"""Extreme-value statistics of each anchor's hardest negatives: from shortfalls to the blend weight.

Nothing here carries a gradient, loops over anchors or waits for the device. Notation and defaults follow Erol, Evren,
Ozel, Morgan, Ryu, Zheng, "When Softmax Fails at the Top: Extreme-Value Corrections for InfoNCE", ICML 2026,
arXiv 2606.00262.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

RESOLUTION = 1e-6
"""Shortfalls below this are rounding noise of a float32 cosine; the tail is floored here."""

FEWEST_NEGATIVES = 10
"""Anchors with fewer negatives have no tail to speak of: nothing is estimated, their blend is 0."""


class TailStatistics(NamedTuple):
    """What the tail of each anchor says, all without gradient; A anchors.

    Attributes:
        blend: (A,) weight of the shortfall link, in [0, 1].
        shape: (A,) tail index used in the link: clipped to the bounds, unless it is a fixed number.
        hardness: (A,) smallest shortfall among the negatives, in [1e-6, 2].
        evidence: (A,) AIC of the Gumbel tail minus AIC of the Weibull tail; 0 where no tail can be fitted.
        r_squared: (A,) share of variance that the Weibull line explains; 0 where no tail can be fitted.
        shape_raw: (A,) estimated tail index before shrinking and clipping; 0 where no tail can be fitted.
        pivot: scalar, the hardness at which the hardness gate is one half.
        tail_points: number of order statistics fitted for an anchor none of whose negatives is masked.
    """

    blend: Tensor
    shape: Tensor
    hardness: Tensor
    evidence: Tensor
    r_squared: Tensor
    shape_raw: Tensor
    pivot: Tensor
    tail_points: int


class TailFit(NamedTuple):
    """The fitted tail of each anchor, before anchors are compared with one another; all (A,)."""

    hardness: Tensor
    shape: Tensor
    evidence: Tensor
    r_squared: Tensor
    points: Tensor
    estimable: Tensor


def tail_size(negatives: int, fraction: float, minimum: int) -> int:
    """How many of an anchor's ``negatives`` make up its tail: ``min(K, max(minimum, round(fraction * K)))``."""
    return min(negatives, max(minimum, round(fraction * negatives)))


def share(fraction: float, count: Tensor) -> Tensor:
    """``round(fraction * count)`` of each count, as whole numbers, with halves going the way they go in Python."""
    wide = torch.float32 if count.device.type == "mps" else torch.float64
    return (fraction * count.to(wide)).round().long()


def burn_in(size: int) -> int:
    """How many of the smallest shortfalls of a tail the fit leaves out: one in twenty, at least one."""
    return max(1, size // 20)


class _Ranks(NamedTuple):
    """What a fit needs to know of the ranks of a tail.

    They depend on numbers of negatives alone: A is 1 if all anchors have equally many.

    Attributes:
        fitted: (A, k) 1 for the order statistics that are fitted, else 0.
        weights: (A, k) the same over their number, for a mean.
        points: (A,) number of these.
        responses: (R, A, k) what the lines in ``log d`` are fitted to: ``log F`` and, for a regression,
            ``log(-log F)``; less their means, 0 where nothing is fitted.
        variation: (A,) sum of squares of the first response.
        first: (A, 1) place of the first shortfall that is fitted.
        last: (A, 1) place of the threshold, the largest shortfall of the tail.
        below: (A, k) 1 for the shortfalls below the threshold, else 0.
        excesses: (A,) number of these, at least 1.
        enough: (A,) True if there are negatives enough.
    """

    fitted: Tensor
    weights: Tensor
    points: Tensor
    responses: Tensor
    variation: Tensor
    first: Tensor
    last: Tensor
    below: Tensor
    excesses: Tensor
    enough: Tensor


def _ranks(negatives: Tensor, k: int, dtype: torch.dtype, fraction: float, minimum: int, evidence: str) -> _Ranks:
    count = negatives[:, None].to(dtype)
    size = share(fraction, negatives)[:, None].to(dtype).clamp(min=minimum).minimum(count.clamp(min=1))
    burn = (size / 20).floor().clamp(min=1)
    rank = torch.arange(1, k + 1, dtype=dtype, device=negatives.device)
    fitted = ((rank > burn) & (rank <= size)).to(dtype)
    points = fitted.sum(-1)
    weights = fitted / points[:, None].clamp(min=1)
    log_rank = (rank.minimum(size) / (size + 1)).log()
    responses = torch.stack([log_rank, (-log_rank).log()] if evidence == "regression" else [log_rank])
    responses = _centred(responses, fitted, weights)
    last = (size.long() - 1).clamp(min=0)
    return _Ranks(
        fitted, weights, points, responses, responses[0].square().sum(-1).clamp(min=RESOLUTION),
        burn.long().minimum(last), last, (rank < size).to(dtype), (size[:, 0] - 1).clamp(min=1),
        (count[:, 0] >= FEWEST_NEGATIVES) & (points > 2),
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _equal_ranks(negatives: int, device: torch.device, *options: Any) -> _Ranks:
    return _ranks(torch.tensor([negatives], device=device), *options)


@torch.no_grad()
def fit_tail(smallest: Tensor, negatives: Tensor | int, *, fraction: float, minimum: int, evidence: str) -> TailFit:
    """Fit the Weibull and the Gumbel tail to each anchor's smallest shortfalls.

    ``evidence="regression"`` is the paper's comparison: least-squares lines in ``log d`` for ``log F`` (its slope is
    the shape) and for ``log(-log F)``. It sets residuals of different responses against each other and is positive
    practically always. ``"likelihood"`` compares two one-parameter densities of the same excesses and closes on
    exponential tails; its shape is the Hill estimate.

    Args:
        smallest: (A, k) shortfalls up to 2, in increasing order, +inf where an anchor has fewer than k negatives; k is
            at least the tail size of every anchor.
        negatives: (A,) number of unmasked negatives, or one number for all anchors, which is faster.
        fraction: share of the negatives that makes up the tail.
        minimum: tail size below which the share does not go.
        evidence: "regression" or "likelihood".

    Returns:
        The fits; ``evidence``, ``shape`` and ``r_squared`` are 0 where the tail is too small or has no spread.
    """
    options = (smallest.shape[1], smallest.dtype, fraction, minimum, evidence)
    if isinstance(negatives, int):
        ranks = _equal_ranks(negatives, smallest.device, *options)
    else:
        ranks = _ranks(negatives, *options)

    # Few operations, because for a small batch their number is the cost: absent shortfalls (+inf) become finite and get
    # the weight 0, and both lines are fitted at once. Few new tensors, which are the cost for a large one.
    smallest = smallest.clamp(RESOLUTION, 2)
    log_shortfall = smallest.log()
    x, y = _centred(log_shortfall, ranks.fitted, ranks.weights), ranks.responses
    slope = (x * y).sum(-1) / vector_norm(x, dim=-1).square_().clamp_(min=1e-12)
    error = vector_norm(torch.addcmul(y, slope[..., None], x, value=-1), dim=-1).square_()
    r_squared = 1 - error[0] / ranks.variation

    rows = (len(smallest), 1)
    threshold, first = smallest.gather(1, ranks.last.expand(rows)), smallest.gather(1, ranks.first.expand(rows))
    # Equal shortfalls plus rounding noise fit any line: such a tail says nothing.
    estimable = ranks.enough & (threshold - first > 10 * RESOLUTION)[:, 0]

    if evidence == "regression":
        # A line that rises the wrong way is no model of a tail: the penalty decides against it.
        error = error + 1e6 * torch.stack([slope[0] <= 0, slope[1] >= 0])
        log_error = error.clamp(min=1e-12).log()
        shape, score = slope[0].clamp(min=0), ranks.points * (log_error[1] - log_error[0])
    else:
        excesses = ranks.excesses
        log_ratio = ((threshold.log() - log_shortfall) * ranks.below).sum(-1).clamp(min=RESOLUTION)
        scale = ((threshold - smallest) * ranks.below).sum(-1).clamp(min=RESOLUTION) / excesses
        shape = excesses / log_ratio
        # 2 * (loglik_W - loglik_G), in which sum(log d) and both exponents cancel to this.
        score = 2 * (excesses * (shape * scale / threshold[:, 0]).log() + log_ratio)

    shape, score, r_squared = (torch.stack([shape, score, r_squared]) * estimable).unbind()
    return TailFit(smallest[:, 0], shape, score, r_squared, ranks.points.expand(len(smallest)), estimable)


@torch.no_grad()
def nearest_rank(hardness: Tensor, negatives: Tensor | int, quantile: float) -> Tensor:
    """The pivot: ``sorted(hardness)[round(quantile * (A - 1))]`` over the A anchors that have negatives.

    ``negatives`` is the number of each anchor, (A,), or one number for all anchors, which is faster.
    """
    if isinstance(negatives, int):
        return hardness.sort().values[round(quantile * (len(hardness) - 1))]
    ordered = hardness.masked_fill(negatives == 0, math.inf).sort().values
    rank = share(quantile, (negatives > 0).sum() - 1).clamp(min=0)
    return ordered.gather(0, rank[None])[0].clamp(max=2)


def hardness_gate(hardness: Tensor, pivot: Tensor, sharpness: float) -> Tensor:
    """Opens for anchors whose hardest negative is nearer than the pivot, in log shortfall."""
    return torch.sigmoid(sharpness * (pivot.log() - hardness.log()))


def evidence_gate(evidence: Tensor, margin: float, sharpness: float) -> Tensor:
    """Opens for anchors whose evidence for a bounded tail exceeds the margin, both in units of AIC."""
    return torch.sigmoid(sharpness * (evidence - margin))


@torch.no_grad()
def shrunk_shape(fit: TailFit, pooled: TailFit) -> Tensor:
    """Shape (A,) drawn towards the batch: ``w beta_i + (1 - w) beta_batch`` with ``w = n R2 / (n R2 + 100)``.

    Args:
        fit: the anchors' own tails.
        pooled: one fit, shape (1,), of the negatives of all anchors taken together.
    """
    weight = fit.points * fit.r_squared
    weight = weight / (weight + 100)
    return weight * fit.shape + (1 - weight) * pooled.shape


def _centred(values: Tensor, fitted: Tensor, weights: Tensor) -> Tensor:
    """``values`` minus their mean over the fitted points, 0 elsewhere."""
    return (values - (values * weights).sum(-1, keepdim=True)).mul_(fitted)
