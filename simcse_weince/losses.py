"""The criteria as losses for sentence-transformers: embed the columns, mask the duplicates, call the criterion.

`InfoNCELoss` and `WeinceLoss` keep the activations of a whole batch; the cached two embed it a mini-batch at a time,
twice, and give the same values and gradients for any batch size (GradCache, Gao et al., arXiv 2101.06983).
"""

import copy
import inspect
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.losses.adaptive_layer import TransformerDecorator
from torch import Tensor, nn

from simcse_weince.criterion import InfoNCE, ReleasedWeince, Weince
from simcse_weince.errors import InputError
from simcse_weince.gather import Shard

logger = logging.getLogger(__name__)

# Rows of a group of similar length: of fewer a core would be idle, in more there is more padding.
_GROUP_ROWS = 16
# What features of texts hold; images and sounds add names of their own.
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "modality", "prompt_length",
            "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # fmt: skip

_SIMCSE_CITATION = """\
@inproceedings{gao-etal-2021-simcse,
    title = "{S}im{CSE}: Simple Contrastive Learning of Sentence Embeddings",
    author = "Gao, Tianyu and Yao, Xingcheng and Chen, Danqi",
    booktitle = "Proceedings of EMNLP",
    year = "2021",
    url = "https://arxiv.org/abs/2104.08821",
}
"""
_WEINCE_CITATION = """\
@inproceedings{erol-etal-2026-weince,
    title = "When Softmax Fails at the Top: Extreme-Value Corrections for {InfoNCE}",
    author = "Erol and Evren and Ozel and Morgan and Ryu and Zheng",
    booktitle = "Proceedings of ICML",
    year = "2026",
    url = "https://arxiv.org/abs/2606.00262",
}
"""
_GRADCACHE_CITATION = """\
@inproceedings{gao-etal-2021-scaling,
    title = "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    author = "Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie",
    booktitle = "Proceedings of RepL4NLP",
    year = "2021",
    url = "https://arxiv.org/abs/2101.06983",
}
"""


