"""InfoNCE as cross-entropy between similarity-search kernels: links, the loss, and what it converges to.

With ``Z(x) = E_pi exp(logit(x, .))`` over the corpus law ``pi``, an embedding searches with the kernel of density
``r(x, x') = exp(logit(x, x')) / Z(x)``. The InfoNCE risk with k negatives, less ``log(k + 1)``, tends to the search
cross-entropy ``CE = E log Z(x) - E logit(x, x+)`` at rate 1/k. Logarithms are natural, information is in nats.

Derived from the published summary of N. Whiteley, "Similarity search generalisation in contrastive learning with
InfoNCE loss" (2026); constants and forms are our own, each with a numeric check in the tests.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from simcse_weince.links import power_link, shortfall, softmax_link

Offset = Literal["none", "log_k", "log_k1"]

GROUPS = 20  # delete-group jackknife over the pool
READ = 2**22  # similarities read or computed at a time: 16 MB in float32, enough rows for a fast matrix product
BLOCK = 2**18  # of which this many are worked on in float64: 2 MB, so that the arrays stay in the cache
STEP = math.log(2) / 2  # trapezoid in log t: error exp(-pi^2 / STEP), below 1e-12


class SelfMatchWarning(UserWarning):
    """The pool holds an anchor or its exact duplicate."""


class SmallPoolWarning(UserWarning):
    """The pool is too small for this temperature: the median effective sample size is below 30."""


class HeavyTailWarning(UserWarning):
    """The shortfall link is so steep for the tail of the similarities that the 1/k law fails."""


def positive_number(value: Any, name: str, below: float = math.inf) -> float:
    """Return ``value`` if it is a finite number in (0, below), else raise ValueError that names it."""
    if isinstance(value, bool) or not 0 < value < below or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number in (0, {below:g}), not {value!r}")
    return float(value)


def negatives_count(k: int, name: str = "k") -> int:
    """Return ``k`` if it is an integer of at least 1, else raise ValueError."""
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {k!r}")
    return int(k)


def offset_of(k: int, offset: Offset) -> float:
    """What a risk with k negatives is compared with: 0, ``log k`` or ``log(k + 1)``."""
    if offset not in ("none", "log_k", "log_k1"):
        raise ValueError(f"offset must be 'none', 'log_k' or 'log_k1', not {offset!r}")
    return {"none": 0.0, "log_k": math.log(k), "log_k1": math.log(k + 1)}[offset]


class Link:
    """A logit of the nested family ``theta_s * s - theta_t * log(max(1 - s, eps))``; no parameter is negative."""

    theta_s: float = 0.0
    theta_t: float = 0.0
    eps: float = 1e-6

    @property
    def range(self) -> float:
        """Largest logit of a cosine less the smallest, delta."""
        return 2 * self.theta_s + self.theta_t * math.log(2 / self.eps)

    def logit(self, cosine: Tensor, gap: Tensor | None = None) -> Tensor:
        """Logit of a cosine; ``gap`` is ``1 - cosine`` where the caller knows it to more digits."""
        if not self.theta_t:
            return softmax_link(cosine, 1 / self.theta_s)
        tail = power_link((shortfall(cosine) if gap is None else gap).clamp(min=self.eps), -self.theta_t)
        return softmax_link(cosine, 1 / self.theta_s) + tail if self.theta_s else tail


@dataclass(frozen=True)
class SoftmaxLink(Link):
    """``s / tau``, of range ``2 / tau``."""

    tau: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta_s", 1 / positive_number(self.tau, "tau"))


@dataclass(frozen=True)
class WeibullLink(Link):
    """The shortfall link ``-beta * log(max(1 - s, eps))``, of range ``beta * log(2 / eps)``."""

    beta: float
    eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta_t", positive_number(self.beta, "beta"))
        positive_number(self.eps, "eps", below=2)


@dataclass(frozen=True)
class NestedLink(Link):
    """``theta_s * s - theta_t * log(max(1 - s, eps))``: both links as one family; one multiplier may be 0."""

    theta_s: float
    theta_t: float
    eps: float = 1e-6

    def __post_init__(self) -> None:
        positive_number(self.eps, "eps", below=2)
        positive_number(self.theta_s + self.theta_t, "theta_s + theta_t")
        if min(self.theta_s, self.theta_t) < 0:
            raise ValueError("theta_s and theta_t must not be negative")


def as_link(tau: float | None = None, link: Link | None = None) -> Link:
    """The softmax link of ``tau``, or ``link`` itself; ValueError unless exactly one of the two is given."""
    if (tau is None) == (link is None):
        raise ValueError("give exactly one of tau and link")
    return link if link is not None else SoftmaxLink(tau)  # type: ignore[arg-type]


def infonce_loss(
    pos: Tensor, neg: Tensor, *, tau: float | None = None, link: Link | None = None,
    positive_in_denominator: bool = True, offset: Offset = "none",
    reduction: Literal["mean", "none", "sum"] = "mean", mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``log(1 + sum_j exp(logit_j - logit_+))``, differentiable, in float32 or the wider type of the input.

    Args:
        pos: Cosines with the positive (n,), or with P positives (n, P) whose losses are averaged. Values are not
            checked, so that a device is never waited for.
        neg: Cosines with the negatives (n, k).
        tau: Temperature of the softmax link; or give ``link``, any link of this module.
        link: See ``tau``.
        positive_in_denominator: False for the decoupled loss, whose bias is negative: it is no bound.
        offset: Subtracted per anchor, from its own number of negatives: ``log k`` or ``log(k + 1)``.
        reduction: Over anchors; "none" returns (n,).
        mask: Boolean (n, k), True where a negative counts. An anchor needs at least one.
    """
    link = as_link(tau, link)
    if not (pos.is_floating_point() and neg.is_floating_point()):
        raise TypeError("pos and neg must be floating-point tensors")
    if neg.ndim != 2 or pos.ndim not in (1, 2) or pos.shape[0] != neg.shape[0] or 0 in (*neg.shape, *pos.shape):
        raise ValueError(f"pos must be (n,) or (n, P) and neg (n, k), not {tuple(pos.shape)} and {tuple(neg.shape)}")
    if reduction not in ("mean", "none", "sum"):
        raise ValueError(f"reduction must be 'mean', 'none' or 'sum', not {reduction!r}")
    dtype = torch.promote_types(torch.promote_types(pos.dtype, neg.dtype), torch.float32)
    positive, negatives = link.logit(pos.to(dtype)), link.logit(neg.to(dtype))
    shift: Tensor | float = offset_of(neg.shape[1], offset)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != neg.shape:
            raise ValueError(f"mask must be boolean of shape {tuple(neg.shape)}")
        count = mask.sum(1)
        if not bool(count.all()):
            raise ValueError("mask leaves an anchor without a negative")
        negatives = negatives.masked_fill(~mask, -math.inf)
        shift = (count + (offset == "log_k1")).to(dtype).log() if offset != "none" else 0.0
    excess = negatives.logsumexp(1, keepdim=True) - positive.reshape(len(neg), -1)
    rows = torch.logaddexp(excess, torch.zeros_like(excess)) if positive_in_denominator else excess
    rows = rows.mean(1) - shift
    return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()


