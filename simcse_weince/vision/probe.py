"""What a frozen encoder has learned: linear probes, weighted nearest neighbours and recall on its features.

Features are the output before the projection head, of images that nothing random was done to. Every test image counts,
in whatever batches, and what a probe chooses (the epoch, the weight penalty) it chooses by the validation split of the
training images alone.
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simcse_weince.configuration import check_numbers
from simcse_weince.errors import InputError
from simcse_weince.vision.views import evaluation_view

logger = logging.getLogger(__name__)

RECALLS = (1, 2, 5, 10, 20, 50)
"""Recall is reported for so many neighbours."""

PENALTIES = (1e-2, 1e-3, 1e-4, 1e-5)
"""Weight penalties that the L-BFGS probe chooses from."""

_VALIDATION = {"knn": 0.2, "linear": 0.1, "lbfgs": 0.1}
_BATCH = 256
_COSINES_AT_ONCE = 1 << 26


class Labelled(NamedTuple):
    """Features (N, d) float32 and labels (N,) int64, on one device."""

    features: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> "Labelled":
        """The rows at ``index``."""
        index = index.to(self.labels.device)
        return Labelled(self.features[index], self.labels[index])


@dataclass
class ProbeOptions:
    """The protocol, as options and as flags; the defaults are the paper's."""

    probes: list[str] = field(
        default_factory=lambda: ["knn", "linear"],
        metadata={"help": "What to score frozen features by: knn, linear (Adam), lbfgs (quick); or none"},
    )
    probe_seeds: list[int] = field(
        default_factory=lambda: [1, 2, 3, 4, 5],
        metadata={"help": "A probe for each: seeds of the split, and of the linear probe's start and batches"},
    )
    probe_epochs: int = field(default=100, metadata={"help": "Epochs of the linear probe"})
    probe_learning_rate: float = field(default=3e-4, metadata={"help": "Learning rate of the linear probe"})
    knn: int = field(default=50, metadata={"help": "Number of neighbours that vote"})
    knn_temperature: float = field(default=0.1, metadata={"help": "Temperature of their weights"})

    def __post_init__(self) -> None:
        if set(self.probes) - {"knn", "linear", "lbfgs"} and self.probes != ["none"]:
            raise InputError(f"--probes {' '.join(self.probes)}: choose from knn, linear, lbfgs, or none")
        check_numbers(self, {"probe_seeds": 0}, ["probe_epochs", "probe_learning_rate", "knn", "knn_temperature"])