class InfoNCELoss(nn.Module):
    """InfoNCE over in-batch negatives (SimCSE), for ``SentenceTransformerTrainer``.

    One text column: the batch is embedded twice in one forward of 2N rows, so that dropout makes the two views. Two
    columns: anchors and positives. Further columns: hard negatives, candidates of every anchor. Equals
    ``MultipleNegativesRankingLoss`` at scale 1/temperature on batches without duplicates.

    Args:
        model: The encoder.
        temperature: Divides the cosines; 0.05 as in SimCSE.
        gather_across_devices: The anchors of each process are compared with the candidates of all processes, so that P
            processes with N rows train as one with P * N rows: same loss, statistics and gradients. Local batches may
            differ in size.
        mask_duplicates: Texts with equal token ids after truncation are not each other's negatives
            (sentence-transformers issue 3189). Ids are compared, not embeddings: dropout makes those differ.
        group_by_length: Embed the rows of a batch in groups of similar length, each padded to its own longest text
            instead of the batch's. The batch, and with it the loss, stays the same. None: on a CPU, unless the encoder
            is compiled; a GPU that is not full gains nothing.
        **options: Further options of `InfoNCE`; its reduction is always "mean".

    Inputs:
        ======================================  ========
        Texts                                   Labels
        ======================================  ========
        single sentences                        none
        (anchor, positive) pairs                none
        (anchor, positive, negative, ...) rows  none
        ======================================  ========

    An anchor with several positives is several rows: they are not its negatives, unless a row of another anchor has one
    of them too (and in ``doc_to_doc`` they are each other's).

    Raises:
        ValueError: In the first batch that is trained on, if it leaves an anchor without negatives; for processes that
            gather batches of different losses or columns.

    Source: Gao, Yao, Chen, "SimCSE", EMNLP 2021, arXiv 2104.08821.
    """

    criterion_class: type[InfoNCE] = InfoNCE
    citation = _SIMCSE_CITATION  # read by the model card

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = 0.05,
        *,
        gather_across_devices: bool = False,
        mask_duplicates: bool = True,
        group_by_length: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if options.get("reduction", "mean") != "mean":
            raise ValueError(f'reduction must be "mean", a trainer needs a scalar, got {options["reduction"]!r}')
        self.model = model
        self.criterion = self.criterion_class(temperature, **options)
        self.gather_across_devices = gather_across_devices
        self.mask_duplicates = mask_duplicates
        self.group_by_length = group_by_length
        # Processes that train on different data sets may not gather for different losses.
        self._kind = zlib.crc32(repr((type(self).__name__, temperature, sorted(options.items()))).encode())
        self._measured: dict[int, InfoNCE] = {}
        self._trained = False

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of the anchors of this batch, a scalar; ``labels`` are not used."""
        columns = self.in_order(list(sentence_features))
        keys = self.batch_keys(columns)
        if len(columns) == 1 and "all_layer_embeddings" in columns[0]:
            raise ValueError(
                "AdaptiveLayerLoss hands layers over through the feature dict, which a single text column cannot "
                "give for two views; duplicate the column in the data set"
            )
        if self.criterion.state_dict() and _hands_layers_over(self.model):
            raise ValueError("the layers of AdaptiveLayerLoss would share one running average; use WeinceLoss instead")
        parts = []
        for part in _groups(columns) if self._grouped(columns) else [columns]:
            # A copy for the second view: the model writes its outputs into the dict it is given.
            views = part if len(part) > 1 else [part[0], dict(part[0])]
            parts.append(embed_columns(self.model, views, separate_first=len(part) > 1))
        embeddings = parts[0] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts, strict=True)]
        return self.compute_loss_from_embeddings(embeddings, keys)

    def in_order(self, columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the batch, shortest first, where they are embedded in groups of similar length."""
        if not self._grouped(columns):
            return columns
        order = torch.stack([column["attention_mask"].sum(1) for column in columns]).sum(0).argsort(stable=True)
        return [_rows_of(column, order) for column in columns]

    def _grouped(self, columns: list[dict[str, Any]]) -> bool:
        """Whether this batch is embedded in groups: it must be padded text, in a forward that may be called often."""
        masks: list[Any] = [column.get("attention_mask") for column in columns]
        padded = all(isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) > _GROUP_ROWS for mask in masks)
        if self.group_by_length is False or not padded:
            return False
        on_cpu = masks[0].device.type == "cpu" and not hasattr(self.model, "_orig_mod")
        texts = all(_is_text(column) and "cu_seq_lens_q" not in column for column in columns)
        return (self.group_by_length or on_cpu) and texts and not _hands_layers_over(self.model)

    def batch_keys(self, columns: list[dict[str, Any]]) -> Tensor | None:
        """The `text_keys` of all columns, (columns, N); None if duplicates are not masked, or not all is text.

        Taken before the model sees the columns, because some modules write into them.
        """
        keys = [key for key in map(text_keys, columns) if key is not None]
        return torch.stack(keys) if self.mask_duplicates and len(keys) == len(columns) else None

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], keys: Tensor | None = None) -> Tensor:
        """Return the loss of two or more embedded columns, (N, d) each; ``keys`` are their :meth:`batch_keys`."""
        shard = Shard((len(embeddings[0]),))
        if self.gather_across_devices:
            alike = (len(embeddings), embeddings[0].shape[1], keys is not None, self._kind)
            shard = Shard.of(len(embeddings[0]), embeddings[0].device, *alike)
        keep = None if keys is None else without_copies(keys, self.criterion, shard)
        loss = self.criterion(*embeddings, keep=keep, shard=shard)
        # Shares all but the statistics with the criterion, which MatryoshkaLoss calls once for each width.
        self._measured[embeddings[0].shape[1]] = copy.copy(self.criterion)
        if len(self._measured) > 1 and self.criterion.state_dict():
            raise ValueError("the widths of MatryoshkaLoss would share one running average; use WeinceLoss instead")
        if torch.is_grad_enabled() and not self._trained:
            self._check_first_batch()
        return loss

    def _check_first_batch(self) -> None:
        """A batch of one has loss 0 for ever, which looks like convergence (sentence-transformers issue 3242)."""
        if not self.criterion.most_negatives:
            raise InputError(
                "a batch of 1 leaves no negatives and the loss is 0; raise per_device_train_batch_size, set "
                "gather_across_devices=True to compare with the rows of the other processes, or, for "
                "own_negatives_only, give columns of hard negatives"
            )
        self._trained = True
        logger.info("negatives per anchor: %d", self.criterion.most_negatives)
        if self.criterion.stats()["positive_cosine"] > 1 - 1e-5:  # equal, up to rounding
            logger.warning("positives equal their anchors: set the dropout of the encoder to 0.1, or train on pairs")

    def stats(self) -> dict[str, float]:
        """Means over the anchors of the last batch, for logging; the only place that waits for the device.

        Inside ``MatryoshkaLoss`` those of the widest embeddings, and those of width 64, for example, as ``blend_64``;
        with ``n_dims_per_step`` each of the batch that last had this width. Inside ``AdaptiveLayerLoss`` those of the
        layer that was computed last.
        """
        numbers: dict[str, float] = {}
        for width in sorted(self._measured, reverse=True):
            suffix = f"_{width}" if numbers else ""
            numbers |= {f"{name}{suffix}": value for name, value in self._measured[width].stats().items()}
        return numbers

    def get_config_dict(self) -> dict[str, Any]:
        """The options, as the model card prints them."""
        # Of the base classes too: a criterion may hand **options on to them.
        classes = [kind for kind in self.criterion_class.__mro__ if issubclass(kind, InfoNCE)]
        names = [name for kind in classes for name in inspect.signature(kind).parameters if name != "options"]
        own = {name: getattr(self, name) for name in ("gather_across_devices", "mask_duplicates", "group_by_length")}
        return {**{name: getattr(self.criterion, name) for name in names}, **own}

    @property
    def temperature(self) -> float:
        """Temperature of the softmax part."""
        return self.criterion.temperature

    @property
    def scale(self) -> float:
        """1 / temperature, sentence-transformers' name for the same option."""
        return 1 / self.temperature