class CosineRows:
    """Cosines of ``anchors`` (n, d) with a ``pool`` (N, d), embeddings of any norm, computed block by block when read.

    Stands for a ``neg`` too large to hold. A float32 product is exact to about 1e-7 in the cosine.
    """

    def __init__(self, anchors: "Tensor | np.ndarray", pool: "Tensor | np.ndarray") -> None:
        left, right = torch.as_tensor(anchors).detach(), torch.as_tensor(pool).detach()
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
            raise ValueError(f"anchors {tuple(left.shape)} and pool {tuple(right.shape)} must be (n, d) and (N, d)")
        if not (left.is_floating_point() and right.is_floating_point()):
            raise TypeError("anchors and pool must be floating-point")
        # In half precision a cosine would be off by up to 0.004, which a temperature of 0.02 makes 0.2 nats.
        sides = (side if side.dtype == torch.float64 else side.float() for side in (left, right))
        self.anchors, self.pool = (torch.nn.functional.normalize(side, dim=1) for side in sides)
        self.shape = (len(left), len(right))

    def __getitem__(self, rows: Any) -> Tensor:
        """Cosines (len(rows), N)."""
        return self.anchors[rows] @ self.pool.T


Similarities = np.ndarray | Tensor | CosineRows


def to_float64(values: Any, name: str, unbounded: bool) -> Tensor:
    """Similarities as a checked float64 tensor, clipped to [-1, 1] unless unbounded."""
    if not isinstance(values, (np.ndarray, Tensor)):
        raise TypeError(f"{name} must be a numpy array or a torch tensor, not {type(values).__name__}")
    tensor = torch.as_tensor(np.ascontiguousarray(values) if isinstance(values, np.ndarray) else values).detach()
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating-point, not {tensor.dtype}")
    tensor = tensor.to(torch.float64)
    low, high = (float(end) for end in tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} holds values that are not finite")
    if unbounded:
        return tensor
    if max(-low, high) > 1 + 1e-3:
        raise ValueError(f"{name} must be cosines in [-1, 1]; pass unbounded=True for other scores")
    if name == "neg" and high >= 1 - 1e-6:
        message = "the pool holds an anchor or its duplicate (cosine 1): remove it, it dominates at small tau"
        warnings.warn(message, SelfMatchWarning, stacklevel=4)
    return tensor.clamp(-1, 1) if max(-low, high) > 1 else tensor


