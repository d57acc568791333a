"""The STS suite: correlations of cosines with graded pairs, alignment and uniformity, as table, JSON and evaluator."""

import logging
import os
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from simcse_weince.errors import InputError
from simcse_weince.outputs import versions
from simcse_weince.sentence.encoder import encode_distinct
from simcse_weince.sentence.pairs import TASKS, GradedPairs, load_sts

logger = logging.getLogger(__name__)

PROTOCOLS = {
    "all": "all pairs of a set joined",
    "mean": "mean over the parts of a set",
    "wmean": "mean over the parts of a set, weighted by their numbers of pairs",
}
DEFINITIONS = (
    "alignment: mean of |f(x) - f(y)|^2 over the pairs scored above 4 of 5; 0 is best",
    "uniformity: log of the mean of exp(-2 |f(x) - f(y)|^2) over all pairs of distinct sentences; lower is better",
    "on unit vectors (Wang and Isola, 2020), over the evaluated split; SimCSE's plots (footnote 3) take such "
    "pairs and sentences from the whole of STS-B",
)

NOT_FINITE = "values that are not finite"
# Resamples of fewer pairs repeat so few values that an interval can shrink to one point.
FEWEST_PAIRS = 10


@dataclass(frozen=True)
class Correlation:
    """Spearman and Pearson correlation in [-1, 1]; where undefined, None and the reason, such as "constant gold"."""

    spearman: float | None
    pearson: float | None
    reason: str = ""


def spearman_pearson(gold: Any, predicted: Any) -> Correlation:
    """Correlate predictions with gold scores; where that is undefined, say why instead of returning NaN or 0.

    Predictions that differ by less than the resolution of float32 count as constant: they are the rounding noise of a
    collapsed encoder.

    Args:
        gold: Human scores on any scale. Shape: (pairs,).
        predicted: Predicted similarities. Shape: (pairs,).

    Raises:
        ValueError: The shapes differ, or one of the two holds text, which would be ranked alphabetically.
    """
    gold, predicted = np.asarray(gold), np.asarray(predicted)
    for name, values in (("gold", gold), ("predicted", predicted)):
        if values.dtype.kind not in "iuf":
            raise ValueError(f"{name} must hold numbers, not {values.dtype}")
    if gold.shape != predicted.shape or gold.ndim != 1:
        raise ValueError(f"gold and predicted must have one equal length, got shapes {gold.shape}, {predicted.shape}")
    reason = ""
    if len(gold) < 2:
        reason = "fewer than two pairs"
    elif not (np.isfinite(gold).all() and np.isfinite(predicted).all()):
        reason = NOT_FINITE
    elif np.ptp(gold) == 0:
        reason = "constant gold"
    elif np.ptp(predicted) <= 1e-6 * np.abs(predicted).max():
        reason = "constant predictions"
    if reason:
        return Correlation(None, None, reason)
    return Correlation(float(spearmanr(gold, predicted)[0]), float(pearsonr(gold, predicted)[0]))


def correlate_parts(
    gold: np.ndarray, predicted: np.ndarray, parts: Sequence[tuple[str, slice]] = ()
) -> dict[str, Correlation]:
    """Correlate by each of the ``PROTOCOLS``, the three that SentEval prints.

    Args:
        gold: Human scores. Shape: (pairs,).
        predicted: Predicted similarities. Shape: (pairs,).
        parts: Names and slices of the parts; without any, the three protocols agree.
    """
    joined = spearman_pearson(gold, predicted)
    if not parts:
        return dict.fromkeys(PROTOCOLS, joined)
    each = {name: spearman_pearson(gold[part], predicted[part]) for name, part in parts}
    undefined = [f"{one.reason} in {name}" for name, one in each.items() if one.reason]
    if undefined:
        return {"all": joined, **dict.fromkeys(("mean", "wmean"), Correlation(None, None, "; ".join(undefined)))}
    values = np.array([(one.spearman, one.pearson) for one in each.values()], dtype=np.float64)
    sizes = [part.stop - part.start for _, part in parts]
    return {
        "all": joined,
        "mean": Correlation(*values.mean(axis=0).tolist()),
        "wmean": Correlation(*np.average(values, axis=0, weights=sizes).tolist()),
    }


