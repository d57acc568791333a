"""What the tail of an encoder's cosines says about the correction: numbers, a verdict in words, figures, the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from simcse_weince.criterion import NEAR, Weince
from simcse_weince.extremes.link_choice import LinkChoice, choose_link
from simcse_weince.extremes.noise_floor import noise_floor, trichotomy
from simcse_weince.extremes.pot import MIN_EXCESSES, PotFit, fit_pot, mean_residual_life, threshold_stability
from simcse_weince.extremes.scores import Scores, stream_scores, with_direction
from simcse_weince.gather import Shard
from simcse_weince.losses import without_copies
from simcse_weince.page import Page, new_figure
from simcse_weince.sentence.sts import alignment, uniformity
from simcse_weince.tail import RESOLUTION

_STABILITY = (0.92, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999)
_GEOMETRY_ROWS = 5000
NEAREST = 64  # candidates of an anchor, its positive among them, whose choice tells of the link


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about one encoder.

    Attributes:
        name: Name of the encoder.
        scores: Its cosines with itself over the data.
        pot: Fit of the highest of them.
        stability: Rows of `threshold_stability`, in quantiles of all pairs.
        residual_life: Rows of `mean_residual_life`, in quantiles of all pairs.
        link: Link of the positives among hard negatives; None without positives.
        anchors: Per kind of evidence, (blend, raw shape) of the anchors of batches of the training size, (2, M).
        measures: Further numbers by name.
        verdict: Sentences in plain words.
        setting: The options of ``simcse-weince train`` that follow.
    """

    name: str
    scores: Scores
    pot: PotFit
    stability: list[dict[str, Any]]
    residual_life: list[dict[str, Any]]
    link: LinkChoice | None
    anchors: dict[str, np.ndarray]
    measures: dict[str, float | None]
    verdict: str
    setting: str

    def to_json(self) -> dict[str, Any]:
        """Everything but the single cosines, for ``json.dump``."""
        names = ("name", "verdict", "setting", "measures", "stability", "residual_life")
        link = self.link and self.link.to_json()
        return {name: getattr(self, name) for name in names} | {"pot": self.pot.to_json(), "link": link}