class WeinceLoss(InfoNCELoss):
    """WEINCE: InfoNCE logits blended per anchor with a Weibull shortfall logit, for ``SentenceTransformerTrainer``.

    Args:
        model: The encoder.
        temperature: Divides the cosines of the softmax part; 0.05 as in SimCSE.
        gather_across_devices: As in `InfoNCELoss`; the statistics too are those of the batch of all processes.
        mask_duplicates: As in `InfoNCELoss`; duplicates stay out of each other's tail too, where they would sit on the
            endpoint and fake one.
        **options: Further options of `Weince`: gate, evidence, shape, floor, ...

    Inputs: as for `InfoNCELoss`.

    Source: Erol et al., "When Softmax Fails at the Top", ICML 2026, arXiv 2606.00262.
    """

    criterion_class = Weince
    citation = _WEINCE_CITATION


class ReleasedWeinceLoss(WeinceLoss):
    """The objective of the authors' public training script, see `ReleasedWeince`, as an arm to compare with.

    Arguments are those of `WeinceLoss`, further options those of `ReleasedWeince`: ``gate=0.0`` is InfoNCE with the
    same two terms added. The running average is equal on all processes. Inputs: without hard negatives.
    """

    criterion_class = ReleasedWeince


class HardnessWeightedLoss(MultipleNegativesRankingLoss):
    """The host's hardness-weighted loss (Lan et al., arXiv 2503.04812, eq. 5), as an arm to compare with.

    ``hardness_strength * cosine`` is added, without a gradient, to the logit of each in-batch negative. A single text
    column is embedded twice, as in `InfoNCELoss`; duplicates are not masked.

    Args:
        model: The encoder.
        temperature: Divides the cosines.
        hardness_strength: Weight of the added cosines.
        gather_across_devices: As in `InfoNCELoss`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = 0.05,
        *,
        hardness_strength: float = 9.0,
        gather_across_devices: bool = False,
    ) -> None:
        scale = 1 / InfoNCE(temperature).temperature  # checked
        super().__init__(model, scale, gather_across_devices=gather_across_devices,
                         hardness_mode="in_batch_negatives", hardness_strength=hardness_strength)  # fmt: skip

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of the anchors of this batch, a scalar; ``labels`` are not used."""
        columns = list(sentence_features)
        views = columns if len(columns) > 1 else [columns[0], dict(columns[0])]
        return super().forward(views, labels)  # type: ignore[arg-type]  # the host ignores the labels as well


