"""What embeddings of pairs and of a pool say about search: measured, in text, as a plot and as a page."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import datasets
import numpy as np
from scipy.optimize import minimize_scalar
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import semantic_search
from torch import Tensor

from simcse_weince.errors import InputError, first_line
from simcse_weince.page import Page, new_figure
from simcse_weince.search import kernels, risk
from simcse_weince.tail import RESOLUTION

FEWEST_PAIRS = 10
SMALLEST_POOL = 20
HOTTEST = 1e3  # temperature at which all candidates count alike
_DEPTH = 100  # of the ranking
_WARNINGS = (kernels.SelfMatchWarning, kernels.SmallPoolWarning, kernels.HeavyTailWarning)
Section = tuple[str, str, list[str], list[list[str]]]


@dataclass(frozen=True)
class SearchReport(kernels.Result):
    """Everything :func:`measure_search` finds; numbers of negatives and the bias are at ``temperature``."""

    pairs: int
    pool: int
    temperature: float
    tolerance: float
    bias: risk.BiasCurve
    recommendation: risk.KRecommendation
    cross_entropy: kernels.CrossEntropy
    sweep: risk.TemperatureSweep
    best: risk.TemperatureFit | None  # None where the pool is too small for every temperature tried
    links: risk.LinkComparison | None  # softmax and shortfall link, each at its best among which the pool can tell
    retrieval: dict[str, float]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values ready for JSON, None for what is not finite, without the arrays per anchor."""

        def plain(value: Any) -> Any:
            if isinstance(value, kernels.Result):
                untold = {"bias_k"} | {item.name for item in fields(value) if not item.repr}  # not asked for; too long
                value = {k: v for k, v in kernels.Result.to_dict(value).items() if k not in untold}
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return plain(kernels.Result.to_dict(self))


