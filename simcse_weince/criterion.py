"""Contrastive criteria: embeddings in, loss out.

`InfoNCE` compares each anchor with its positive and its negatives through a softmax of cosines. `Weince` replaces, per
anchor, a part of the softmax logit by the logit that extreme-value theory gives for scores with an endpoint.
`ReleasedWeince` is the objective of the authors' public training script.

Erol, Evren, Ozel, Morgan, Ryu, Zheng, "When Softmax Fails at the Top: Extreme-Value Corrections for InfoNCE",
ICML 2026, arXiv 2606.00262.

Numerics: normalisation, cosines, shortfalls and logits are computed in float32 whatever comes in and whatever autocast
surrounds the call (float64 embeddings stay float64), because in bfloat16 a shortfall of 1e-6 is 0. Nothing waits for
the device: statistics are tensors until :meth:`InfoNCE.stats` is called.

Many processes: given a `simcse_weince.gather.Shard`, each process compares its own anchors with the candidates of all,
and every statistic of the batch (pivot, pooled shape, running average, :meth:`InfoNCE.stats`) is that of the global
batch, equal on all processes to the last bit.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from simcse_weince.gather import Shard
from simcse_weince.links import blended_link_and_slope, shortfall, softmax_link
from simcse_weince.tail import (
    FEWEST_NEGATIVES,
    TailFit,
    TailStatistics,
    burn_in,
    evidence_gate,
    fit_tail,
    hardness_gate,
    nearest_rank,
    shrunk_shape,
    tail_size,
)

logger = logging.getLogger(__name__)

SMALLEST_NORM = 1e-6
"""An embedding shorter than this has no direction: its cosines are 0 and it gets no gradient."""

COLLAPSED = 0.999
"""Mean cosine of negatives beyond which the encoder maps everything to one point."""

POOLED_FRACTION, POOLED_MINIMUM = 0.05, 1024
"""The tail of all negatives of a batch taken together, as in the authors' code."""

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
"""Which sides of the pairs are compared, in the words and the order of sentence-transformers."""

COSINES_AT_ONCE = 1 << 24
"""Batches with more cosines than this (64 MB in float32) are worked off in chunks of anchors, and hold none of them."""

COSINES_IN_CACHE, ANCHORS_AT_ONCE = 1 << 20, 256
"""On a CPU smaller chunks are faster: what is done to them is done in the cache. Of very many candidates few anchors
would fill it, and every chunk reads all candidates: never fewer than so many anchors."""

NEAR = 0.05
"""A negative is near the endpoint if its shortfall is below this; for the log and for `diagnose`."""

Keep = Tensor | Callable[[slice], Tensor]
"""A mask of candidates, (A, C) bool, or a function that makes its rows for any slice of the anchors."""


class Comparison(NamedTuple):
    """Which candidates each anchor is compared with: all that the losses need to know of a layout.

    Attributes:
        blocks: (A, d) and (C, d) unit vectors of anchors and candidates; several such pairs are compared one beside the
            other, and C is then the number of candidates of all.
        positive: (A, P) the column of each anchor's positive, and of further copies of it: those are in the denominator
            but, like the positive, not in the tail.
        own: (A, O) the columns of candidates that are the anchor itself, compared with nobody.
        keep: for a slice of anchors, which candidates they are compared with, (a, C) bool; None for all. A positive is
            compared always.
        rows: which anchors these are, of those that ``keep`` knows.
        most_negatives: number of negatives of an anchor of which no candidate is masked.
        zero_norm_rows: rows of the batch in which an embedding has no direction, for the statistics; scalar.
        shard: which rows of the global batch the anchors are.
    """

    blocks: tuple[tuple[Tensor, Tensor], ...]
    positive: Tensor
    own: Tensor
    keep: Callable[[slice], Tensor] | None
    rows: slice
    most_negatives: int
    zero_norm_rows: Tensor
    shard: Shard

    def cosine(self) -> Tensor:
        """Cosine of every anchor with every candidate, (A, C)."""
        cosines = [anchors @ candidates.T for anchors, candidates in self.blocks]
        return cosines[0] if len(cosines) == 1 else torch.cat(cosines, dim=1)

    def dropped(self) -> Tensor | None:
        """True for further candidates in neither denominator nor tail, (A, C); None if there are none."""
        if self.keep is None:
            return None
        return (~self.keep(self.rows)).scatter_(1, self.positive, False).scatter_(1, self.own, False)

    def fill(self, values: Tensor, dropped: Tensor | None, value: float) -> Tensor:
        """Put ``value`` in place of all ``values`` (A, C) of candidates that are not compared."""
        if dropped is not None:
            values.masked_fill_(dropped, value)
        return values.scatter_(1, self.own, value) if self.own.shape[1] else values

    def split(self, size: int) -> list["Comparison"]:
        """The same comparison for ``size`` anchors at a time."""
        return [
            self._replace(
                blocks=tuple((anchors[part], candidates) for anchors, candidates in self.blocks),
                positive=self.positive[part],
                own=self.own[part],
                rows=part,
            )
            for part in (slice(start, start + size) for start in range(0, len(self.positive), size))
        ]