def bootstrap_intervals(
    gold: np.ndarray, predicted: np.ndarray, *, resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float] | None]:
    """95 % percentile intervals of Spearman and Pearson under resampling of whole pairs.

    Args:
        gold: Human scores. Shape: (pairs,).
        predicted: Predicted similarities. Shape: (pairs,).
        resamples: Number of resamples; 0 gives no intervals.
        seed: Seed of an own generator; the global ones are not touched.

    Returns:
        Bounds under "spearman" and "pearson", None where undefined and for fewer pairs than ``FEWEST_PAIRS``.
    """
    if not resamples or len(gold) < FEWEST_PAIRS or spearman_pearson(gold, predicted).reason:
        return {"spearman": None, "pearson": None}
    generator = np.random.default_rng(seed)
    codes = [np.unique(values, return_inverse=True)[1] for values in (gold, predicted)]
    spearman, pearson = [], []
    for start in range(0, resamples, 50):
        picks = generator.integers(0, len(gold), size=(min(50, resamples - start), len(gold)))
        spearman.append(_row_pearson(*(_midranks(code[picks]) for code in codes)))
        pearson.append(_row_pearson(gold[picks], predicted[picks].astype(np.float64)))

    def interval(chunks: list[np.ndarray]) -> tuple[float, float] | None:
        values = np.concatenate(chunks)
        # A resample of one repeated value has no correlation and is left out.
        values = values[np.isfinite(values)]
        return tuple(np.percentile(values, (2.5, 97.5)).tolist()) if len(values) else None

    return {"spearman": interval(spearman), "pearson": interval(pearson)}


def _midranks(codes: np.ndarray) -> np.ndarray:
    """Average ranks within each row of dense integer codes, by counting instead of sorting. Shape: (resamples, n)."""
    rows, width = len(codes), int(codes.max()) + 1
    tied = np.bincount((codes + width * np.arange(rows)[:, None]).ravel(), minlength=rows * width).reshape(rows, width)
    return np.take_along_axis(tied.cumsum(axis=1) - (tied - 1) / 2, codes, axis=1)


def _row_pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = x - x.mean(axis=1, keepdims=True)
    y = y - y.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))


def _unit(vectors: Any) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def pairwise_cosines(first: Any, second: Any) -> np.ndarray:
    """Cosines row by row, computed in float64 and rounded to float32 so that pairs of equal sentences tie exactly.

    Args:
        first: Embeddings. Shape: (pairs, width).
        second: Embeddings. Shape: (pairs, width).
    """
    return (_unit(first) * _unit(second)).sum(axis=1).astype(np.float32)


def alignment(x: Any, y: Any, alpha: float = 2) -> float | None:
    """Alignment of positive pairs: mean |x - y|^alpha of unit vectors, None without pairs (Wang and Isola, 2020).

    Args:
        x: Embeddings, normalised here. Shape: (pairs, width).
        y: Those of their positives, likewise.
        alpha: Exponent.
    """
    return float((np.linalg.norm(_unit(x) - _unit(y), axis=1) ** alpha).mean()) if len(x) else None


def uniformity(x: Any, t: float = 2) -> float | None:
    """Uniformity: log mean exp(-t |x_i - x_j|^2) over i < j of unit vectors (Wang and Isola, 2020).

    Args:
        x: Embeddings of distinct sentences, normalised here; fewer than two give None. Shape: (sentences, width).
        t: Scale of the Gaussian potential.
    """
    x = _unit(x)
    # In blocks of rows: 5,000 sentences would need 200 MB at once.
    total = sum(
        float(np.triu(np.exp(2 * t * (x[start : start + 512] @ x[start:].T - 1)), k=1).sum())
        for start in range(0, len(x), 512)
    )
    return float(np.log(2 * total / (len(x) * (len(x) - 1)))) if len(x) > 1 else None


def _geometry(pairs: GradedPairs, vectors: Callable[[Sequence[str]], np.ndarray]) -> tuple[float | None, ...]:
    """Alignment and uniformity (``DEFINITIONS``), None where there is no pair or a vector is not finite."""
    positives = np.flatnonzero(pairs.positives)
    first, second = (vectors([side[row] for row in positives]) for side in (pairs.first, pairs.second))
    both = alignment(first, second), uniformity(vectors(list(dict.fromkeys((*pairs.first, *pairs.second)))))
    return tuple(value if value is not None and np.isfinite(value) else None for value in both)