class CachedInfoNCELoss(CachedLossMixin, nn.Module):
    """`InfoNCELoss` for batches whose activations do not fit: the memory of a mini-batch, the time of two forwards.

    The batch is embedded without gradients, the loss is computed once over all of it (so statistics are those of the
    batch), and each mini-batch is embedded again, with the same dropout, to pass its gradients on. Works inside
    ``MatryoshkaLoss``; not inside ``AdaptiveLayerLoss`` nor with ``StaticEmbedding``.

    Args:
        model: The encoder.
        temperature: Divides the cosines; 0.05 as in SimCSE.
        mini_batch_size: Rows that are embedded at a time; changes memory and speed, not the loss.
        mini_batch_num_tokens: Instead, as many rows as have this many tokens.
        show_progress_bar: Show the mini-batches.
        **options: Further options of `InfoNCELoss`.

    Inputs: as for `InfoNCELoss`.

    Raises:
        ValueError: For a model or a wrapper that cannot be cached; the message names the remedy.
    """

    loss_class: type[InfoNCELoss] = InfoNCELoss

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = 0.05,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = {"mini_batch_size": mini_batch_size, "mini_batch_num_tokens": mini_batch_num_tokens}
        for name, value in self._options.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if has_static_embedding_input(model):
            raise ValueError(
                f"StaticEmbedding inputs cannot be split into mini-batches; use {self.loss_class.__name__} instead"
            )
        self.model = model
        self.loss = self.loss_class(model, temperature, **options)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of the anchors of this batch, a scalar; ``labels`` are not used."""
        if _hands_layers_over(self.model):
            raise ValueError(
                "AdaptiveLayerLoss hands layers over in a forward that a cached loss repeats without it; "
                f"use {self.loss_class.__name__} instead"
            )
        columns = self.loss.in_order(list(sentence_features))
        keys = self.loss.batch_keys(columns)
        # What the host calls labels it hands through to calculate_loss.
        return self.forward_cached(columns if len(columns) > 1 else [columns[0], dict(columns[0])], keys)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Loss of embedded mini-batches, one list for each column; ``labels`` are the keys of the texts."""
        loss = self.loss.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if with_backward:
            loss.backward()
        return loss.detach() if with_backward else loss

    def stats(self) -> dict[str, float]:
        """Means over the anchors of the last batch, for logging; the only place that waits for the device."""
        return self.loss.stats()

    def get_config_dict(self) -> dict[str, Any]:
        """The options, as the model card prints them."""
        return {**self.loss.get_config_dict(), **self._options}

    @property
    def citation(self) -> str:
        """Papers of the loss and of GradCache."""
        return self.loss.citation + _GRADCACHE_CITATION

    @property
    def temperature(self) -> float:
        """Temperature of the softmax part."""
        return self.loss.temperature

    @property
    def scale(self) -> float:
        """1 / temperature, sentence-transformers' name for the same option."""
        return self.loss.scale


class CachedWeinceLoss(CachedInfoNCELoss):
    """`WeinceLoss` for batches whose activations do not fit.

    Arguments are those of `CachedInfoNCELoss`, further options those of `WeinceLoss`.
    """

    loss_class = WeinceLoss


def _hands_layers_over(model: nn.Module) -> bool:
    """Whether ``AdaptiveLayerLoss`` writes layers into the feature dicts, and reads them there in the next forward."""
    return any(isinstance(module.forward, TransformerDecorator) for module in model.modules())