def diagnose(
    name: str,
    embeddings: Any,
    keys: Any = None,
    views: tuple[Any, Any, Any, Any] | None = None,
    *,
    tail_quantile: float = 0.99,
    batch_size: int = 64,
    temperature: float = 0.05,
    layout: Literal["cross_view", "both_views"] = "cross_view",
    bootstrap: int = 200,
    seed: int = 0,
) -> Diagnosis:
    """Diagnose an encoder from its embeddings.

    Args:
        name: Name of the encoder, for the page.
        embeddings: Embeddings (N, d) of the data, without dropout.
        keys: (N,) integers, equal for equal texts; None takes equal embeddings for equal texts.
        views: Two views (M, d) of M anchors, row by row positives of each other, and the keys (M,) of both, or None.
        tail_quantile: The cosines above this quantile are fitted; from 0.9 on.
        batch_size: Pairs in a batch of the training that is thought of.
        temperature: Its temperature.
        layout: How its views are compared, as in `Weince`; "both_views" for images.
        bootstrap: Samples for the intervals: of the tail over both members of its pairs, of the link over anchors.
        seed: Seed of samples and bootstrap.
    """
    if keys is None:
        keys = np.unique(np.asarray(embeddings), axis=0, return_inverse=True)[1].reshape(-1)
    scores = stream_scores(embeddings, keys=keys, seed=seed)
    tail = scores.exceedances
    options: dict[str, Any] = {"groups": scores.exceedance_pairs, "total": scores.total, "seed": seed}
    if not len(tail) or (len(tail) >= MIN_EXCESSES and np.ptp(tail) < 100 * RESOLUTION):
        # A collapsed encoder, whose largest cosines differ by rounding alone, or not at all.
        total = scores.pairs or scores.duplicates
        tail, options = np.full(min(total // 10, 1000), scores.threshold), {"total": total}
    pot = fit_pot(tail, quantile=tail_quantile, bootstrap=bootstrap, **options)
    stability = threshold_stability(tail, _STABILITY, bootstrap=min(bootstrap, 50), **options)
    first, second, first_keys, second_keys = views or (embeddings, embeddings, keys, keys)
    among = None
    if views is not None:  # before the batches, because it says which views do not fit
        among = stream_scores(first, second, keys=first_keys, candidate_keys=second_keys, hardest=NEAREST, seed=seed)
    second_keys = first_keys if second_keys is None else second_keys
    usable = np.flatnonzero(with_direction(first, second))
    distinct = np.sort(np.unique(keys, return_index=True)[1])
    seen = embeddings[distinct[:_GEOMETRY_ROWS]] if len(distinct) > 1 else embeddings[:_GEOMETRY_ROWS]
    both_keys, kinds = (first_keys, second_keys), ("regression", "likelihood")
    criteria = [Weince(evidence=kind, layout=layout) for kind in kinds]
    found = [_batches(first, second, both_keys, usable, batch_size, criterion, seed) for criterion in criteria]
    anchors = dict(zip(kinds, found, strict=True))
    measures: dict[str, float | None] = {
        "anchors": len(scores.hardest),
        "pairs compared": scores.pairs,
        "pairs left out as duplicates": scores.duplicates,
        "rows left out": scores.left_out,
        "share of anchors with a negative within 0.05 of the cap": float((scores.hardest[:, 0] >= 1 - NEAR).mean()),
        "uniformity": uniformity(seen[with_direction(seen)]),
    }
    for kind, (blend, _) in anchors.items():
        measures[f"share of anchors with blend above 0.5, {kind} evidence"] = float((blend > 0.5).mean())
    link = None
    if among is not None:
        # Where the positive is not among them, the nearest candidates hold no winner: counted as its losers they would
        # bend every link. With it among them, they are the nearest of all, and the choice between them is the link's.
        last = among.hardest[:, NEAREST - 1 :].max(1, initial=-np.inf)  # -inf where all candidates are shown
        shown = ~(among.positive < last)
        ranked = np.column_stack([among.positive, among.hardest[:, : NEAREST - 1]])[shown]
        link = choose_link(ranked, bootstrap=bootstrap, seed=seed)
        measures[f"share of positives among the {NEAREST} nearest, by which the link is judged"] = float(shown.mean())
        measures["alignment"] = alignment(first[usable], second[usable])
        measures["mean cosine of a positive"] = float(among.positive.mean())
        nearest = among.positive > among.hardest[:, 0]
        measures["share of positives nearer than every negative"] = float(nearest.mean())
    verdict, setting = read_verdict(pot, link, stability, temperature)
    residual_life = mean_residual_life(tail, total=options["total"])
    return Diagnosis(name, scores, pot, stability, residual_life, link, anchors, measures, verdict, setting)


def read_verdict(
    pot: PotFit, link: LinkChoice | None, stability: Sequence[dict[str, Any]], temperature: float = 0.05
) -> tuple[str, str]:
    """Put into words whether the data support the correction, how sure that is, and the options that follow.

    Args:
        pot: Fit of the tail.
        link: Choice of the link; None without positives.
        stability: Rows of `threshold_stability`.
        temperature: Of the training that is thought of.
    """
    if pot.shape_interval is None or pot.endpoint_interval is None:
        return f"Nothing can be said about the tail. {pot.reason}", "none; give more, or more varied, data"
    (low, high), (start, end) = pot.shape_interval, pot.endpoint_interval
    at_cap = high < 0 and start <= 1 and end >= 1 - NEAR
    if at_cap:
        tail = "The largest cosines of negatives run into an end, and it is the cap of the cosine"
    elif high < 0 and start > 1:
        tail = "The tail of the negatives bends, but too little to end at 1: the cap is not felt"
    elif high < 0:
        tail = f"The largest cosines of negatives run into an end at {pot.endpoint:.2f} (95 % interval {start:.2f} to "
        tail += f"{end:.2f}), before the cap 1 that the correction is built on"
    elif low > 0:
        tail = "The tail of the negatives is heavy instead of ending at the cap; near-duplicates look like this"
    else:
        tail = "The tail of the negatives cannot be told from one without an end"
    signs = [row["high"] < 0 for row in stability if row["high"] is not None]
    sure = f"shape {pot.shape:.2f}, 95 % interval {low:.2f} to {high:.2f}; "
    sure += f"{signs.count(high < 0)} of {len(signs)} thresholds agree on whether it is below 0"
    if pot.goodness_p is not None and pot.goodness_p < 0.05:
        sure += f"; as no such tail fits exactly, p = {pot.goodness_p:.2g}, they say more than the interval"
    asks = link is not None and link.p_value is not None and link.p_value < 0.05
    if link is None:
        winners = "Without positives nothing is known of the link that winners follow."
    elif link.blend is None or link.blend_interval is None:
        winners = f"The positives do not tell which link they follow. {link.reason}"
    else:
        winners = f"Positives among hard negatives {'ask' if asks else 'do not ask'} for the shortfall link: lambda "
        winners += "{:.2f}, 95 % interval {:.2f} to {:.2f}, ".format(link.blend, *link.blend_interval)
        winners += f"p = {link.p_value:.2g} for the plain softmax."
    support, setting = "do not support the correction", "--loss infonce"
    if at_cap:
        support = "support the correction" + ("" if asks else " in part")
        setting = "--loss weince --evidence likelihood --gate both --shape shrunk"
    elif asks and link is not None and link.blend is not None:
        support = "support the correction in part"
        # With shape 1 / temperature the logit of the criterion is that of the nested link, T_lambda(s) / temperature.
        setting = f"--loss weince --gate {link.blend:.2f} --shape {1 / temperature:g} --temperature {temperature:g}"
    return f"These data {support}. {tail} ({sure}). {winners}", setting


def summary(diagnoses: Sequence[Diagnosis]) -> str:
    """The verdict of each encoder and the options that follow, a line each."""
    titles = [f"{d.name}: " if len(diagnoses) > 1 else "" for d in diagnoses]
    return "\n".join(f"{title}{d.verdict}\nSetting: {d.setting}" for title, d in zip(titles, diagnoses, strict=True))


def build_page(diagnoses: Sequence[Diagnosis]) -> Page:
    """The page of one encoder, or of several side by side."""
    names = [d.name for d in diagnoses]
    titles = [f"{name}: " if len(names) > 1 else "" for name in names]
    page = Page("Is the endpoint there? " + ", ".join(names), summary(diagnoses))
    for heading, text, figures in _SECTIONS:
        shown = []
        for draw in figures:
            for title, d in zip(titles, diagnoses, strict=True):
                figure = new_figure()
                if caption := draw(d, figure.subplots()):
                    shown.append((figure, title + caption, f"{draw.__name__.strip('_')}-{d.name.replace('/', '-')}"))
        if shown:
            page.heading(heading)
            page.text(text)
        for figure, caption, name in shown:
            page.figure(figure, caption, caption, name)
    page.heading("Numbers")
    columns = [_table_column(d) for d in diagnoses]
    rows = [[key, *(column.get(key) for column in columns)] for key in max(columns, key=len)]
    caption = "95 % intervals, by bootstrap: shape and endpoint over both members of the pairs, lambda over anchors"
    page.table(["", *names], rows, caption)
    return page


def noise_floor_page(seed: int = 0) -> tuple[Page, dict[str, Any]]:
    """The page and the numbers of `noise_floor` and `trichotomy`."""
    floor, domains = noise_floor(seed=seed), trichotomy(seed=seed)
    lead = (
        f"Where winners follow the shortfall law, the error of its link falls like {floor.fisher_constant:.3g}/n; that "
        f"of the softmax stays at its squared bias, {floor.squared_bias:.3g}, however many winners are seen."
    )
    page, figure = Page("What the wrong link costs", lead), new_figure()
    axes, n = figure.subplots(), [row["n"] for row in floor.rows]
    styles = {"shortfall_mse": "oC0", "shortfall_closed": "C0", "softmax_mse": "oC1", "softmax_closed": "C1"}
    for name, style in styles.items():
        axes.loglog(n, [row[name] for row in floor.rows], style, label=name.replace("_", " "))
    axes.set(xlabel="winners n", ylabel="mean squared error of the log-odds")
    axes.legend()
    caption = "Error against n, simulated (mse) and in closed form: one link falls on and on, the other reaches a floor"
    page.figure(figure, caption, caption, "noise_floor")
    page.table(list(floor.rows[0]), [list(row.values()) for row in floor.rows], "Simulation and closed forms")
    links = ("softmax", "power", "shortfall")
    rows = [[row["domain"], row["link"], *(row[link]["divergence"] for link in links)] for row in domains]
    caption = (
        "Divergence of the winners' shares from the best fit of each link, in nats: the right one has the smallest"
    )
    page.table(["kind of noise", "link it calls for", *links], rows, caption)
    return page, {"noise_floor": floor.to_json(), "trichotomy": domains}


def _batches(
    first: Any, second: Any, both_keys: Any, usable: np.ndarray, size: int, criterion: Weince, seed: int
) -> np.ndarray:
    """Blend and raw shape of the anchors of up to 100 random batches of usable rows, (2, M)."""
    first, second = torch.as_tensor(first), torch.as_tensor(second)
    keys = torch.stack([torch.arange(len(first)) if one is None else torch.as_tensor(one) for one in both_keys])
    parts = []
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))
    whole = max(len(usable) - len(usable) % size, min(size, len(usable)))  # a smaller batch has a smaller tail
    for rows in torch.as_tensor(usable)[order[: min(whole, 100 * size)]].split(size):
        keep = without_copies(keys[:, rows], criterion, Shard((len(rows),)))
        tail = criterion.anchor_statistics(first[rows], second[rows], keep=keep)
        parts.append(torch.stack([tail.blend, tail.shape_raw]))
    return torch.cat(parts, dim=1).numpy()