class Pairs:
    """Checked similarities, ``pos`` (n,) or (n, P) and ``neg`` (n, N), read in blocks of rows as float64."""

    def __init__(self, pos: Similarities, neg: Similarities, unbounded: bool = False) -> None:
        positives = to_float64(pos, "pos", unbounded)
        if not isinstance(neg, (np.ndarray, Tensor, CosineRows)):
            raise TypeError(f"neg must be a numpy array, a torch tensor or CosineRows, not {type(neg).__name__}")
        if positives.ndim not in (1, 2) or len(neg.shape) != 2 or len(positives) != neg.shape[0]:
            raise ValueError(f"pos must be (n,) or (n, P) and neg (n, N), not {tuple(pos.shape)}, {tuple(neg.shape)}")
        if 0 in (*positives.shape, *neg.shape):
            raise ValueError("pos and neg must not be empty")
        self.neg, self.unbounded, self.pool_size = neg, unbounded, int(neg.shape[1])
        self.pos = positives.reshape(len(positives), -1).cpu()
        self.index = np.arange(len(positives))

    @property
    def n(self) -> int:
        """Number of anchors."""
        return len(self.index)

    def subset(self, index: np.ndarray) -> "Pairs":
        """The same similarities for some anchors only."""
        part = copy.copy(self)
        part.pos, part.index = self.pos[index], self.index[index]
        return part

    def spread(self, most: int) -> "Pairs":
        """At most that many anchors, evenly spaced."""
        return self.subset(np.unique(np.linspace(0, self.n - 1, min(most, self.n)).round().astype(int)))

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows of this object, positives (b, P), pool (b, N)), float64 on the device of the pool."""
        read, small = (max(1, most // self.pool_size) for most in (READ, BLOCK))
        for start in range(0, self.n, read):
            block = self.neg[self.index[start : min(start + read, self.n)]]
            for first in range(0, len(block), small):
                pool = to_float64(block[first : first + small], "neg", self.unbounded)
                rows = slice(start + first, start + first + len(pool))
                yield rows, self.pos[rows].to(pool.device), pool


def group_sizes(pool_size: int) -> list[int]:
    """Sizes of the contiguous jackknife groups, so that the first half of them covers the first half of the pool."""
    halves = (pool_size // 2, pool_size - pool_size // 2)
    return [len(part) for half in halves if half for part in np.array_split(np.arange(half), min(half, GROUPS // 2))]


def group_sums(values: Tensor, sizes: list[int]) -> Tensor:
    """Sum the last axis within contiguous groups: (..., N) to (..., G)."""
    return torch.stack([part.sum(-1) for part in values.split(sizes, -1)], -1)


@dataclass
class PoolSums:
    """What one pass over the pool leaves per anchor; any part of the pool can be left out afterwards.

    ``first`` and ``second`` are the sums of ``exp(logit - peak)`` and of its square over each pool group, (n, G);
    ``hubness`` (N,) is the density of ``pi Q`` at each pool item; ``mean_logit`` and ``search_logit`` (n,) are means
    under ``pi`` and ``Q``; ``positive`` (n, P) are logits.
    """

    peak: Tensor
    first: Tensor
    second: Tensor
    mean_logit: Tensor
    search_logit: Tensor
    positive: Tensor
    hubness: Tensor
    sizes: Tensor

    def keep(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Log-normaliser and chi-square (m, n) from the groups marked 1 in each row of ``groups`` (m, G)."""
        count = (groups @ self.sizes)[:, None]
        mean = groups @ self.first.T / count
        ratio = (groups @ self.second.T / count) / mean**2
        return self.peak + mean.log(), (ratio - 1).clamp(min=0) * (count / (count - 1).clamp(min=1))

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """Log-normaliser and chi-square (n,) from the whole pool."""
        log_z, chi2 = self.keep(torch.ones_like(self.sizes)[None])
        return log_z[0], chi2[0]

    @property
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """The same without each group in turn, (G, n)."""
        return self.keep(1 - torch.eye(len(self.sizes), dtype=torch.float64))

    @property
    def crossfit(self) -> Tensor:
        """Per anchor, an upper estimate of ``log Z`` from its tangent, each half of the pool serving the other (n,)."""
        if self.sizes.sum() < 2:
            return torch.full_like(self.peak, math.inf)
        first = (torch.arange(len(self.sizes)) < min(GROUPS // 2, int(self.sizes.sum()) // 2)).double()
        a, b = self.keep(torch.stack([first, 1 - first]))[0]
        return ((b - a).exp() + a + (a - b).exp() + b) / 2 - 1

    @property
    def pool_variance(self) -> float:
        """Variance that a shared pool adds to any mean loss: that of hubness over N (Hajek projection on one item)."""
        return float(self.hubness.var(correction=0)) / len(self.hubness)


def pool_sums(pairs: Pairs, link: Link) -> PoolSums:
    """Pass once over the pool, in blocks of rows."""
    sizes, hubness = group_sizes(pairs.pool_size), torch.zeros(pairs.pool_size, dtype=torch.float64)
    columns: list[list[Tensor]] = [[] for _ in range(6)]
    for _, pos, pool in pairs:
        logits = link.logit(pool)
        peak = logits.amax(1)
        weights = (logits - peak[:, None]).exp_()
        first = group_sums(weights, sizes)
        total = first.sum(1)
        hubness += ((pairs.pool_size / pairs.n / total) @ weights).cpu()
        search = torch.linalg.vecdot(weights, logits) / total
        parts = (peak, first, group_sums(weights.square_(), sizes), logits.mean(1), search, link.logit(pos))
        for column, part in zip(columns, parts, strict=True):
            column.append(part.cpu())
    return PoolSums(*[*map(torch.cat, columns), hubness, torch.tensor(sizes, dtype=torch.float64)])


def laplace_grid(lowest: float, highest: float) -> Tensor:
    """Nodes ``t``, a factor sqrt 2 apart, for variables of least value ``lowest`` and scale up to ``highest``."""
    start, end = -37 - math.log(max(1.0, highest)), math.log(60) - math.log(max(min(1.0, lowest), 1e-300))
    return torch.arange(start, end + STEP, STEP, dtype=torch.float64).exp()


def laplace_transform(values: Tensor, nodes: Tensor, average: Callable[[Tensor], Tensor]) -> Tensor:
    """``average(exp(-t * values) - 1)`` at the nodes of a grid (T, ...): ``average`` maps (b, N) to (b, ...).

    Every second node doubles ``t``, and ``e^-2x - 1 = (e^-x - 1) * (e^-x + 1)``: two exponentials serve them all.
    """
    streams = [torch.expm1(-t * values) for t in nodes[:2].tolist()]
    rows = []
    for index in range(len(nodes)):
        stream = streams[index % 2]
        rows.append(average(stream))
        stream.mul_(stream + 2)
    return torch.stack(rows)


def log_transform(transform: Tensor) -> Tensor:
    """Log of a Laplace transform from the transform less 1. Rounding can bring it below 0 by 1e-16, not to NaN."""
    return torch.log1p(transform.clamp(min=-1))


def expected_log(logs: Tensor, factor: Tensor | None, nodes: Tensor, k: int) -> Tensor:
    """``E log(mean of k draws + extra / k)`` by Frullani, ``log s = int (e^-t - e^-ts) dt/t``.

    ``logs`` (T, ...) is the log of the Laplace transform of one draw at ``nodes`` (T,), a grid of ``t / k`` that serves
    every k; ``factor``, broadcastable to it, is the transform of ``extra``, None for no extra.
    """
    power = (k * logs).exp_()
    total = power.sum(0) if factor is None else torch.linalg.vecdot(power, factor.expand_as(power), dim=0)
    return ((-k * nodes).exp().sum() - total) * STEP


def tail_index(pairs: Pairs, frac: float = 0.01, min_points: int = 20) -> tuple[float, float]:
    """Hill estimate over the shortfalls of at most 10 million similarities, and its standard error."""
    rows = [shortfall(pool).flatten().cpu() for _, _, pool in pairs.spread(max(1, 10_000_000 // pairs.pool_size))]
    gaps = torch.cat(rows)
    gaps = gaps[gaps > 1e-6]  # self-matches say nothing of the tail
    most = max(min_points, int(frac * len(gaps)))
    if len(gaps) <= most:
        raise ValueError(f"neg has {len(gaps)} shortfalls above 1e-6, the tail index needs more than {most}")
    smallest = gaps.topk(most + 1, largest=False).values.log()
    alpha = float(1 / (smallest[-1] - smallest[:-1]).mean().clamp(min=1e-300))
    return alpha, alpha / math.sqrt(most)


def shortfall_tail_index(neg: Similarities, *, frac: float = 0.01, min_points: int = 20) -> tuple[float, float]:
    """Index alpha of ``P(1 - s < e) ~ e^alpha`` near cosine 1, and its standard error, by Hill from the pool (n, N).

    A shortfall link of exponent beta has a finite normaliser for ``beta < alpha`` but the 1/k law only for
    ``beta < alpha / 2``. The smallest ``frac`` of all shortfalls counts, ``min_points`` at least; biased a little down.
    """
    positive_number(frac, "frac", below=1)
    return tail_index(Pairs(np.zeros(neg.shape[0]), neg), frac, negatives_count(min_points, "min_points"))


def heavy_tail(pairs: Pairs, *links: Link) -> tuple[float, list[str]]:
    """Tail index of a pool that can tell, else nan; a sentence for each link too steep for it, which warns."""
    needed = any(link.theta_t for link in links) and not pairs.unbounded and pairs.n * pairs.pool_size >= 2000
    alpha, remarks = math.nan, []
    if needed:
        with suppress(ValueError):  # too few candidates differ from the anchors: a collapsed encoder
            alpha = tail_index(pairs)[0]
    for link in links:
        steep = link.theta_t > 0 and link.theta_t >= alpha / 2
        text = f"exponent {link.theta_t:.3g} is at least half the tail index {alpha:.3g}: the 1/k law fails"
        remarks.append(text if steep else "")
        if steep:
            warnings.warn(text, HeavyTailWarning, stacklevel=3)
    return alpha, remarks


@dataclass(frozen=True)
class Result:
    """Numbers with names."""

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in values.items()}


def normal_quantile(level: float) -> float:
    """Two-sided normal quantile of a confidence level in (0, 1)."""
    return NormalDist().inv_cdf((1 + positive_number(level, "level", below=1)) / 2)


def sampling_variance(per_anchor: Tensor) -> Tensor:
    """Variance of the mean over anchors, the last axis; NaN for a single anchor."""
    n = per_anchor.shape[-1]
    return per_anchor.var(-1) / n if n > 1 else torch.full(per_anchor.shape[:-1], math.nan, dtype=torch.float64)


@dataclass(frozen=True)
class CrossEntropy(Result):
    """Search cross-entropy relative to the corpus law, interval ``lo`` to ``hi``; arrays are per anchor (n,)."""

    value: float  # corrected for the pool size
    se: float
    lo: float
    hi: float
    plugin: float  # uncorrected and optimistic: its expectation is below the truth
    lower: float  # the plug-in: lower end of a bracket that is valid in expectation for every pool size
    upper: float  # cross-fitted upper end of that bracket
    log_Z: np.ndarray = field(repr=False)  # log-normaliser
    chi2: np.ndarray = field(repr=False)  # of the search kernel from the corpus
    r_pos: np.ndarray = field(repr=False)  # density of the search kernel at the positive, averaged over positives
    ess_median: float  # median over anchors of N / (1 + chi2 (N - 1) / N)
    hubness_chi2: float  # of the average search result from the corpus; nan where the pool is not shared
    per_anchor: np.ndarray = field(repr=False)


def cross_entropy_from(sums: PoolSums, shared_pool: bool, level: float) -> CrossEntropy:
    """The cross-entropy that one pass over the pool amounts to; warns when the pool is too small."""
    size, z, (log_z, chi2) = len(sums.hubness), normal_quantile(level), sums.whole
    positive = sums.positive.mean(1)
    rows = log_z + chi2 / (2 * size) - positive
    ess = float(np.median(size / (1 + chi2 * (size - 1) / size)))
    if ess < 30:
        text = f"median effective sample size {ess:.1f} of a pool of {size}: too small for this link, CE is optimistic"
        warnings.warn(text, SmallPoolWarning, stacklevel=3)
    value, plugin, upper = (float(v.mean()) for v in (rows, log_z - positive, sums.crossfit - positive))
    se = math.sqrt(float(sampling_variance(rows)) + (sums.pool_variance if shared_pool else 0))
    density = (sums.positive - log_z[:, None]).exp().mean(1)
    hubs = sums.pool_variance * size if shared_pool else math.nan
    return CrossEntropy(value, se, value - z * se, value + z * se, plugin, plugin, upper,
                        log_z.numpy(), chi2.numpy(), density.numpy(), ess, hubs, rows.numpy())  # fmt: skip


def search_cross_entropy(
    pos: Similarities, neg: Similarities, *, tau: float | None = None, link: Link | None = None,
    shared_pool: bool = True, level: float = 0.95, unbounded: bool = False,
) -> CrossEntropy:  # fmt: skip
    """Cross-entropy of the positives under similarity search, in nats relative to the corpus; lower is better.

    It is at least ``-KL(M || pi)``, minus the information between anchor and positive.

    Args:
        pos: Cosines anchor-positive, (n,) or (n, P); P positives are averaged per anchor.
        neg: Cosines anchor-pool (n, N). The pool must be a sample of the corpus that will be searched, without the
            anchors themselves: other anchors' positives or masked negatives change what is estimated.
        tau: Temperature of the softmax link; or give ``link``.
        link: Any link of this module.
        shared_pool: Whether all anchors face the same N items; False if every row has its own.
        level: Confidence level of the interval.
        unbounded: Accept scores that are not cosines.

    Raises:
        ValueError: for bad shapes, values that are not finite or not cosines. TypeError: for integers.
    """
    pairs, link = Pairs(pos, neg, unbounded), as_link(tau, link)
    heavy_tail(pairs, link)
    return cross_entropy_from(pool_sums(pairs, link), shared_pool, level)


@dataclass(frozen=True)
class RelevanceCE(Result):
    """Cross-entropy of graded relevance under search, per anchor (n,): ``ce = entropy + kl``."""

    ce: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    ce_minus_logN: np.ndarray
    empty_rows: np.ndarray


def relevance_cross_entropy(
    sim: Similarities, rel: "np.ndarray | Tensor | Sequence[Sequence[float]]", *,
    tau: float | None = None, link: Link | None = None, unbounded: bool = False,
) -> RelevanceCE:  # fmt: skip
    """Cross-entropy between graded relevance and search over the same N documents.

    ``sim`` (n, N) are cosines, ``rel`` (n, N) relevances, not negative: a row of zeros counts as uniform and is flagged
    in ``empty_rows``. The other arguments are those of :func:`search_cross_entropy`.
    """
    logits = as_link(tau, link).logit(to_float64(sim, "sim", unbounded))
    weights = torch.as_tensor(rel, dtype=torch.float64, device=logits.device)
    if logits.ndim != 2 or weights.shape != logits.shape:
        raise ValueError(f"sim and rel must both be (n, N), not {tuple(logits.shape)} and {tuple(weights.shape)}")
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError("rel must be finite and not negative")
    total = weights.sum(1, keepdim=True)
    target = torch.where(total > 0, weights / total.clamp(min=1e-300), 1 / weights.shape[1])
    ce = logits.logsumexp(1) - (target * logits).sum(1)
    entropy = torch.special.entr(target).sum(1)
    columns = (ce, entropy, ce - entropy, ce - math.log(weights.shape[1]), total[:, 0] == 0)
    return RelevanceCE(*(column.cpu().numpy() for column in columns))