def measure_search(
    anchors: Tensor, positives: Tensor, pool: Tensor, *, temperature: float = 0.05, tolerance: float = 0.01,
    max_k: int = 16_384, faiss_index: str | None = None,
) -> SearchReport:  # fmt: skip
    """Measure how well embeddings search, and how many negatives and which temperature stand for it.

    Args:
        anchors: Unit vectors (n, d) with n of at least 10.
        positives: Unit vectors (n, d), row i belonging to anchor i.
        pool: Unit vectors (N, d): a sample of the corpus that will be searched, without anchors and positives.
        temperature: Of the softmax link at which the number of negatives is judged.
        tolerance: Of the recommended numbers of negatives, in nats.
        max_k: The bias curve goes over powers of two up to here.
        faiss_index: See :func:`retrieval_figures`.
    """
    retrieval = retrieval_figures(anchors, positives, pool, faiss_index)
    pos, neg = (anchors * positives).sum(1).clamp(-1, 1), kernels.CosineRows(anchors, pool)
    ks = [2**power for power in range(max_k.bit_length())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cross_entropy = kernels.search_cross_entropy(pos, neg, tau=temperature)
    remarks = list(dict.fromkeys(str(w.message) for w in caught if w.category in _WARNINGS))
    with warnings.catch_warnings():
        for category in _WARNINGS:
            warnings.simplefilter("ignore", category)
        curve = risk.bias_curve(pos, neg, ks, tau=temperature)
        recommendation = risk.recommend_k(pos, neg, tolerance, tau=temperature)
        sweep = risk.temperature_sweep(pos, neg, np.geomspace(0.01, 1, 13).tolist())
        # Where a handful of items carry the whole estimate, the cross-entropy is optimistic: no place for an optimum.
        warm = sweep.tau[sweep.ess >= 30]
        best = risk.optimal_temperature(pos, neg, bounds=(float(warm[0]), HOTTEST)) if len(warm) else None
        shortfall = [kernels.WeibullLink(float(beta)) for beta in np.geomspace(0.5, 32, 13)]
        tried = [(kernels.search_cross_entropy(pos, neg, link=link), link) for link in shortfall]
        fitted = min(((found.value, link.beta) for found, link in tried if found.ess_median >= 30), default=None)
        if fitted is not None:
            fitted = _refined(pos, neg, fitted)
        links = None
        if best is not None and fitted is not None:
            pair = [kernels.SoftmaxLink(best.tau), kernels.WeibullLink(fitted[1])]
            links = risk.compare_links(pos, neg, pair, calibrate=False)
            remarks += [f"{name}: {text}" for name, text in zip(links.link, links.warnings, strict=True) if text]
    if ks[-1] > len(pool):
        remarks.append(f"beyond k = {len(pool):,}, the size of the pool, the curve takes the pool for the whole corpus")
    if retrieval["recall@1"] == 1:
        remarks.append("every positive outscores the whole pool: give a --pool of sentences more like the positives")
    return SearchReport(len(anchors), len(pool), temperature, tolerance, curve, recommendation, cross_entropy, sweep,
                        best, links, retrieval, remarks)  # fmt: skip


def _refined(pos: Tensor, neg: kernels.CosineRows, fitted: tuple[float, float]) -> tuple[float, float]:
    """The best cross-entropy and exponent of the shortfall link around those of a grid of factors of the root of 2."""

    def loss(log_beta: float) -> float:
        found = kernels.search_cross_entropy(pos, neg, link=kernels.WeibullLink(math.exp(log_beta)))
        return found.value if found.ess_median >= 30 else 1e9  # the search stumbles over what is infinite

    middle, step = math.log(fitted[1]), math.log(2) / 2
    found = minimize_scalar(loss, bounds=(middle - step, middle + step), method="bounded", options={"xatol": 1e-3})
    return min(fitted, (float(found.fun), math.exp(found.x)))


def check_index(faiss_index: str) -> None:
    """Refuse a factory string that faiss cannot parse; whether it suits the embeddings shows when it is built.

    Raises:
        InputError: faiss cannot parse it.
    """
    faiss: Any = import_module("faiss")  # no dependency of this package
    try:
        faiss.index_factory(768, faiss_index, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        if "d % M" not in str(error):  # of a product quantiser of another dimension
            raise _index_error(faiss_index, error) from None


def _index_error(faiss_index: str, error: RuntimeError) -> InputError:
    reason = first_line(error).rpartition(": ")[2]
    return InputError(f"faiss_index {faiss_index}: {reason}; name another index, or none for exact search")


def retrieval_figures(
    anchors: Tensor, positives: Tensor, pool: Tensor, faiss_index: str | None = None
) -> dict[str, float]:
    """Recall, MRR and nDCG of finding each positive among itself and the pool, by sentence-transformers' evaluator.

    The search is exact, in chunks. For pools of many millions ``faiss_index`` names an index of faiss by its factory
    string ("Flat", "IVF4096,Flat", "HNSW32"), built by `datasets`: what it overlooks makes the figures optimistic.
    Cross-entropy and bias never use it: their sums need the whole pool, not only the nearest part of it.

    Args:
        anchors: Unit vectors (n, d).
        positives: Unit vectors (n, d).
        pool: Unit vectors (N, d).
        faiss_index: Factory string of faiss; None for exact search.

    Raises:
        InputError: faiss cannot build or search this index of this pool.
    """
    depth = min(_DEPTH, len(pool))
    own: Any = len(pool)
    hits: list[Any]
    if faiss_index is None:
        hits = semantic_search(anchors, pool, top_k=depth)
    else:
        table, vectors = datasets.Dataset.from_dict({"row": range(len(pool))}), pool.float().cpu().numpy()
        options = {"string_factory": faiss_index, "metric_type": 0, "train_size": len(vectors)}  # 0: inner product
        try:
            table.add_faiss_index_from_external_arrays(vectors, "pool", **options)
            found = table.search_batch("pool", anchors.float().cpu().numpy(), k=depth)
        except RuntimeError as error:
            raise _index_error(faiss_index, error) from error
        hits = [
            [{"corpus_id": int(row), "score": float(score)} for score, row in zip(*best, strict=True) if row >= 0]
            for best in zip(found.total_scores, found.total_indices, strict=True)
        ]
    # A tie is no hit, whatever the rounding of the two products is.
    for row, score in zip(hits, ((anchors * positives).sum(1) - RESOLUTION).tolist(), strict=True):
        row.append({"corpus_id": own, "score": score})
    queries: list[Any] = list(range(len(anchors)))
    evaluator = InformationRetrievalEvaluator(
        dict.fromkeys(queries, ""), {}, {query: {own} for query in queries}, mrr_at_k=[10], ndcg_at_k=[10],
        accuracy_at_k=[1], precision_recall_at_k=[1, 10, 100], map_at_k=[10],
    )  # fmt: skip
    scores = evaluator.compute_metrics([*hits])
    recalls = {f"recall@{k}": float(value) for k, value in scores["recall@k"].items()}
    return {**recalls, "MRR@10": float(scores["mrr@k"][10]), "nDCG@10": float(scores["ndcg@k"][10])}


def verdict(report: SearchReport) -> str:
    """The outcome in two or three sentences."""
    advice, tau, tol = report.recommendation, report.temperature, report.tolerance
    if advice.k_plug is None:
        first = (
            f"At temperature {tau:g} no batch that can be run brings the loss within {tol:g} nats of the search "
            f"objective that it stands for: that takes about {_count(max(advice.k_safe_upper, advice.k_asymptotic))} "
            "negatives."
        )
    else:
        first = (
            f"At temperature {tau:g}, {_count(advice.k_plug)} negatives (a batch of {_count(advice.k_plug + 1)}) bring "
            f"the loss within {tol:g} nats of the search objective that it stands for."
        )
    if report.best is None:
        return f"{first} The pool is too small to tell the best temperature."
    limit = ""
    if report.best.at_bound:
        limit = ", the coldest tried" if report.sweep.ess[0] >= 30 else ", the coldest that this pool can tell"
    if report.best.tau == HOTTEST:
        limit = ", the hottest tried: they find the positives no nearer than random candidates"
    return f"{first} These embeddings find the positives best at temperature {report.best.tau:.3g}{limit}."


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e12 else f"{value:.3g}"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"


def sections(report: SearchReport) -> list[Section]:
    """The report as (title, explanation, header, rows of formatted cells)."""
    advice, curve, sweep, links = report.recommendation, report.bias, report.sweep, report.links
    entropy, worst, tol = report.cross_entropy, report.recommendation.k_worst_case, report.tolerance
    begins = _count(curve.asymptotic_from)
    plug = "none found" if advice.k_plug is None else _count(advice.k_plug)
    numbers = [
        ["estimated", plug, "the bias and the error of its estimate stay within the tolerance from here on"],
        ["asymptotic", _count(advice.k_asymptotic), f"by the 1/k law, which begins near {begins}"],
        ["safe", _count(advice.k_safe_upper), "the loss exceeds its limit by no more, by a bound without a 1/k law"],
        ["worst case", "unknown" if worst is None else _count(worst), "enough for any data and any embedding"],
    ]  # fmt: skip
    bends = zip(curve.k.tolist(), curve.bias, curve.lo, curve.hi, strict=True)
    rows = [[f"{k:,}", *map(_number, (b, lo, hi, k * b))] for k, b, lo, hi in bends]
    heat = zip(sweep.tau, sweep.ce, sweep.se, sweep.lower, sweep.upper, sweep.ess, strict=True)
    shapes = []
    if links is not None:
        columns = links.link, links.params, links.ce, links.se, links.diff_to_first, links.diff_se
        for name, params, *values in zip(*columns, strict=True):
            chosen = next(f"{key} {params[key]:.3g}" for key in ("tau", "beta") if key in params)
            shapes.append([name, chosen, *map(_number, values)])
    return [
        ("How many negatives", f"Smallest number that keeps the loss within {tol:g} nats of its limit.",
         ["rule", "negatives", "meaning"], numbers),
        ("Distance from the search objective",
         "Mean loss with k negatives, less log(k + 1), less its limit, the search cross-entropy; 95 % interval.",
         ["k", "bias", "from", "to", "k x bias"], rows),
        ("Search cross-entropy",
         f"At temperature {report.temperature:g}: {entropy.value:.4f} nats, 95 % interval {entropy.lo:.4f} to "
         f"{entropy.hi:.4f}; 0 is search at random, lower is better. Below, each link at the parameter that is best on "
         "these pairs, of those for which the pool is large enough.",
         ["link", "parameter", "nats", "se", "difference", "se"], shapes),
        ("Temperature", "Only where the effective sample size is 30 or more is the pool large enough; the bracket "
         "holds in expectation.", ["temperature", "nats", "se", "from", "to", "sample size"],
         [[f"{tau:.3g}", *map(_number, values), f"{ess:,.0f}"] for tau, *values, ess in heat]),
        ("Retrieval", f"Each positive among itself and the pool of {report.pool:,}.", ["figure", "value"],
         [[name, f"{value:.4f}"] for name, value in report.retrieval.items()]),
    ]  # fmt: skip


def format_report(report: SearchReport) -> str:
    """The report as text."""
    lines = [f"{report.pairs:,} pairs, pool of {report.pool:,}", verdict(report)]
    lines += [f"warning: {remark}" for remark in report.warnings]
    for title, explanation, header, rows in sections(report):
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines += ["", title, explanation]
        lines += ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
    return "\n".join(lines)


def draw_bias(report: SearchReport, axes: Any) -> None:
    """Draw the bias over the number of negatives, with its interval, its limit and the recommended number."""
    curve, tol, plug = report.bias, report.tolerance, report.recommendation.k_plug
    axes.axhspan(-tol, tol, color="tab:green", alpha=0.15, label=f"within {tol:g} nats")
    axes.fill_between(curve.k, curve.lo, curve.hi, color="tab:blue", alpha=0.25, label="95 % interval")
    axes.plot(curve.k, curve.bias, "o-", color="tab:blue", markersize=4, label="bias")
    axes.plot(curve.k, curve.cB / curve.k, ":", color="black", label="1/k law")
    if plug is not None:
        axes.axvline(plug, color="tab:green", label=f"{plug:,} negatives")
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=tol)
    axes.set_ylim(min(-2 * tol, 1.5 * curve.lo.min()), max(2 * tol, 1.5 * curve.hi.max()))
    axes.set(title=f"Loss less search objective, temperature {report.temperature:g}", xlabel="negatives", ylabel="nats")


def draw_temperature(report: SearchReport, axes: Any) -> None:
    """Draw the cross-entropy over temperatures, with its bracket where the pool is large enough, and the best one."""
    sweep, good = report.sweep, report.sweep.ess >= 30
    axes.fill_between(sweep.tau[good], sweep.lower[good], sweep.upper[good], color="tab:orange", alpha=0.25)
    axes.plot(sweep.tau[good], sweep.ce[good], "o-", color="tab:orange", markersize=4, label="cross-entropy")
    axes.plot(sweep.tau[~good], sweep.ce[~good], "o", color="tab:orange", fillstyle="none", label="pool too small")
    if report.best is not None:
        axes.axvline(report.best.tau, color="tab:green", label=f"best: {report.best.tau:.3g}")
    axes.set_xscale("log")
    axes.set(title="Search cross-entropy", xlabel="temperature", ylabel="nats, 0 being random search")


def draw(report: SearchReport) -> Any:
    """Both drawings side by side, as a matplotlib figure."""
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    draw_bias(report, left)
    draw_temperature(report, right)
    return figure


def write_page(report: SearchReport, path: str, model: str, notes: Sequence[str] = ()) -> None:
    """Write the report as one self-contained HTML file, the first of whose paragraphs are ``notes``."""
    page = Page(f"Search with {model}", verdict(report))
    for note in [*notes, *(f"Warning: {remark}." for remark in report.warnings)]:
        page.text(note)
    for paint, alt in ((draw_bias, "Bias over the number of negatives"), (draw_temperature, "Cross-entropy")):
        figure = new_figure()
        axes = figure.subplots()
        paint(report, axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        page.figure(figure, alt)
    for title, explanation, header, rows in sections(report):
        page.heading(title)
        page.text(explanation)
        page.table(header, rows)
    page.write(path)