class _Part(NamedTuple):
    """Anchors (A, d), candidates (C, d), and per anchor the columns of its positives and of what is not for it."""

    anchors: Tensor
    candidates: Tensor
    positive: Tensor
    own: Tensor


class _Look(NamedTuple):
    """What a look at the cosines keeps: small tensors without gradient."""

    anchors: Tensor  # (A, 5) and more: the columns below, then a TailFit
    pooled: Tensor  # (p,) smallest shortfalls of all anchors together

    @property
    def negatives(self) -> Tensor:
        """Number of unmasked negatives of each anchor, (A,)."""
        return self.anchors[:, 0].long()


class InfoNCE(nn.Module):
    """InfoNCE over cosines: ``mean_i [ logsumexp_j s_ij / temperature - s_i,i+ / temperature ]``.

    Args:
        temperature: divides the cosine. 0.05 for text (SimCSE), 0.5 for images (SimCLR).
        layout: who is compared with whom, for N pairs of views. "cross_view": N anchors (first view) against N
            candidates (second view) and any hard negatives (SimCSE); "columns" is the same in the words of
            sentence-transformers. "both_views": 2N anchors against 2N candidates, without themselves (NT-Xent, SimCLR).
        chunk_size: number of anchors whose cosines are held at a time. The values are the same, memory shrinks, and
            cosines are computed three times. None holds all up to 2^24 cosines (4,096 anchors against as many
            candidates), and beyond that as many anchors as have 2^24 cosines.
        reduction: "mean" over anchors, or "none" for one loss per anchor.
        directions: what else is compared, as in ``MultipleNegativesRankingLoss``: "query_to_doc" (always: first view
            with all second views and hard negatives), "query_to_query" (first with the other first views),
            "doc_to_query" (second with all first views), "doc_to_doc" (second with the second views and hard negatives
            of other rows). Not for "both_views".
        partition_mode: "joint": the candidates of all directions are in one denominator, and in one tail.
            "per_direction": the mean of a loss for "query_to_doc" and one for "doc_to_query", each with its own tail;
            :meth:`stats` are then those of "query_to_doc".
        own_negatives_only: the hard negatives of its own row are the only negatives of an anchor.

    Raises:
        ValueError: for an argument out of range; the message names it.
    """

    def __init__(
        self,
        temperature: float = 0.05,
        *,
        layout: str = "cross_view",
        chunk_size: int | None = None,
        reduction: str = "mean",
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        own_negatives_only: bool = False,
    ) -> None:
        super().__init__()
        self.temperature = _number("temperature", temperature, 0, above=True)
        self.layout = _choice("layout", layout, ("cross_view", "both_views", "columns"))
        self.chunk_size = None if chunk_size is None else _count("chunk_size", chunk_size)
        self.reduction = _choice("reduction", reduction, ("mean", "none"))
        self.directions = tuple(name for name in DIRECTIONS if name in directions)
        self.partition_mode = _choice("partition_mode", partition_mode, ("joint", "per_direction"))
        self.own_negatives_only = own_negatives_only
        if len(self.directions) < len(directions) or "query_to_doc" not in directions:
            raise ValueError(
                f"directions must be query_to_doc and any of {', '.join(DIRECTIONS[1:])}, got {directions!r}"
            )
        if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
            raise ValueError(
                'partition_mode must be "joint" for directions without a positive, query_to_query and doc_to_doc'
            )
        if len(directions) > 1 and (layout == "both_views" or own_negatives_only):
            raise ValueError('directions must be ("query_to_doc",) for layout="both_views" and for own_negatives_only')
        if layout == "both_views" and own_negatives_only:
            raise ValueError(
                'own_negatives_only needs layout="cross_view": in "both_views" there are no hard negatives'
            )
        self.most_negatives = 0  # of an anchor of which no candidate is masked, in the last batch
        self._needs_tail = False  # whether an anchor without a tail has InfoNCE's logits
        self._last: dict[str, Tensor] = {}
        self._warned: set[str] = set()

    def forward(
        self, first: Tensor, second: Tensor, *negatives: Tensor, keep: Keep | None = None, shard: Shard | None = None
    ) -> Tensor:
        """Loss of a batch of N pairs.

        Args:
            first: (N, d) embeddings of the first view, of any length and floating dtype.
            second: (N, d) embeddings of the second view; row i is the positive of row i of ``first``.
            negatives: (N, d) each, columns of hard negatives, shared by all anchors; not for "both_views".
            keep: (A, C) bool; False leaves candidate j out of the denominator and of the tail of anchor i. A is N and C
                is N * (1 + columns of negatives); for "both_views" both are 2N. With several directions C counts the
                candidates of all, in the order listed above. A positive is always kept; an anchor that has several is
                several rows, whose positives are masked for one another. A function that makes the rows of any slice
                of the anchors spares the memory of all.
            shard: the rows of the batch that this process holds, to compare them with those of all; in C, N is then the
                number of rows of all, and the columns of candidates are [all positives, all first negatives, ...].
                None: the batch of this process is the whole batch.

        Returns:
            Scalar, or (A,) for ``reduction="none"``; float32, or float64 for float64 embeddings. Without any negative
            it is 0, and so is its gradient. Over processes, the mean of the scalars is the loss of the global batch.

        Raises:
            ValueError: for tensors whose shapes or dtypes do not fit; the message names the argument.
            RuntimeError: in a replica of ``nn.DataParallel``, which sees a part of the batch alone.
        """
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel gives each device a part of the batch, and too few negatives: wrap the encoder alone, "
                "or use DistributedDataParallel (accelerate launch)"
            )
        comparisons = self.compare(first, second, *negatives, keep=keep, shard=shard)
        # Backwards, so that stats() are left with the first direction.
        losses = [self._loss(comparison) for comparison in comparisons[::-1]]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean(0)
        return loss * comparisons[0].shard.weight if self.reduction == "mean" else loss

    def compare(
        self, first: Tensor, second: Tensor, *negatives: Tensor, keep: Keep | None = None, shard: Shard | None = None
    ) -> list[Comparison]:
        """Normalise a batch and lay it out, once for each denominator; arguments as in :meth:`forward`."""
        shard = Shard((len(first),)) if shard is None else shard
        columns = (first, second, *negatives)
        for name, column in zip(("first", "second", *["negatives"] * len(negatives)), columns, strict=True):
            if column.ndim != 2 or column.shape != first.shape or not column.numel() or not column.is_floating_point():
                raise ValueError(
                    f"{name} must be a non-empty floating (N, d) tensor shaped like first, "
                    f"got {column.dtype} {tuple(column.shape)} beside {tuple(first.shape)}"
                )
        if negatives and self.layout == "both_views":
            raise ValueError('negatives need layout="cross_view": in "both_views" all candidates are views of anchors')
        dtype = torch.float64 if any(column.dtype == torch.float64 for column in columns) else torch.float32
        units, zero = zip(*(_unit_vectors(column.to(dtype)) for column in columns), strict=True)
        if shard.sizes[shard.rank] != len(first):
            raise ValueError(f"shard must say that this process holds {len(first)} rows, got {shard}")
        # A blank sentence has no direction in either view, but it is one row of the batch.
        zero_norm_rows = shard.all_gather(torch.stack(zero).any(0)).sum()
        parts = self._parts(units, shard)
        widths = [len(part.candidates) for part in parts]
        shape = (len(parts[0].anchors), sum(widths))
        rows_of = None if keep is None else _checked(keep, shape)
        if self.own_negatives_only:
            column, given = torch.arange(shape[1], device=first.device) % shard.total, rows_of

            def rows_of(rows: slice) -> Tensor:
                own = column == parts[0].positive[rows]
                return own if given is None else own & given(rows)

            return [_denominator(parts, rows_of, zero_norm_rows, shard)._replace(most_negatives=len(negatives))]
        if self.partition_mode == "joint":
            return [_denominator(parts, rows_of, zero_norm_rows, shard)]
        ends = itertools.accumulate(widths)
        return [
            _denominator([part], rows_of and _columns(rows_of, slice(end - width, end)), zero_norm_rows, shard)
            for part, width, end in zip(parts, widths, ends, strict=True)
        ]

    def _parts(self, units: tuple[Tensor, ...], shard: Shard) -> list["_Part"]:
        """The sides that are compared with one another."""
        row = torch.arange(len(units[0]), device=units[0].device)[:, None] + shard.offset
        # Column by column: all positives of all processes come first.
        docs = torch.cat([shard.all_gather(unit) for unit in units[1:]])
        if self.layout != "both_views" and self.directions == ("query_to_doc",):
            return [_Part(units[0], docs, row, row[:, :0])]
        queries = shard.all_gather(units[0])
        if self.layout == "both_views":
            own, partner = torch.cat([row, row + shard.total]), torch.cat([row + shard.total, row])
            return [_Part(torch.cat(units), torch.cat([queries, docs]), partner, own)]
        own_docs = row + shard.total * torch.arange(len(units) - 1, device=row.device)
        parts = {
            "query_to_doc": _Part(units[0], docs, row, row[:, :0]),
            "query_to_query": _Part(units[0], queries, row[:, :0], row),
            "doc_to_query": _Part(units[1], queries, row, row[:, :0]),
            "doc_to_doc": _Part(units[1], docs, row[:, :0], own_docs),
        }
        return [parts[name] for name in self.directions]

    def _loss(self, comparison: Comparison) -> Tensor:
        """Loss of the anchors of this process: their mean, or each, (A,)."""
        with torch.autocast(comparison.positive.device.type, enabled=False):
            look, cosines = self._survey(comparison, keep_cosines=True)
            weights = comparison.shard.own(self._weights(comparison, look))
            vectors = [vector for block in comparison.blocks for vector in block]
            return _ClosedForm.apply(self, comparison, weights, cosines, *vectors)

    def stats(self) -> dict[str, float]:
        """Numbers of the last global batch for a log; only here is the device waited for. Empty before the first call.

        Means over the anchors that have negatives: positive_cosine, negative_cosine, near_negatives (share of negatives
        with a shortfall below 0.05), for `Weince` also blend, blend_above_half (share of anchors), shape, hardness,
        evidence, r_squared, pivot and effective_temperature, ``temperature / (1 - blend)``. uniformity: log of the mean
        of ``exp(-2 |x - y|^2)`` over negatives (Wang and Isola, ICML 2020). Counts: masked_candidates (left out by
        ``keep``), zero_norm_rows (rows of the batch in which an embedding has no direction), anchors_without_tail
        (fewer than 10 negatives). A collapsed encoder, and missing tails that are needed, are warned of once.
        """
        if not self._last:
            return {}
        last = {name: value.float() for name, value in self._last.items()}
        negatives = last.pop("negatives")
        compared = negatives > 0
        if "blend" in last:
            last["blend_above_half"] = (last["blend"] > 0.5).float()
        values = {
            name: value if value.ndim == 0 else torch.where(compared, value, 0).sum() / compared.sum().clamp(min=1)
            for name, value in last.items()
        }
        values["masked_candidates"] = (self.most_negatives - negatives).sum()
        values["anchors_without_tail"] = (negatives < FEWEST_NEGATIVES).sum().float()
        numbers = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
        numbers["uniformity"] = math.log(max(numbers["uniformity"], math.ulp(0.0)))
        if numbers.get("blend", 1) < 1:
            numbers["effective_temperature"] = self.temperature / (1 - numbers["blend"])
        if numbers["negative_cosine"] > COLLAPSED:
            self._warn_once("the embeddings have collapsed: the mean cosine of a negative exceeds %.3f", COLLAPSED)
        if self._needs_tail and numbers["anchors_without_tail"]:
            self._warn_once("anchors with fewer than %d negatives have no tail: plain InfoNCE", FEWEST_NEGATIVES)
        return numbers

    def _anchors_at_once(self, comparison: Comparison) -> int:
        anchors, candidates = len(comparison.positive), sum(len(block[1]) for block in comparison.blocks)
        on_cpu = comparison.positive.device.type == "cpu"
        at_once = max(COSINES_IN_CACHE, ANCHORS_AT_ONCE * candidates) if on_cpu else COSINES_AT_ONCE
        return self.chunk_size or (anchors if anchors * candidates <= at_once else max(1, at_once // candidates))

    @torch.no_grad()
    def _look(self, chunk: Comparison, cosine: Tensor, dropped: Tensor | None) -> _Look:
        """Measure a chunk of a batch; ``cosine`` is 0 for candidates that are not compared."""
        positive = cosine.gather(1, chunk.positive)
        negatives = positive.new_full(positive.shape[:1], chunk.most_negatives)
        candidates = cosine.shape[1] - positive.shape[1]
        if dropped is not None:
            negatives = candidates - chunk.own.shape[1] - dropped.sum(1, dtype=cosine.dtype)
        total = cosine.sum(1) - positive.sum(1)
        # exp(-2 |x - y|^2) of unit vectors, but for a factor
        alike, positives_alike = (4 * cosine).exp_(), (4 * positive).exp_()
        potential = math.exp(-4) * (alike.sum(1) - positives_alike.sum(1) - (candidates - negatives))
        # In place, because memory that is new costs more than the arithmetic.
        closest = math.exp(4 * (1 - NEAR))
        near = alike.gt_(closest).sum(1) - positives_alike.gt_(closest).sum(1)
        means = [value / negatives.clamp(min=1) for value in (total, near, potential)]
        return _Look(torch.stack([negatives, positive[:, 0], *means], dim=1), cosine.new_empty(0))

    def _pool_size(self, comparison: Comparison) -> int:
        """How many shortfalls of the global batch are pooled."""
        return 0

    @torch.no_grad()
    def _survey(self, comparison: Comparison, *, keep_cosines: bool = False) -> tuple[_Look, list[Tensor]]:
        """Measure all anchors of the global batch; return also the cosines of this process, if they fit."""
        shard, pool = comparison.shard, self._pool_size(comparison)
        size, candidates = self._anchors_at_once(comparison), sum(len(block[1]) for block in comparison.blocks)
        keep_cosines &= self.chunk_size is None and len(comparison.positive) * candidates <= COSINES_AT_ONCE
        anchors, pooled, cosines = [], comparison.blocks[0][0].new_empty(0), []
        for chunk in comparison.split(size):
            dropped = chunk.dropped()
            cosine = chunk.fill(chunk.cosine(), dropped, 0)
            look = self._look(chunk, cosine, dropped)
            anchors.append(look.anchors)
            if pool:
                pooled = torch.cat([pooled, look.pooled])
                pooled = pooled.topk(min(pool, len(pooled)), largest=False).values
            if keep_cosines:
                cosines.append(cosine)
        if pool:
            everyones = shard._replace(sizes=(1,) * len(shard.sizes))
            pooled = everyones.all_gather(F.pad(pooled, (0, pool - len(pooled)), value=math.inf)[None]).flatten()
        return _Look(shard.all_gather(anchors[0] if len(anchors) == 1 else torch.cat(anchors)), pooled), cosines

    def _weights(self, comparison: Comparison, look: _Look) -> Tensor:
        """Remember the look for :meth:`stats`; derive from it what the losses need of each anchor, (A, any number)."""
        self.most_negatives = comparison.most_negatives
        names = ("negatives", "positive_cosine", "negative_cosine", "near_negatives", "uniformity")
        self._last = dict(zip(names, look.anchors.unbind(1), strict=False))
        self._last["zero_norm_rows"] = comparison.zero_norm_rows
        return look.anchors.new_empty(len(look.anchors), 0)

    def _losses(self, chunk: Comparison, weights: Tensor, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each anchor, (A,), and its derivative by every cosine, (A, C)."""
        dropped = chunk.dropped()
        logits, slope = self._link(cosine, weights)
        return _cross_entropy(chunk.fill(logits, dropped, -math.inf), slope, chunk.positive[:, :1])

    def _link(self, cosine: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | float]:
        """The logits and their derivative by the cosines."""
        return softmax_link(cosine, self.temperature), 1 / self.temperature

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)


class Weince(InfoNCE):
    """WEINCE: InfoNCE in which, per anchor, a part of the logit is the shortfall link of a bounded tail.

    ``logit_ij = (1 - blend_i) * s_ij / temperature - blend_i * shape_i * log(1 - s_ij + floor)``

    ``blend`` and ``shape`` are statistics of the anchor's hardest negatives (see `simcse_weince.tail`); no gradient
    flows through them and nothing is trainable. An anchor with fewer than 10 unmasked negatives, or whose hardest
    negatives are all equally near, has no tail to estimate: its blend is 0, plain InfoNCE. With ``gate`` and ``shape``
    both given as numbers nothing is estimated, and they hold for every anchor.

    Args:
        temperature, layout, chunk_size, reduction, directions, partition_mode, own_negatives_only: as in `InfoNCE`.
        gate: "both" (hardness gate times evidence gate), "hardness", "evidence", or a fixed blend in [0, 1].
        evidence: "regression" (the paper: practically always positive), or "likelihood" (calibrated: closes where the
            tail is exponential; its shape is the Hill estimate).
        shape: "anchor" (each anchor's own estimate), "shrunk" (drawn towards the estimate of the whole batch), or a
            fixed number, not clipped. 1.0 is what the authors' published runs use; 0.0 leaves InfoNCE at temperature
            ``temperature / (1 - blend)``.
        floor: added to the shortfall, see `simcse_weince.links.shortfall_link`. 1e-6 reproduces the authors' values.
        tail_fraction: share of an anchor's negatives that makes up its tail, in (0, 1].
        min_tail_size: number of negatives below which the share does not go.
        pivot: shortfall at which the hardness gate is one half. None takes the ``pivot_quantile`` of the batch, so the
            gate is open for the hardest anchors of any batch, near the cap or not.
        pivot_quantile: quantile (nearest rank) of the anchors' hardness.
        hardness_sharpness: slope of the hardness gate in log shortfall.
        evidence_sharpness: slope of the evidence gate.
        evidence_margin: evidence, in units of AIC, at which the evidence gate is one half.
        shape_bounds: estimates of the shape are clipped to these.

    Raises:
        ValueError: for an argument out of range; the message names it.
    """

    def __init__(
        self,
        temperature: float = 0.05,
        *,
        layout: str = "cross_view",
        gate: str | float = "both",
        evidence: str = "regression",
        shape: str | float = "anchor",
        floor: float = 1e-4,
        tail_fraction: float = 0.10,
        min_tail_size: int = 32,
        pivot: float | None = None,
        pivot_quantile: float = 0.2,
        hardness_sharpness: float = 10.0,
        evidence_sharpness: float = 1.0,
        evidence_margin: float = 2.0,
        shape_bounds: tuple[float, float] = (0.5, 16.0),
        chunk_size: int | None = None,
        reduction: str = "mean",
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        own_negatives_only: bool = False,
    ) -> None:
        super().__init__(
            temperature, layout=layout, chunk_size=chunk_size, reduction=reduction, directions=directions,
            partition_mode=partition_mode, own_negatives_only=own_negatives_only,
        )  # fmt: skip
        self.gate = _choice_or_number("gate", gate, ("both", "hardness", "evidence"), high=1)
        self.evidence = _choice("evidence", evidence, ("regression", "likelihood"))
        self.shape = _choice_or_number("shape", shape, ("anchor", "shrunk"))
        self._needs_tail = isinstance(self.gate, str) or isinstance(self.shape, str)
        self.floor = _number("floor", floor, 0, above=True)
        self.tail_fraction = _number("tail_fraction", tail_fraction, 0, 1, above=True)
        self.min_tail_size = _count("min_tail_size", min_tail_size)
        self.pivot = None if pivot is None else _number("pivot", pivot, 0, 2, above=True)
        self.pivot_quantile = _number("pivot_quantile", pivot_quantile, 0, 1)
        self.hardness_sharpness = _number("hardness_sharpness", hardness_sharpness, 0)
        self.evidence_sharpness = _number("evidence_sharpness", evidence_sharpness, 0)
        self.evidence_margin = _number("evidence_margin", evidence_margin)
        if not isinstance(shape_bounds, (tuple, list)) or len(shape_bounds) != 2:
            raise ValueError(f"shape_bounds must be a pair of numbers, got {shape_bounds!r}")
        low = _number("shape_bounds", shape_bounds[0], 0, above=True)
        self.shape_bounds = (low, _number("shape_bounds", shape_bounds[1], low))
        self._pools = shape == "shrunk"

    @torch.no_grad()
    def anchor_statistics(
        self, first: Tensor, second: Tensor, *negatives: Tensor, keep: Keep | None = None, shard: Shard | None = None
    ) -> TailStatistics:
        """The tail statistics that :meth:`forward` uses, for the same arguments; those of this process's anchors."""
        comparison = self.compare(first, second, *negatives, keep=keep, shard=shard)[0]
        with torch.autocast(first.device.type, enabled=False):
            tail = self._statistics(comparison, self._survey(comparison)[0])
        own = comparison.shard.own
        each: Any = {name: own(value) for name, value in tail._asdict().items() if getattr(value, "ndim", 0)}
        return tail._replace(**each)

    @torch.no_grad()
    def _look(self, chunk: Comparison, cosine: Tensor, dropped: Tensor | None) -> _Look:
        look = super()._look(chunk, cosine, dropped)
        hard = _only_negatives(chunk, cosine, dropped)
        size = max(1, tail_size(chunk.most_negatives, self.tail_fraction, self.min_tail_size))
        smallest = shortfall(_largest(hard, size))
        negatives = chunk.most_negatives if dropped is None else look.negatives
        fraction, minimum = self.tail_fraction, self.min_tail_size
        fit = fit_tail(smallest, negatives, fraction=fraction, minimum=minimum, evidence=self.evidence)
        pool = min(self._pool_size(chunk), hard.numel())
        pooled = shortfall(_largest(hard.view(1, -1), pool)[0]) if pool else look.pooled
        return _Look(torch.cat([look.anchors, *(value.to(smallest)[:, None] for value in fit)], dim=1), pooled)

    def _pool_size(self, comparison: Comparison) -> int:
        views = 2 if self.layout == "both_views" else 1
        negatives = views * comparison.shard.total * comparison.most_negatives
        return max(1, tail_size(negatives, POOLED_FRACTION, POOLED_MINIMUM)) if self._pools else 0

    @staticmethod
    def _pooled_fit(look: _Look, evidence: str) -> TailFit:
        """The negatives of all anchors as the tail of one, shape (1,)."""
        return fit_tail(
            look.pooled.sort().values[None],
            look.negatives.sum()[None],
            fraction=POOLED_FRACTION,
            minimum=POOLED_MINIMUM,
            evidence=evidence,
        )

    @torch.no_grad()
    def _statistics(self, comparison: Comparison, look: _Look) -> TailStatistics:
        fit, negatives = TailFit(*look.anchors[:, 5:].unbind(1)), comparison.most_negatives
        blend, shape = torch.ones_like(fit.hardness), fit.shape
        if self.pivot is None:
            each = negatives if comparison.keep is None else look.negatives
            pivot = nearest_rank(fit.hardness, each, self.pivot_quantile)
        else:
            pivot = fit.hardness.new_full((), self.pivot)
        if self.gate in ("both", "hardness"):
            blend = blend * hardness_gate(fit.hardness, pivot, self.hardness_sharpness)
        if self.gate in ("both", "evidence"):
            blend = blend * evidence_gate(fit.evidence, self.evidence_margin, self.evidence_sharpness)
        if isinstance(self.gate, float):
            blend = torch.full_like(blend, self.gate)
        if self._needs_tail:
            blend = torch.where(fit.estimable > 0, blend, 0)
        if self.shape == "shrunk":
            shape = shrunk_shape(fit, self._pooled_fit(look, self.evidence))
        shape = torch.full_like(shape, self.shape) if isinstance(self.shape, float) else shape.clamp(*self.shape_bounds)
        size = tail_size(negatives, self.tail_fraction, self.min_tail_size)
        points = max(0, size - (burn_in(size) if self.evidence == "regression" else 1))
        return TailStatistics(blend, shape, fit.hardness, fit.evidence, fit.r_squared, fit.shape, pivot, points)

    def _weights(self, comparison: Comparison, look: _Look) -> Tensor:
        super()._weights(comparison, look)
        tail = self._statistics(comparison, look)
        self._last |= {name: value for name, value in tail._asdict().items() if isinstance(value, Tensor)}
        return torch.stack([tail.blend, tail.shape], dim=1)

    def _link(self, cosine: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | float]:
        return blended_link_and_slope(cosine, weights[:, 0:1], weights[:, 1:2], self.temperature, self.floor)


class ReleasedWeince(Weince):
    """The objective of the authors' public training script, which is not that of the paper.

    To the WEINCE loss with shape 1 it adds two losses over the ``top_m`` hardest negatives of each anchor: one through
    the shortfall link, with one shape for the batch, and one through the softmax. That shape is the slope of log rank
    in log shortfall over the smallest 5 % (at least 1024) of all negatives of the batch, used if it explains 85 % of
    the variance, clipped to ``shape_bounds`` and averaged over the calls, ``0.9 * old + 0.1 * new``, from 4.0.

    The average is the buffer ``shape_average``; it is updated before it is used, and only where gradients are enabled,
    so that evaluation changes nothing. ``gate=0.0`` gives InfoNCE with the same two terms.

    Args:
        weibull_weight: weight of the shortfall term.
        softmax_weight: weight of the softmax term.
        top_m: number of hardest negatives of each anchor in these terms; all, if it has fewer.
        options: those of `Weince`, of which ``shape`` is 1.0 and ``floor`` 1e-6, as in the script, unless given.

    Raises:
        ValueError: for an argument out of range; the message names it.
    """

    shape_average: Tensor

    def __init__(
        self,
        temperature: float = 0.5,
        *,
        layout: str = "both_views",
        weibull_weight: float = 0.5,
        softmax_weight: float = 0.5,
        top_m: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(temperature, layout=layout, **{"shape": 1.0, "floor": 1e-6, **options})
        self.weibull_weight = _number("weibull_weight", weibull_weight, 0)
        self.softmax_weight = _number("softmax_weight", softmax_weight, 0)
        self.top_m = _count("top_m", top_m)
        self._pools = True
        self.register_buffer("shape_average", torch.tensor(4.0))

    def _weights(self, comparison: Comparison, look: _Look) -> Tensor:
        weights = super()._weights(comparison, look)
        if torch.is_grad_enabled():
            pooled = self._pooled_fit(look, "regression")
            accepted = pooled.estimable & (pooled.r_squared >= 0.85)
            new = 0.9 * self.shape_average + 0.1 * pooled.shape.clamp(*self.shape_bounds)
            self.shape_average.copy_(torch.where(accepted, new, self.shape_average)[0])
        # A copy: neither this graph nor the statistics may see the update of the next call.
        self._last["shape_average"] = self.shape_average.clone()
        return torch.cat([weights, self._last["shape_average"].to(weights).expand(len(weights), 1)], dim=1)

    def _losses(self, chunk: Comparison, weights: Tensor, cosine: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradient = super()._losses(chunk, weights, cosine)
        hardest = _only_negatives(chunk, cosine, chunk.dropped()).topk(min(self.top_m, cosine.shape[1]))
        columns = torch.cat([chunk.positive[:, :1], hardest.indices], dim=1)
        top = torch.cat([cosine.gather(1, chunk.positive[:, :1]), hardest.values], dim=1)
        absent, first = top == -math.inf, torch.zeros_like(chunk.positive[:, :1])
        for weight, blend in ((self.weibull_weight, 1.0), (self.softmax_weight, 0.0)):
            logits, slope = blended_link_and_slope(
                top.masked_fill(absent, 0), blend, weights[:, 2:], self.temperature, self.floor
            )
            part, slope = _cross_entropy(logits.masked_fill_(absent, -math.inf), slope, first)
            losses = losses + weight * part
            gradient.scatter_add_(1, columns, weight * slope)
        return losses, gradient


class _Direction(torch.autograd.Function):
    """Rows (N, d) divided by their norms (N, 1): a third of the passes that autograd makes over them."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, norm: Tensor) -> Tensor:
        """Return the unit vectors."""
        unit = embeddings / norm
        ctx.save_for_backward(unit, norm)
        return unit

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return what of the gradient is at right angles to the vectors, over their norms."""
        (output,), (unit, norm) = outputs, ctx.saved_tensors
        product = unit * output
        along = product.sum(1, keepdim=True)
        return torch.addcmul(output, unit, along, value=-1, out=product).div_(norm), None


class _ClosedForm(torch.autograd.Function):
    """The loss of a comparison with its gradient written out: nothing of the size of the cosines is kept for backward.

    For a mean the gradient is known, up to a factor, when the loss is, and one pass over the cosines gives both. For
    one loss per anchor it is not, and backward makes a second pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        criterion: InfoNCE,
        comparison: Comparison,
        weights: Tensor,
        cosines: list[Tensor],
        *vectors: Tensor,
    ) -> Tensor:
        """Return the mean loss, or that of each anchor, (A,)."""
        ctx.mean = criterion.reduction == "mean"
        needed = any(vector.requires_grad for vector in vectors)
        share = 1 / len(weights) if ctx.mean and needed else None
        losses, gradients = _pass(criterion, comparison, weights, cosines, vectors, share)
        if ctx.mean:
            ctx.save_for_backward(*gradients)
            return losses.mean()
        ctx.criterion, ctx.comparison = criterion, comparison
        ctx.save_for_backward(weights, *vectors)
        return losses

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by each of the vectors."""
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError("the contrastive criteria have no second derivative; leave out create_graph=True")
        (output,) = outputs
        if ctx.mean:
            gradients = [output * gradient for gradient in ctx.saved_tensors]
        else:
            weights, *vectors = ctx.saved_tensors
            with torch.autocast(output.device.type, enabled=False):  # as in the forward
                _, gradients = _pass(ctx.criterion, ctx.comparison, weights, [], vectors, output[:, None])
        return (None, None, None, None, *gradients)


@torch.no_grad()
def _pass(
    criterion: InfoNCE,
    comparison: Comparison,
    weights: Tensor,
    cosines: list[Tensor],
    vectors: Sequence[Tensor],
    share: Tensor | float | None,
) -> tuple[Tensor, list[Tensor]]:
    """Losses (A,) and, given ``share``, (A, 1) or one for all, the gradient of ``(share * losses).sum()``."""
    factor = share if isinstance(share, float) else 1
    blocks = tuple(zip(vectors[::2], vectors[1::2], strict=True))
    chunks = comparison._replace(blocks=blocks).split(
        len(cosines[0]) if cosines else criterion._anchors_at_once(comparison)
    )
    losses, gradients = [], [torch.zeros_like(vector) for vector in vectors] if share is not None else []
    for index, chunk in enumerate(chunks):
        cosine = cosines[index] if cosines else chunk.cosine()
        loss, slope = criterion._losses(chunk, weights[chunk.rows], cosine)
        losses.append(loss)
        if share is None:
            continue
        if isinstance(share, Tensor):
            slope *= share[chunk.rows]
        start = 0
        for block, (anchors, candidates) in enumerate(chunk.blocks):
            part = slope[:, start : start + len(candidates)]
            gradients[2 * block][chunk.rows].addmm_(part, candidates, alpha=factor)
            gradients[2 * block + 1].addmm_(part.T, anchors, alpha=factor)
            start += len(candidates)
    return torch.cat(losses), gradients


def _cross_entropy(logits: Tensor, slope: Tensor | float, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each anchor, (A,), and its derivative by the cosines, (A, C), if ``slope`` is that of the logits."""
    # The softmax and its logarithm of one exponential each; nothing is lost, because the largest logit is 0.
    logits -= logits.amax(1, keepdim=True)
    own = logits.gather(1, positive)
    share = logits.exp_()
    total = share.sum(1, keepdim=True)
    share /= total
    losses = (total.log() - own)[:, 0]
    return losses, share.scatter_add_(1, positive, share.new_full(positive.shape, -1)).mul_(slope)


def _only_negatives(chunk: Comparison, cosine: Tensor, dropped: Tensor | None) -> Tensor:
    """``cosine`` (A, C) with -inf in place of everything but the unmasked negatives."""
    return chunk.fill(cosine.scatter(1, chunk.positive, -math.inf), dropped, -math.inf)


def _largest(values: Tensor, size: int) -> Tensor:
    """The ``size`` largest ``values`` of each row, largest first; the order of ``values`` may change."""
    if values.device.type != "cpu" or is_compiling():
        return values.topk(size).values
    # Several times as fast as topk of the same torch, release 2.13: numpy selects and sorts with vector instructions.
    array = values.numpy()
    array.partition(array.shape[1] - size, axis=1)
    return torch.from_numpy(np.sort(array[:, array.shape[1] - size :], axis=1)).flip(1)


def _unit_vectors(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Directions (N, d) and, (N,), which rows have none: those are 0 and receive no gradient at all."""
    norm = torch.linalg.vector_norm(embeddings.detach(), dim=1, keepdim=True)
    zero = norm < SMALLEST_NORM
    return _Direction.apply(embeddings, norm.masked_fill_(zero, math.inf)), zero[:, 0]


def _denominator(
    parts: list[_Part], keep: Callable[[slice], Tensor] | None, zero_norm_rows: Tensor, shard: Shard
) -> Comparison:
    """Candidates of several parts side by side."""
    starts = [sum(len(part.candidates) for part in parts[:index]) for index in range(len(parts))]
    positive = torch.cat([part.positive + start for part, start in zip(parts, starts, strict=True)], dim=1)
    own = torch.cat([part.own + start for part, start in zip(parts, starts, strict=True)], dim=1)
    most_negatives = starts[-1] + len(parts[-1].candidates) - positive.shape[1] - own.shape[1]
    blocks = tuple((part.anchors, part.candidates) for part in parts)
    return Comparison(blocks, positive, own, keep, slice(0, len(positive)), most_negatives, zero_norm_rows, shard)


def _checked(keep: Keep, shape: tuple[int, int]) -> Callable[[slice], Tensor]:
    """``keep`` as a function of a slice of anchors, checked."""
    if isinstance(keep, Tensor):
        whole = _bool(keep, shape)
        return lambda rows: whole[rows]
    return lambda rows: _bool(keep(rows), (len(range(*rows.indices(shape[0]))), shape[1]))


def _bool(keep: Tensor, shape: tuple[int, int]) -> Tensor:
    if keep.dtype != torch.bool or tuple(keep.shape) != shape:
        raise ValueError(f"keep must be a bool tensor of shape {shape}, got {keep.dtype} {tuple(keep.shape)}")
    return keep


def _columns(keep: Callable[[slice], Tensor], span: slice) -> Callable[[slice], Tensor]:
    return lambda rows: keep(rows)[:, span]


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return str(value)


def _choice_or_number(name: str, value: object, choices: tuple[str, ...], high: float = math.inf) -> str | float:
    return _choice(name, value, choices) if isinstance(value, str) else _number(name, value, 0, high)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    return value


def _number(name: str, value: object, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> float:
    """``value`` as a float, finite and in [low, high], or in (low, high] for ``above=True``."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise ValueError(
            f"{name} must be a finite number {'above' if above else 'from'} {low} up to {high}, got {value!r}"
        )
    return number