@torch.no_grad()
def extract_features(
    encoder: Any,
    images: Tensor,
    *,
    normalize: Any = None,
    batch_size: int = 512,
    view: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Features of images in their order, the same for any batch size.

    Args:
        encoder: a `VisionEncoder`, whose mode is left as it was.
        images: (N, 3, H, W) uint8, resized to the encoder's size.
        normalize: as in `ViewOptions`; must be that of the training.
        batch_size: images at a time.
        view: from uint8 images to what the encoder sees of them; default: `evaluation_view`.

    Returns:
        (N, d) on the device of the encoder, in float32 whatever it computes in.

    Raises:
        InputError: features are not finite.
    """
    weight, training = next(encoder.parameters()), encoder.training
    encoder.eval()
    try:
        view = view or partial(evaluation_view, image_size=encoder.image_size, normalize=normalize)
        views = (view(batch.to(weight.device)) for batch in images.split(batch_size))
        features = torch.cat([encoder.features(pixels.to(weight.dtype)).float() for pixels in views])
    finally:
        encoder.train(training)
    if not torch.isfinite(features).all():
        raise InputError("features are not finite: the encoder's weights are damaged or its precision is too narrow")
    return features


def stratified_split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split rows at random, class by class; ``share`` of each class, rounded down, is in the second part.

    A class of two rows or more has at least one there. Indices of both parts are in ascending order.
    """
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    second = torch.zeros(len(labels), dtype=torch.bool)
    for rows in order.split(torch.unique(labels, return_counts=True)[1].tolist()):
        second[rows[: max(int(share * len(rows)), int(len(rows) > 1))]] = True
    return (~second).nonzero()[:, 0], second.nonzero()[:, 0]


def knn_predict(
    bank: Labelled, queries: Tensor, k: int = 50, temperature: float = 0.1, num_classes: int | None = None
) -> Tensor:
    """Class of each query, (Q,), by a vote of its k nearest bank items, each weighing ``exp(cosine / temperature)``.

    A bank of fewer than k items is taken whole, with a warning. Without ``num_classes`` the labels of the bank say it.

    Raises:
        ValueError: a label outside ``[0, num_classes)``.
    """
    _warn_of_small_bank(bank, k)
    return _vote(*_neighbours(bank, queries, k), temperature, _count_classes(bank.labels, declared=num_classes))


def knn_scores(bank: Labelled, queries: Labelled, k: int = 50, temperature: float = 0.1) -> dict[str, float]:
    """Accuracy of :func:`knn_predict` and recall for `RECALLS`, over all queries.

    Recall for r is the share of queries that have one of the same label among their r nearest items.
    """
    _warn_of_small_bank(bank, k)
    classes = _count_classes(bank.labels, queries.labels)
    cosine, labels = _neighbours(bank, queries.features, max(k, *RECALLS))
    right = labels == queries.labels[:, None]
    scores = {"accuracy": _share(_vote(cosine[:, :k], labels[:, :k], temperature, classes) == queries.labels)}
    return scores | {f"recall_at_{r}": _share(right[:, :r].any(1)) for r in RECALLS}


def linear_accuracy(part: Labelled, weight: Tensor, bias: Tensor, batch_size: int = 4096) -> float:
    """Share of all rows that a linear classifier gets right: not a mean over batches, which need not be equal."""
    batches = zip(part.features.split(batch_size), part.labels.split(batch_size), strict=True)
    return _share(torch.cat([F.linear(x, weight, bias).argmax(1) == labels for x, labels in batches]))


def linear_probe(
    train: Labelled, validation: Labelled, test: Labelled, seed: int, options: ProbeOptions, *, lbfgs: bool = False
) -> dict[str, float]:
    """Train a linear classifier; return its "validation_accuracy" and "test_accuracy".

    By Adam from the start of ``nn.Linear``, where the first of the best epochs on the validation split counts; or by
    L-BFGS on standardised features, where the largest of the best weight penalties (`PENALTIES`) does.
    """
    if lbfgs:
        center, scale = train.features.mean(0), train.features.std(0, correction=0).clamp(min=1e-6)
        train, validation, test = (part._replace(features=(part.features - center) / scale)
                                   for part in (train, validation, test))  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    width, classes = train.features.shape[1], _count_classes(train.labels, validation.labels, test.labels)
    bound = 0.0 if lbfgs else width**-0.5
    weight, bias = (torch.empty(shape).uniform_(-bound, bound, generator=generator).to(train.features).requires_grad_()
                    for shape in ((classes, width), (classes,)))  # fmt: skip
    adam = torch.optim.Adam([weight, bias], lr=options.probe_learning_rate)
    best = {"validation_accuracy": -1.0}
    for trial in PENALTIES if lbfgs else range(options.probe_epochs):
        if lbfgs:  # each starts where the one before, a smoother one, ended
            _fit_lbfgs(train, weight, bias, penalty=trial)
        else:
            order = torch.randperm(len(train.labels), generator=generator).to(train.labels.device)
            for rows in order.split(_BATCH):
                adam.zero_grad()
                F.cross_entropy(F.linear(train.features[rows], weight, bias), train.labels[rows]).backward()
                adam.step()
        with torch.no_grad():
            score = linear_accuracy(validation, weight, bias)
            if score > best["validation_accuracy"]:
                best = {"validation_accuracy": score, "test_accuracy": linear_accuracy(test, weight, bias)}
    return best


def _fit_lbfgs(train: Labelled, weight: Tensor, bias: Tensor, penalty: float) -> None:
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(train.features, weight, bias), train.labels) + penalty * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def run_probes(train: Labelled, test: Labelled, options: ProbeOptions) -> dict[str, Any]:
    """Score frozen features by each probe with each seed.

    Args:
        train: labelled training images: bank of the neighbours, training set of the classifiers, validation split.
        test: the test images, all of which count.
        options: the protocol.

    Returns:
        For each probe the protocol in words, the images of each part, and for each score its mean, its standard
        deviation over seeds (None for one seed) and each seed's value. Ready for JSON.

    Raises:
        InputError: every class has one image, so that none is left to validate with.
    """
    record: dict[str, Any] = {}
    for probe in options.probes if options.probes != ["none"] else []:
        runs: list[dict[str, float]] = []
        for seed in options.probe_seeds:
            learn, check = (train.rows(rows) for rows in stratified_split(train.labels, _VALIDATION[probe], seed))
            if not len(check.labels):
                raise InputError("every class has one training image, so none is left to validate with; give more")
            if probe == "knn":
                found = ((role, knn_scores(learn, part, options.knn, options.knn_temperature))
                         for role, part in (("validation", check), ("test", test)))  # fmt: skip
                runs.append({f"{role}_{name}": value for role, values in found for name, value in values.items()})
            else:
                runs.append(linear_probe(learn, check, test, seed, options, lbfgs=probe == "lbfgs"))
        record[probe] = {
            "protocol": _protocol(probe, options),
            "images": {"train": len(learn.labels), "validation": len(check.labels), "test": len(test.labels)},
            "seeds": options.probe_seeds,
            "scores": {name: _summary([run[name] for run in runs]) for name in runs[0]},
        }
    return record