class STSEvaluator(BaseEvaluator):
    """Score graded pairs during training, with the code of the final evaluation.

    Returns ``{name}_spearman_cosine`` (the primary metric), ``{name}_pearson_cosine``, ``{name}_uniformity`` and
    ``{name}_alignment``. A correlation that is undefined is NaN for the trainer, which never selects it as best; the
    reason is logged, kept in `undefined` and shown in the model card. The train or eval mode of every module is
    restored, random states are not touched, and nothing is written to disk.
    """

    def __init__(self, pairs: GradedPairs, name: str = "sts-dev", batch_size: int = 128) -> None:
        """Score `pairs` under the prefix `name`, encoding `batch_size` sentences at a time."""
        super().__init__()
        self.pairs = pairs
        self.name = name
        self.batch_size = batch_size
        self.primary_metric = f"{name}_spearman_cosine"
        self.undefined = ""

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: Any = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate `model`, a SentenceTransformer; `epoch` and `steps` go into its model card."""
        vectors = encode_distinct(model, [*self.pairs.first, *self.pairs.second], self.batch_size)
        cosines = pairwise_cosines(vectors(self.pairs.first), vectors(self.pairs.second))
        correlation = spearman_pearson(self.pairs.scores, cosines)
        aligned, uniform = _geometry(self.pairs, vectors)
        self.undefined = f"undefined ({correlation.reason})" if correlation.reason else ""
        if self.undefined:
            logger.warning("%s: the correlations are %s", self.name, self.undefined)
        correlations = {"spearman_cosine": correlation.spearman, "pearson_cosine": correlation.pearson}
        geometry = {"alignment": aligned, "uniformity": uniform}
        card = {key: self.undefined if value is None else value for key, value in correlations.items()}
        card |= {key: value for key, value in geometry.items() if value is not None}
        card = {f"{self.name}_{key}": value for key, value in card.items()}
        self.store_metrics_in_model_card_data(model, card, epoch, steps)
        return {key: float("nan") if isinstance(value, str) else value for key, value in card.items()}

    @property
    def description(self) -> str:
        """Name of the task in the model card."""
        return "Semantic Similarity"


@dataclass(frozen=True)
class TaskResult:
    """Figures of one set; `pairs` to `scale` describe the data, see `GradedPairs`.

    Attributes:
        parts: Number of pairs of each part.
        correlations: Protocol -> correlation.
        intervals: 95 % bootstrap intervals of protocol "all".
        alignment: For STS-B and one's own files only, see ``DEFINITIONS``.
        uniformity: As `alignment`.
    """

    task: str
    split: str
    note: str
    pairs: int
    parts: dict[str, int]
    files: dict[str, str]
    scale: tuple[float, float]
    correlations: dict[str, Correlation]
    intervals: dict[str, tuple[float, float] | None]
    alignment: float | None = None
    uniformity: float | None = None


@dataclass(frozen=True)
class Results:
    """Figures of an evaluation, and what is needed to repeat it."""

    tasks: list[TaskResult]
    provenance: dict[str, Any]

    def average(self, protocol: str = "all") -> float | None:
        """Mean Spearman of the seven sets, None unless all seven are there and defined."""
        values = {result.task: result.correlations[protocol].spearman for result in self.tasks}
        seven = [value for task in TASKS if (value := values.get(task)) is not None]
        return float(np.mean(seven)) if len(seven) == len(TASKS) else None

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary: correlations in [-1, 1], None where undefined, no absolute paths."""
        return {
            "tasks": [asdict(result) for result in self.tasks],
            "average_spearman": {protocol: self.average(protocol) for protocol in PROTOCOLS},
            "definitions": {**PROTOCOLS, "alignment and uniformity": list(DEFINITIONS)},
            **self.provenance,
        }