def _rows_of(column: dict[str, Any], rows: Tensor | slice) -> dict[str, Any]:
    """Some rows of a column of padded texts, without the padding that all of them have on the right."""
    mask = column["attention_mask"]
    count, width = mask.shape
    kept = int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else width
    part = {}
    for name, value in column.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == count:
            value = value[rows]
            value = value[:, :kept] if value.ndim > 1 and value.shape[1] == width else value
        part[name] = value
    return part


def _groups(columns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The columns, a few rows at a time."""
    for start in range(0, len(columns[0]["attention_mask"]), _GROUP_ROWS):
        yield [_rows_of(column, slice(start, start + _GROUP_ROWS)) for column in columns]


def text_keys(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit key per text, equal for equal token ids; None for inputs that are not text.

    Args:
        features: One column of a batch: ``input_ids`` and ``attention_mask`` of shape (N, L), padded on any side, or
            texts laid end to end for flash attention, shape (1, total) with ``cu_seq_lens_q`` (N + 1,).

    Returns:
        Shape (N,), int64. Different texts share a key with probability about 2^-64 per pair.
    """
    ids = features.get("input_ids")
    if ids is None or ids.ndim != 2 or not _is_text(features):
        return None
    if "cu_seq_lens_q" in features:
        starts, tokens = features["cu_seq_lens_q"].long(), torch.arange(ids.shape[1], device=ids.device)
        rows = torch.searchsorted(starts, tokens, right=True) - 1
        return ids.new_zeros(len(starts) - 1).index_add(0, rows, _token_keys(ids[0], tokens - starts[rows] + 1))
    mask = features.get("attention_mask", torch.ones_like(ids))
    # Counted from the first real token, so that two columns padded to different widths can be compared.
    return (_token_keys(ids, mask.cumsum(1)) * mask).sum(1)


def _is_text(features: dict[str, Any]) -> bool:
    """Whether a column holds texts alone; those of a model with a chat template are messages."""
    kind = features.get("modality", "text")
    return kind == "text" or (kind == "message" and features.keys() <= _OF_TEXT)


def _token_keys(ids: Tensor, positions: Tensor) -> Tensor:
    """A multiplicative hash in wrapping int64 arithmetic: no sort, no loop, and nothing that waits for the device."""
    mixed = (ids + 1) * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 30)) * 0x14D049BB133111EB
    mixed = (mixed ^ (mixed >> 27)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 31)


def without_copies(keys: Tensor, criterion: InfoNCE, shard: Shard) -> Callable[[slice], Tensor]:
    """Which candidates a slice of anchors is compared with, (a, C): all but copies of itself and of its positive.

    The positive itself may be marked as a copy: a criterion keeps it always. Made slice by slice, because for 32,768
    anchors the mask of all takes 1 GB.
    """
    keys = keys.expand(max(2, len(keys)), -1)  # a single column is its own positive
    everyones = shard.all_gather(keys.T).T
    queries, docs, partners = everyones[0], everyones[1:].flatten(), everyones[1]

    def kept(anchors: Tensor, positives: Tensor, others: str) -> Tensor:
        candidates, theirs = (docs, queries) if others == "doc" else (queries, partners)
        copies = candidates == anchors[:, None]
        copies |= candidates == positives[:, None]
        # The positive of a copy of the anchor is a positive of the anchor.
        copies[:, : len(theirs)] |= theirs == anchors[:, None]
        return copies.logical_not_()

    def rows(part: slice) -> Tensor:
        if criterion.layout == "both_views":
            anchors, positives = keys[:2].flatten()[part], keys[:2].flip(0).flatten()[part]
            return torch.cat([kept(anchors, positives, "query"), kept(anchors, positives, "doc")], dim=1)
        masks = []
        for side, _, others in (direction.split("_") for direction in criterion.directions):
            anchors, positives = keys[:2, part] if side == "query" else keys[:2, part].flip(0)
            masks.append(kept(anchors, positives, others))
        return masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)

    return rows