def _protocol(probe: str, options: ProbeOptions) -> str:
    recipe = {
        "knn": f"vote of the {options.knn} nearest by cosine, temperature {options.knn_temperature:g}",
        "linear": f"Adam {options.probe_learning_rate:g}, batch {_BATCH}, {options.probe_epochs} epochs, epoch",
        "lbfgs": "standardised, L-BFGS, weight penalty",
    }[probe] + ("" if probe == "knn" else " by validation accuracy")
    return f"frozen features; {_VALIDATION[probe]:.0%} of each class for validation; {recipe}"


def _summary(values: list[float]) -> dict[str, Any]:
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "sd": sd, "each": values}


def _warn_of_small_bank(bank: Labelled, k: int) -> None:
    if k > len(bank.labels):
        logger.warning("only %d items for %d neighbours: all of them are taken", len(bank.labels), k)


def _neighbours(bank: Labelled, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and labels of the nearest bank items, each (Q, k) or as many as there are, nearest first."""
    k = min(k, len(bank.labels))
    items, queries = F.normalize(bank.features.float(), dim=1), F.normalize(queries.float(), dim=1)
    nearest = [(part @ items.T).topk(k) for part in queries.split(max(1, _COSINES_AT_ONCE // len(items)))]
    return torch.cat([part.values for part in nearest]), bank.labels[torch.cat([part.indices for part in nearest])]


def _vote(cosine: Tensor, labels: Tensor, temperature: float, classes: int) -> Tensor:
    weights = ((cosine - cosine[:, :1]) / temperature).exp()  # relative to the nearest: nothing overflows
    return weights.new_zeros(len(labels), classes).scatter_add_(1, labels, weights).argmax(1)


def _count_classes(*labels: Tensor, declared: int | None = None) -> int:
    low, high = min(int(part.min()) for part in labels), max(int(part.max()) for part in labels)
    if low < 0 or high >= (declared or high + 1):
        raise ValueError(f"labels must be from 0 to below num_classes={declared}, got {low} to {high}")
    return declared or high + 1


def _share(hits: Tensor) -> float:
    return hits.sum().item() / len(hits)