def parse_tasks(text: str) -> list[str]:
    """Split "stsb,sickr" into names of tasks; "sts" stands for all seven.

    Raises:
        InputError: A name is unknown.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if unknown := [name for name in names if name not in (*TASKS, "sts")]:
        raise InputError(f"unknown STS task {unknown[0]!r}: choose from sts (all seven), {', '.join(TASKS)}")
    return list(dict.fromkeys(task for name in names for task in (TASKS if name == "sts" else [name])))


def load_suite(
    tasks: Sequence[str] | None = None,
    split: str = "test",
    data_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | None = None,
) -> list[GradedPairs]:
    """Load the sets of an evaluation with `load_sts`; without `tasks` the seven test sets, or another split of stsb."""
    tasks = tasks or (list(TASKS) if split == "test" else ["stsb"])
    return [load_sts(task, split, data_dir, cache_dir) for task in tasks]


def evaluate_model(
    model: SentenceTransformer,
    sets: Sequence[GradedPairs],
    *,
    batch_size: int = 128,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Results:
    """Correlate the model's cosines with every set, encoding each distinct sentence once.

    Args:
        model: The encoder; its truncation, prompt and pooling are used as they are.
        sets: Sets from `load_suite` or `read_pairs`.
        batch_size: Sentences encoded at a time.
        bootstrap: Resamples of the intervals, 0 for none.
        seed: Seed of the resamples.
    """
    vectors = encode_distinct(model, (text for pairs in sets for text in (*pairs.first, *pairs.second)), batch_size)
    results = []
    for pairs in sets:
        cosines = pairwise_cosines(vectors(pairs.first), vectors(pairs.second))
        with_geometry = pairs.name == "stsb" or pairs.name not in TASKS
        aligned, uniform = _geometry(pairs, vectors) if with_geometry else (None, None)
        results.append(
            TaskResult(
                task=pairs.name,
                split=pairs.split,
                note=pairs.note,
                pairs=len(pairs),
                parts={name: part.stop - part.start for name, part in pairs.parts},
                files=pairs.files,
                scale=pairs.scale,
                correlations=correlate_parts(pairs.scores, cosines, pairs.parts),
                intervals=bootstrap_intervals(pairs.scores, cosines, resamples=bootstrap, seed=seed),
                alignment=aligned,
                uniformity=uniform,
            )
        )
    provenance = {
        "versions": versions(),
        "seed": seed,
        "configuration": {
            "similarity": "cosine",
            "batch_size": batch_size,
            "bootstrap_resamples": bootstrap,
            "modules": [type(module).__name__ for module in model],
            "max_seq_length": model.max_seq_length,
            "dtype": str(model.dtype),
            "prompt": model.prompts.get(model.default_prompt_name or ""),
        },
    }
    return Results(results, provenance)


def format_table(results: Results, protocol: str = "all") -> str:
    """Lay out Spearman x 100 in SimCSE's columns, then per set the split, protocol, pairs, intervals and files.

    Args:
        results: Figures of `evaluate_model`.
        protocol: "all", "mean" or "wmean".
    """
    lines = []
    suite = {result.task: result for result in results.tasks if result.task in TASKS}
    if suite:
        cells = [_percent(suite[task].correlations[protocol].spearman) if task in suite else "-" for task in TASKS]
        average = results.average(protocol)
        rows = ([*TASKS.values(), "Avg."], [*cells, "-" if average is None else _percent(average)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
        title, figures = (
            "|".join(["", *(f" {cell:^{width}} " for cell, width in zip(row, widths, strict=True)), ""]) for row in rows
        )
        lines += [rule, title, rule, figures, rule]
    lines.append(f"Spearman of cosines x 100; protocol {protocol}: {PROTOCOLS[protocol]}; in brackets: 95 % bootstrap")
    for result in results.tasks:
        lines += _describe(result, protocol)
    shown = [any(getattr(result, name) is not None for result in results.tasks) for name in ("alignment", "uniformity")]
    lines += [line for line, there in zip(DEFINITIONS, (*shown, any(shown)), strict=True) if there]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.2f}"


def _describe(result: TaskResult, protocol: str) -> list[str]:
    correlation = result.correlations[protocol]
    figures = []
    if correlation.reason:
        figures.append(f"undefined ({correlation.reason})")
    else:
        for kind, value in (("spearman", correlation.spearman), ("pearson", correlation.pearson)):
            bounds = result.intervals[kind] if protocol == "all" else None
            figures.append(f"{kind.title()} {_percent(value)}")
            figures[-1] += f" [{_percent(bounds[0])}, {_percent(bounds[1])}]" if bounds else ""
        figures += ["too few pairs for an interval"] if result.pairs < FEWEST_PAIRS else []
    if result.parts:
        others = [name for name in PROTOCOLS if name != protocol]
        figures += [f"{name} {_percent(result.correlations[name].spearman)}" for name in others]
    for name, value in (("alignment", result.alignment), ("uniformity", result.uniformity)):
        figures += [f"{name} {value:.4f}"] if value is not None else []
    files = ", ".join(result.files)
    if result.parts:
        parts = ", ".join(f"{name} {pairs:,}" for name, pairs in result.parts.items())
        files = f"{posixpath.commonpath(result.files) or files} ({parts})"
    title = f"{TASKS.get(result.task, result.task)} {result.split}".strip()
    lines = [f"{title}, {protocol}, {result.pairs:,} pairs: {', '.join(figures)}", f"  files: {files}"]
    return [*lines, f"  note: {result.note}"] if result.note else lines