def _table_column(d: Diagnosis) -> dict[str, Any]:
    def with_interval(value: float | None, interval: tuple[float, float] | None) -> str | None:
        return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})" if value is not None and interval else None

    return {
        "shape xi": with_interval(d.pot.shape, d.pot.shape_interval),
        "endpoint": with_interval(d.pot.endpoint, d.pot.endpoint_interval),
        "threshold": d.pot.threshold,
        "excesses fitted": d.pot.excesses,
        "p of the generalised Pareto distribution (goodness of fit)": d.pot.goodness_p,
        "p of the exponential against it": d.pot.p_value,
        "lambda of the nested link": d.link and with_interval(d.link.blend, d.link.blend_interval),
        "p of the softmax against it": d.link and d.link.p_value,
        **d.measures,
    }


def _excesses(d: Diagnosis) -> np.ndarray:
    return np.sort(d.scores.exceedances[d.scores.exceedances > d.pot.threshold]) - d.pot.threshold


def _histogram(d: Diagnosis, axes: Any) -> str:
    if d.pot.threshold is None or d.pot.shape is None:
        return ""
    y, u = _excesses(d), d.pot.threshold
    counts = axes.hist(u + y, bins=60, density=True, color="0.8", label="excesses")[0]
    grid = np.linspace(0, max(1 - u, y[-1]), 400)[1:]
    axes.semilogy(u + grid, d.pot.density(grid), "C0", label=f"generalised Pareto, xi = {d.pot.shape:.2f}")
    axes.semilogy(u + grid, d.pot.density(grid, "exponential"), "C1--", label="exponential")
    axes.axvline(1, color="k", ls=":", label="cap")
    axes.set(xlabel="cosine", ylabel="density", ylim=(counts[counts > 0].min() / 3, None))
    axes.legend()
    return f"{len(y):,} cosines above {u:.3f} with both fitted densities; the dotted line is the cap 1"


