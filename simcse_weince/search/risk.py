"""Risk and bias as functions of the number of negatives, and the choices that follow: k, temperature, link.

Arguments named as those of :func:`~simcse_weince.search.kernels.search_cross_entropy` mean the same here: cosines
``pos`` (n,) or (n, P) with the positives and ``neg`` (n, N) with the pool, exactly one of ``tau`` and ``link``, whether
the pool is shared by all anchors, the confidence level, and whether scores other than cosines are accepted.

All estimates come with normal intervals whose standard errors count the anchors and, where the pool is shared, the
pool: ``Var_i / n + Var(hubness) / N`` for losses, a delete-group jackknife over the pool for what is derived from them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import brentq, minimize
from torch import Tensor

from simcse_weince.search.bounds import bias_bounds, kl_bound
from simcse_weince.search.kernels import (
    Link,
    NestedLink,
    Offset,
    Pairs,
    PoolSums,
    Result,
    Similarities,
    SoftmaxLink,
    WeibullLink,
    as_link,
    cross_entropy_from,
    expected_log,
    group_sizes,
    group_sums,
    heavy_tail,
    laplace_grid,
    laplace_transform,
    log_transform,
    negatives_count,
    normal_quantile,
    offset_of,
    pool_sums,
    positive_number,
    sampling_variance,
)

COMPLETE_LIMIT = 10**11  # multiply-adds of the complete U-statistic, a few minutes
K_LIMIT = 2**24
STEEPEST = 1e3  # largest inverse temperature or exponent that a link is fitted with
UNDECIDED = "fitted to the end of its range: the positives outscore this pool, which cannot tell a best link"
SMALLEST_TOLERANCE = 1e-12  # as exact as a bias is; with the next, numbers of negatives stay within float64
RANGE_LIMIT = math.exp(600)


@dataclass(frozen=True)
class RiskCurve(Result):
    """Estimated InfoNCE risk less ``offset`` for each number of negatives ``k``; ``per_anchor`` is (len(k), n)."""

    k: np.ndarray
    value: np.ndarray
    se: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    per_anchor: np.ndarray = field(repr=False)
    offset: Offset
    pool_variance: float


def _numbers(ks: Sequence[int]) -> np.ndarray:
    if not len(ks):
        raise ValueError("ks must not be empty")
    numbers = [negatives_count(k, "ks") for k in ks]
    if max(numbers) > 2**53:
        raise ValueError("ks must be at most 2^53: beyond, float64 does not hold every whole number")
    return np.array(numbers)


def _relative(pos: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Both less the largest logit of each anchor: one exponential per similarity then serves all k."""
    peak = torch.maximum(pool.amax(1), pos.amax(1))[:, None]
    return pos - peak, (pool - peak).exp()