def _quantiles(d: Diagnosis, axes: Any) -> str:
    if d.pot.shape is None:
        return ""
    y = _excesses(d)
    shown = np.unique(np.linspace(0, len(y) - 1, 500).astype(int))
    for model, label in (("gpd", "generalised Pareto"), ("exponential", "exponential")):
        axes.plot(d.pot.quantiles((shown + 0.5) / len(y), model), y[shown], ".", label=label)  # type: ignore[arg-type]
    axes.axline((0, 0), slope=1, color="k", lw=0.8)
    axes.set(xlabel="quantile of the fit", ylabel="excess")
    axes.legend()
    return "Quantiles of the excesses against those of both fits"


def _stability(d: Diagnosis, axes: Any) -> str:
    rows = [row for row in d.stability if row["high"] is not None]
    if not rows:
        return ""
    threshold, shape, low, high = (
        np.array([row[key] for row in rows]) for key in ("threshold", "shape", "low", "high")
    )
    axes.errorbar(threshold, shape, [np.maximum(shape - low, 0), np.maximum(high - shape, 0)], fmt="o-", capsize=3)
    axes.axhline(0, color="k", lw=0.8)
    axes.set(xlabel="threshold (cosine)", ylabel="shape xi")
    lowest, highest = (rows[end]["quantile"] for end in (0, -1))
    return f"Shape from {shape.min():.2f} to {shape.max():.2f} over the quantiles {lowest:g} to {highest:g}"