def _blocks(pos: Tensor, pool: Tensor, ks: np.ndarray, orders: Tensor) -> Tensor:
    """Mean of ``log(e^pos + block sum) - pos`` over disjoint blocks of k columns in each order, (len(ks), b)."""
    own, weights = _relative(pos, pool)
    total = pool.new_zeros(len(ks), len(pool))
    for order in orders:
        # The floor keeps a block of negligible weight from log 0.
        shuffled = weights[:, order].clamp(min=1e-300)
        for row, k in enumerate(ks.tolist()):
            block = shuffled[:, : pool.shape[1] // k * k].view(len(pool), -1, k).sum(2).log()
            total[row] += (torch.logaddexp(block[..., None], own[:, None]) - own[:, None]).mean((1, 2))
    return total / len(orders)


def _complete(pos: Tensor, pool: Tensor, ks: np.ndarray) -> Tensor:
    """The same over all subsets of k columns, through the mean elementary symmetric polynomials of ``e^(-t y)``."""
    logs, weights = _relative(pos, pool)
    own, most = logs.exp(), int(ks.max())
    nodes = laplace_grid(float((weights.amin(1) + own.amin(1)).min()), most + 1.0).to(pool.device)
    subsets = pool.new_zeros(len(pool), len(nodes), most + 1)
    subsets[..., 0] = 1
    size = torch.arange(1, most + 1, dtype=torch.float64, device=pool.device)
    for seen, column in enumerate(weights.T, start=1):
        kept = (seen - size).clamp(min=0) / seen * subsets[..., 1:]
        joined = torch.exp(-nodes * column[:, None])[..., None] * subsets[..., :-1]
        subsets[..., 1:] = kept + size / seen * joined
    factor = torch.exp(-nodes * own[..., None]).mean(1)
    transform = (subsets[..., ks.tolist()] - 1).movedim(1, 0)
    return expected_log(log_transform(transform), factor.T[..., None], nodes, 1).T - logs.mean(1)


def risk_curve(
    pos: Similarities, neg: Similarities, ks: Sequence[int], *, tau: float | None = None, link: Link | None = None,
    estimator: Literal["blocks", "complete"] = "blocks", n_perm: int = 8, seed: int = 0, shared_pool: bool = True,
    offset: Offset = "log_k1", level: float = 0.95, unbounded: bool = False,
) -> RiskCurve:  # fmt: skip
    """Unbiased estimates of the InfoNCE risk with each of ``ks`` negatives, at most the pool size.

    "blocks" cuts ``n_perm`` random orders of the pool, from ``seed``, into disjoint blocks; "complete" averages over
    all subsets of k columns, at a cost of ``n * N * max(ks)``. The pool must not contain the anchors' own positives.
    Less the offset "log_k1" or "log_k", the risk tends to the search cross-entropy.
    """
    pairs, link, numbers, z = Pairs(pos, neg, unbounded), as_link(tau, link), _numbers(ks), normal_quantile(level)
    most = int(numbers.max())
    if most > pairs.pool_size:
        raise ValueError(f"ks must not exceed the pool size {pairs.pool_size}; bias_curve extrapolates beyond it")
    if estimator not in ("blocks", "complete"):
        raise ValueError(f"estimator must be 'blocks' or 'complete', not {estimator!r}")
    if estimator == "complete" and pairs.n * pairs.pool_size * most * 150 > COMPLETE_LIMIT:
        raise ValueError("estimator='complete' is too slow for this n * N * max(ks): use 'blocks'")
    heavy_tail(pairs, link)
    rng, parts = np.random.default_rng(seed), []
    shuffles = [rng.permutation(pairs.pool_size) for _ in range(negatives_count(n_perm, "n_perm"))]
    orders = torch.from_numpy(np.stack(shuffles))
    for _, positives, pool in pairs:
        logits = link.logit(positives), link.logit(pool)
        if estimator == "blocks":
            parts.append(_blocks(*logits, numbers, orders.to(pool.device)).cpu())
        else:  # a few anchors at a time: each holds (nodes, k) polynomials
            chunks = (tensor.split(max(1, 20_000 // most)) for tensor in logits)
            parts += [_complete(own, rest, numbers).cpu() for own, rest in zip(*chunks, strict=True)]
    rows = torch.cat(parts, 1) - torch.tensor([[offset_of(k, offset)] for k in numbers.tolist()], dtype=torch.float64)
    hubs = pool_sums(pairs, link).pool_variance if shared_pool else 0.0
    value, se = rows.mean(1).numpy(), (sampling_variance(rows) + hubs).sqrt().numpy()
    return RiskCurve(numbers, value, se, value - z * se, value + z * se, rows.numpy(), offset, hubs)


def extrapolate_risk(curve: RiskCurve, order: Literal[1, 2] = 1) -> tuple[float, float]:
    """Search cross-entropy and its standard error by Richardson extrapolation of a risk curve to infinite k.

    The ``order + 1`` largest k are fitted exactly by a polynomial in 1/k of that order: ``2 R(2k) - R(k)`` for a pair.
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, not {order!r}")
    used = np.unique(curve.k, return_index=True)[1][-(order + 1) :]
    if len(used) <= order:
        raise ValueError(f"order {order} needs a curve with {order + 1} different k")
    k = curve.k[used].astype(np.float64)
    weights = np.linalg.solve(np.vander(1 / k, order + 1, increasing=True).T, np.eye(order + 1)[0])
    shift = np.array([offset_of(int(v), curve.offset) for v in k]) - np.log1p(k)
    rows = torch.from_numpy(weights @ (curve.per_anchor[used] + shift[:, None]))
    return float(rows.mean()), math.sqrt(float(sampling_variance(rows)) + curve.pool_variance)


@dataclass(frozen=True)
class BiasCurve(Result):
    """How far the risk with k negatives is from the cross-entropy it stands for, with its interval (``lo``, ``hi``)."""

    k: np.ndarray  # of any size
    bias: np.ndarray  # risk - offset - CE, corrected for the pool size
    se: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    cA: float  # limit of k * (risk - log k - CE)
    cB: float  # the same for log(k + 1): cA - 1
    cA_se: float
    fit: tuple[float, float]  # coefficients of 1/k and 1/k^2 from asymptotic_from on; nan with fewer than two such k
    loglog_slope: float  # of log |bias| in log k over slope_range, where the sign is constant; -1 in the limit
    slope_range: tuple[int, int] | None
    asymptotic_from: float  # the 1/k law begins around here: max(Er, Ev)
    per_anchor: np.ndarray = field(repr=False)  # uncorrected, (len(k), anchors used)


def _jackknife(whole: Tensor, parts: Tensor, shared_pool: bool) -> tuple[Tensor, Tensor]:
    """Value corrected for the pool size and its pool variance, from leave-one-group-out values (G, ...)."""
    groups = len(parts)
    spread = (groups - 1) * parts.var(0, correction=0) if shared_pool else torch.zeros_like(whole)
    return groups * whole - (groups - 1) * parts.mean(0), spread


def _density(sums: PoolSums) -> Tensor:
    """Density of the search kernel at the positives (n, P)."""
    density = (sums.positive - sums.whole[0][:, None]).exp()
    if float(density.max()) > RANGE_LIMIT:
        raise ValueError("the search density at a positive exceeds e^600: use a temperature above 0.0034")
    return density


def _bias(pairs: Pairs, link: Link, ks: np.ndarray, sums: PoolSums) -> tuple[Tensor, Tensor]:
    """``E log(U_k + r/k)``, the pool as population: per anchor (len(ks), n); means without each group (G, len(ks))."""
    sizes, size = group_sizes(pairs.pool_size), pairs.pool_size
    log_z, without = sums.whole[0], sums.leave_one_out[0]
    per_anchor, left_out = torch.zeros(len(ks), pairs.n, dtype=torch.float64), torch.zeros(len(sizes), len(ks)).double()
    for rows, pos, pool in pairs:
        level = log_z[rows, None].to(pool.device)
        density, own = (link.logit(pool) - level).exp(), (link.logit(pos) - level).exp()
        lowest = float((int(ks.min()) * density.amin(1) + own.amin(1)).min())
        nodes = laplace_grid(lowest, max(float(own.max()), float(ks.max())))
        groups = laplace_transform(density, nodes, lambda e: group_sums(e, sizes)).cpu()
        factor = laplace_transform(own, nodes, lambda e: e.mean(1)).cpu() + 1
        total = groups.sum(-1, keepdim=True)
        logs, rest = log_transform(total[..., 0] / size), log_transform((total - groups) / (size - sums.sizes))
        shift = (without[:, rows] - log_z[rows]).sum(1) / pairs.n
        for index, k in enumerate(ks.tolist()):
            per_anchor[index, rows] = expected_log(logs, factor, nodes, k)
            left_out[:, index] += expected_log(rest, factor[..., None], nodes, k).sum(0) / pairs.n - shift
    return per_anchor, left_out


def bias_curve(
    pos: Similarities, neg: Similarities, ks: Sequence[int], *, tau: float | None = None, link: Link | None = None,
    offset: Offset = "log_k1", max_anchors: int = 512, shared_pool: bool = True, level: float = 0.95,
    unbounded: bool = False,
) -> BiasCurve:  # fmt: skip
    """Distance between the InfoNCE risk with k negatives and the search cross-entropy, for any k.

    Risk and cross-entropy are paired on the same data, so most of their error cancels: the distance is known far more
    exactly than either. The pool stands for the corpus, k may exceed it.

    The offset "log_k1" is the right one, exact as tau grows; "log_k" is the other. The curve uses at most
    ``max_anchors`` anchors, evenly spaced, the constants all of them.
    """
    pairs, link = Pairs(pos, neg, unbounded), as_link(tau, link)
    heavy_tail(pairs, link)
    return _bias_curve(pairs, link, _numbers(ks), pool_sums(pairs, link), offset, max_anchors, shared_pool, level)


def _bias_curve(
    pairs: Pairs, link: Link, ks: np.ndarray, sums: PoolSums, offset: Offset, max_anchors: int, shared: bool,
    level: float,
) -> BiasCurve:  # fmt: skip
    if pairs.pool_size < 2 or offset == "none":
        raise ValueError("a bias needs a pool of at least 2 and offset 'log_k' or 'log_k1'")
    density, z = _density(sums).mean(1), normal_quantile(level)
    some = pairs.spread(negatives_count(max_anchors, "max_anchors"))
    rows, left_out = _bias(some, link, ks, sums if some.n == pairs.n else pool_sums(some, link))
    shift = torch.tensor([math.log(k) - offset_of(k, offset) for k in ks.tolist()], dtype=torch.float64)
    value, pool = _jackknife(rows.mean(1), left_out, shared)
    bias, se = (value + shift).numpy(), (sampling_variance(rows) + pool).sqrt().numpy()

    chi2, (log_without, chi2_without) = sums.whole[1], sums.leave_one_out
    constant = density - chi2 / 2
    without = (sums.positive - log_without[..., None]).exp().mean(2) - chi2_without / 2
    limit, limit_pool = _jackknife(constant.mean(), without.mean(1), shared)
    limit_se = math.sqrt(float(sampling_variance(constant) + limit_pool))

    start = max(float(density.mean()), float(chi2.mean()))
    late, fit = ks >= start, (math.nan, math.nan)
    if len(np.unique(ks[late])) >= 2:  # k * bias = c1 + c2 / k: errors relative to 1/k count alike
        second, first = np.polyfit(1 / ks[late], ks[late] * bias[late], 1).tolist()
        fit = first, second
    same = late & (np.sign(bias) == np.sign(bias[np.argmax(ks)])) & (bias != 0)
    slope, span = math.nan, None
    if len(np.unique(ks[same])) >= 2:
        slope = float(np.polyfit(np.log(ks[same]), np.log(np.abs(bias[same])), 1)[0])
        span = int(ks[same].min()), int(ks[same].max())
    return BiasCurve(ks, bias, se, bias - z * se, bias + z * se, float(limit), float(limit) - 1, limit_se, fit, slope,
                     span, start, (rows + shift[:, None]).numpy())  # fmt: skip


@dataclass(frozen=True)
class KRecommendation(Result):
    """Numbers of negatives that keep the risk within a tolerance of its limit; None where none was found."""

    k_plug: int | None  # from the bias curve with its error, valid for all larger k examined
    k_asymptotic: int  # from the 1/k law alone
    k_safe_upper: int  # from here on the risk exceeds its limit by no more than the tolerance, for these positives
    k_worst_case: int | None  # for every data law and embedding; astronomical below a temperature of 0.3
    Er: float  # mean density of the search kernel at the positive
    Ev: float  # mean chi-square of the search kernel from the corpus
    note: str  # what the numbers mean, in a sentence each


def _smallest(holds: Callable[[int], bool]) -> int:
    """Smallest k of at least 1 from which on ``holds(k)``."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _safe(density: Tensor, gain: int, tol: float) -> int:
    """Smallest k from which on ``E log((k + r) / (k + gain)) <= tol``, which bounds the bias from above.

    Where a few positives are near and most are far, that is below 0 at small k, rises to a peak and only then falls.
    There is one peak: the sign of the slope is that of ``E (gain - r) / (k + r)``, which goes from - to 0 or + to -
    only once, since ``(k + gain)`` times it is ``gain - Er + E (gain - r)^2 / (k + r)``.
    """
    excess = density - gain

    def bound(k: int) -> float:
        return float(torch.log1p(excess / float(k + gain)).mean())

    def settled(k: int) -> bool:
        falls = float((excess / (density + float(k))).mean()) >= 0
        return bound(k) <= tol and (falls or float(excess.mean()) <= tol * (k + gain))

    safe = _smallest(settled)
    return safe if safe == 1 or bound(safe - 1) > tol else 1  # else the peak is no higher than the tolerance


def recommend_k(
    pos: Similarities, neg: Similarities, tol: float, *, tau: float | None = None, link: Link | None = None,
    offset: Offset = "log_k1", level: float = 0.95, shared_pool: bool = True, unbounded: bool = False,
) -> KRecommendation:  # fmt: skip
    """How many negatives keep ``|risk - offset - CE|`` below ``tol`` nats.

    With one positive per item in the batch, batch size is ``k + 1``; with two views of N images k is ``2 N - 2``.
    ``level`` is that of ``k_plug``; unbounded scores, or logits that range over more than 600, have no worst case.
    """
    pairs, link, tol = Pairs(pos, neg, unbounded), as_link(tau, link), positive_number(tol, "tol")
    if tol < SMALLEST_TOLERANCE:
        raise ValueError(f"tol must be at least {SMALLEST_TOLERANCE:g}, not {tol:g}")
    heavy_tail(pairs, link)
    sums, gain = pool_sums(pairs, link), int(offset == "log_k1")
    density, chi2 = _density(sums), float(sums.whole[1].mean())
    safe = _safe(density, gain, tol)
    top = min(K_LIMIT, 8 * max(safe, math.ceil(chi2 / tol), 16))
    grid = np.unique(np.geomspace(1, top, 1 + 4 * math.ceil(math.log2(top))).round().astype(int))
    curve = _bias_curve(pairs, link, grid, sums, offset, 512, shared_pool, level)
    outside = np.flatnonzero(np.abs(curve.bias) + normal_quantile(level) * np.nan_to_num(curve.se, nan=math.inf) > tol)
    first = int(outside[-1]) + 1 if len(outside) else 0
    plug = int(grid[first]) if first < len(grid) else None
    asymptotic = max(1, math.ceil(abs(curve.cA - gain) / tol))
    bounded = not unbounded and link.range <= math.log(RANGE_LIMIT)
    worst = _smallest(lambda k: max(map(abs, bias_bounds(k, None, link.range, offset))) <= tol) if bounded else None
    start = f"for no k up to {top}" if plug is None else f"from k = {plug} on"
    end = "No worst case is known." if worst is None else f"No data can need more than {worst:.3g}."
    note = (
        f"The estimated bias and its error stay within {tol:g} nats {start}. The 1/k law alone, which begins near k = "
        f"{curve.asymptotic_from:.0f}, gives {asymptotic}. From {safe} on the risk exceeds its limit by no more. {end}"
    )
    return KRecommendation(plug, asymptotic, safe, worst, float(density.mean()), chi2, note)


@dataclass(frozen=True)
class TemperatureSweep(Result):
    """One row per temperature; ``bias_k`` is (len(tau), len(ks)), divergences are means over anchors in nats.

    ``lower`` and ``upper`` bracket the cross-entropy in expectation; ``kl_bound`` is the most that a divergence can be;
    ``capacity`` the most information that positives can carry at this temperature with these embeddings.
    """

    tau: np.ndarray
    ce: np.ndarray
    se: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    KL_Q_pi: np.ndarray
    KL_pi_Q: np.ndarray
    chi2: np.ndarray
    ess: np.ndarray
    kl_bound: np.ndarray
    capacity: np.ndarray
    bias_k: np.ndarray


def temperature_sweep(
    pos: Similarities, neg: Similarities, taus: Sequence[float], *, ks: Sequence[int] = (), shared_pool: bool = True,
    level: float = 0.95,
) -> TemperatureSweep:  # fmt: skip
    """Cross-entropy, divergence from the corpus and, for each of ``ks``, bias across temperatures ``taus``."""
    if not len(taus):
        raise ValueError("taus must not be empty")
    pairs, rows, biases = Pairs(pos, neg), [], []
    for tau in taus:
        link = SoftmaxLink(tau)
        sums = pool_sums(pairs, link)
        ce = cross_entropy_from(sums, shared_pool, level)
        log_z = float(ce.log_Z.mean())
        to_corpus, from_corpus = float(sums.search_logit.mean()) - log_z, log_z - float(sums.mean_logit.mean())
        known = (tau, ce.value, ce.se, ce.lower, ce.upper, to_corpus, from_corpus, float(ce.chi2.mean()))
        rows.append((*known, ce.ess_median, kl_bound(tau), 1 / tau - log_z))
        if len(ks):
            biases.append(_bias_curve(pairs, link, _numbers(ks), sums, "log_k1", 512, shared_pool, level).bias)
    columns = dict(zip((f.name for f in fields(TemperatureSweep)), np.array(rows).T, strict=False))
    return TemperatureSweep(**columns, bias_k=np.array(biases).reshape(len(rows), len(ks)))


@dataclass(frozen=True)
class TemperatureFit(Result):
    """Temperature of least cross-entropy; ``at_bound`` says that the search stopped at an end of the range."""

    tau: float
    ce: float
    se: float
    at_bound: bool


def optimal_temperature(
    pos: Similarities, neg: Similarities, *, bounds: tuple[float, float] = (1e-3, 1e3), shared_pool: bool = True,
    level: float = 0.95,
) -> TemperatureFit:  # fmt: skip
    """Temperature at which search expects the cosine that the positives have: ``E E_Q s = E s+``.

    The cross-entropy is convex in ``1 / tau``; this is its only stationary point. ``bounds`` limits the search.
    """
    coldest, hottest = (positive_number(bound, "bounds") for bound in bounds)
    if coldest >= hottest:
        raise ValueError("bounds must increase")
    pairs = Pairs(pos, neg)

    def excess(tau: float) -> float:
        sums = pool_sums(pairs, SoftmaxLink(tau))
        return float(sums.search_logit.mean() - sums.positive.mean())

    if excess(hottest) >= 0:
        best = hottest
    elif excess(coldest) <= 0:
        best = coldest
    else:
        ends = -math.log(hottest), -math.log(coldest)
        best = math.exp(-brentq(lambda log_inverse: excess(math.exp(-log_inverse)), *ends, xtol=1e-10))
    ce = cross_entropy_from(pool_sums(pairs, SoftmaxLink(best)), shared_pool, level)
    return TemperatureFit(best, ce.value, ce.se, best in (coldest, hottest))


@dataclass(frozen=True)
class LinkComparison(Result):
    """One row per link, on the same test anchors; differences are paired with the first link.

    ``alpha_hat`` is the tail index of the pool, nan where no link asks for it or the pool cannot tell;
    ``warnings`` holds "" or a sentence.
    """

    link: list[str]
    params: list[dict[str, float]]
    ce: np.ndarray
    se: np.ndarray
    diff_to_first: np.ndarray
    diff_se: np.ndarray
    alpha_hat: float
    warnings: list[str]


def _calibrated(pairs: Pairs, link: Link) -> Link:
    """The parameters of least plug-in cross-entropy, which is convex in ``theta_s`` and ``theta_t``."""
    start = np.array([link.theta_s, link.theta_t])
    ends = NestedLink(1, 0), NestedLink(0, 1, link.eps)

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        trial, value, slope = NestedLink(float(theta[0]), float(theta[1]), link.eps), 0.0, np.zeros(2)
        for _, pos, pool in pairs:
            logits = trial.logit(pool)
            value += float((logits.logsumexp(1) - trial.logit(pos).mean(1)).sum())
            weights = logits.softmax(1)
            for index in np.flatnonzero(start):
                expected = torch.linalg.vecdot(weights, ends[index].logit(pool))
                slope[index] += float((expected - ends[index].logit(pos).mean(1)).sum())
        return value / pairs.n, slope / pairs.n

    limits = [(1e-3, STEEPEST) if used else (0, 0) for used in start]
    s, t = map(float, minimize(objective, start, jac=True, method="L-BFGS-B", bounds=limits).x)
    if isinstance(link, SoftmaxLink):
        return SoftmaxLink(1 / s)
    return WeibullLink(t, link.eps) if isinstance(link, WeibullLink) else NestedLink(s, t, link.eps)


def compare_links(
    pos: Similarities, neg: Similarities, links: Sequence[Link], *, calibrate: bool = True, split: float = 0.5,
    seed: int = 0, shared_pool: bool = True, level: float = 0.95,
) -> LinkComparison:  # fmt: skip
    """Cross-entropy of several links on held-out anchors: whose search is closer to the positives.

    All have the same floor, so a difference is a difference of ``KL(M || Q)``. With ``calibrate`` the parameters of
    each link are first fitted on a share ``split`` of the anchors, drawn with ``seed``; otherwise all anchors test.
    """
    if not links:
        raise ValueError("links must not be empty")
    pairs = Pairs(pos, neg)
    order = np.random.default_rng(seed).permutation(pairs.n)
    cut = round(positive_number(split, "split", below=1) * pairs.n) if calibrate else 0
    if calibrate and not 0 < cut < pairs.n:
        raise ValueError("split must leave anchors on both sides")
    learn, test = pairs.subset(np.sort(order[:cut])), pairs.subset(np.sort(order[cut:]))
    chosen = [_calibrated(learn, link) if calibrate else link for link in links]
    alpha, remarks = heavy_tail(pairs, *chosen)
    sums = [pool_sums(test, link) for link in chosen]
    results = [cross_entropy_from(s, shared_pool, level) for s in sums]
    differences, errors = [], []
    for index, (link, s, result) in enumerate(zip(chosen, sums, results, strict=True)):
        rows = torch.from_numpy(result.per_anchor - results[0].per_anchor)
        hubs = float((s.hubness - sums[0].hubness).var(correction=0)) / test.pool_size if shared_pool else 0.0
        differences.append(float(rows.mean()))
        errors.append(math.sqrt(float(sampling_variance(rows)) + hubs))
        if max(link.theta_s, link.theta_t) > 0.999 * STEEPEST:
            remarks[index] = UNDECIDED
    return LinkComparison(
        [type(link).__name__ for link in chosen], [dict(vars(link)) for link in chosen],
        np.array([result.value for result in results]), np.array([result.se for result in results]),
        np.array(differences), np.array(errors), alpha, remarks,
    )  # fmt: skip


@dataclass(frozen=True)
class GapCurve(Result):
    """Risk on training and on test tuples for each k, and ``gap = test - train`` with its standard error."""

    k: np.ndarray
    train: np.ndarray
    test: np.ndarray
    gap: np.ndarray
    se: np.ndarray


def gap_curve(
    train: tuple[Similarities, Similarities], test: tuple[Similarities, Similarities], ks: Sequence[int], **options: Any
) -> GapCurve:
    """Generalisation gap of the InfoNCE risk for each number of negatives ``ks``.

    ``train`` and ``test`` are (``pos``, ``neg``), each with a pool of its own; options are those of :func:`risk_curve`.
    """
    seen, held_out = risk_curve(*train, ks, **options), risk_curve(*test, ks, **options)
    gap, se = held_out.value - seen.value, np.hypot(held_out.se, seen.se)
    return GapCurve(seen.k, seen.value, held_out.value, gap, se)