def _mean_excess(d: Diagnosis, axes: Any) -> str:
    if not d.residual_life:
        return ""
    threshold, low, mean, high = ([row[key] for row in d.residual_life] for key in ("threshold", "low", "mean", "high"))
    axes.fill_between(threshold, low, high, alpha=0.3)
    axes.plot(threshold, mean)
    axes.set(xlabel="threshold (cosine)", ylabel="mean excess", ylim=(0, None))
    return f"Mean excess over rising thresholds, from {mean[0]:.3f} to {mean[-1]:.3f}; 95 % band as if independent"


def _blend(d: Diagnosis, axes: Any, name: str = "blend", row: int = 0, largest: float = 1) -> str:
    medians = []
    for kind, values in d.anchors.items():
        bins = np.linspace(0, largest, 49)
        axes.hist(values[row].clip(0, largest), bins=bins, histtype="step", label=f"{kind} evidence")
        medians.append(f"{np.median(values[row]):.2f} by {kind} evidence")
    axes.set(xlabel=f"{name} of an anchor", ylabel="anchors")
    axes.legend()
    return f"{name.capitalize()} of {values.shape[1]:,} anchors, median {', '.join(medians)}"


def _shape(d: Diagnosis, axes: Any) -> str:
    return _blend(d, axes, "shape", 1, 16)


def _links(d: Diagnosis, axes: Any) -> str:
    if d.link is None or not d.link.held_out:
        return ""
    gains = {name: value - d.link.held_out["softmax"] for name, value in d.link.held_out.items()}
    axes.barh(list(gains), list(gains.values()))
    axes.axvline(0, color="k", lw=0.8)
    axes.ticklabel_format(axis="x", scilimits=(-2, 2))
    axes.set(xlabel="log-probability of the positive against the softmax, nats")
    return ", ".join(f"{name} {gain:+.4f}" for name, gain in gains.items()) + f"; the best is {d.link.best}"


_Draw = Callable[[Diagnosis, Any], str]
# Heading, how to read the figures, the figures: each draws one diagnosis and returns a caption, "" for nothing to draw.
_SECTIONS: tuple[tuple[str, str, tuple[_Draw, ...]], ...] = (
    ("Does the tail end?",
     "A generalised Pareto distribution is fitted to the excesses over a high threshold; a shape xi below 0 means an "
     "end. The exponential is fitted on its own. Where a fit is good, its points are on the line.",
     (_histogram, _quantiles)),
    ("Does the answer depend on the threshold?",
     "Over thresholds that are high enough the shape stays put, and the mean excess falls in a straight line if the "
     "tail ends.",
     (_stability, _mean_excess)),
    ("What would the criterion do?",
     "Blend and shape of each anchor in batches of the training size. The likelihood evidence closes on tails without "
     "an end; the regression evidence, the paper's, practically never does.",
     (_blend, _shape)),
    ("Which link do winners follow?",
     "Log-probability of the positive among hard negatives, on anchors that were not fitted: more than 0 is better "
     "than the softmax.",
     (_links,)),
)  # fmt: skip
