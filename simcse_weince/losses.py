"""The criteria as losses for sentence-transformers: embed the columns, mask the duplicates, call the criterion."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from simcse_weince.criterion import InfoNCE, Weince

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


class InfoNCELoss(nn.Module):
    """InfoNCE over in-batch negatives (SimCSE), for ``SentenceTransformerTrainer``.

    One text column: the batch is embedded twice in one forward of 2N rows, so that dropout makes the two views. Two
    columns: anchors and positives. Further columns: hard negatives, candidates of every anchor. Equals
    ``MultipleNegativesRankingLoss`` at scale 1/temperature on batches without duplicates.

    Args:
        model: The encoder.
        temperature: Divides the cosines; 0.05 as in SimCSE.
        mask_duplicates: Texts with equal token ids after truncation are not each other's negatives
            (sentence-transformers issue 3189). Ids are compared, not embeddings: dropout makes those differ.
        **options: Further options of `InfoNCE`.

    Inputs:
        ======================================  ========
        Texts                                   Labels
        ======================================  ========
        single sentences                        none
        (anchor, positive) pairs                none
        (anchor, positive, negative, ...) rows  none
        ======================================  ========

    Source: Gao, Yao, Chen, "SimCSE", EMNLP 2021, arXiv 2104.08821.
    """

    criterion_class: type[InfoNCE] = InfoNCE
    citation = _SIMCSE_CITATION  # read by the model card

    def __init__(
        self, model: SentenceTransformer, temperature: float = 0.05, *, mask_duplicates: bool = True, **options: Any
    ) -> None:
        """Create the loss."""
        super().__init__()
        self.model = model
        self.criterion = self.criterion_class(temperature, **options)
        self.mask_duplicates = mask_duplicates

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of the anchors of this batch, a scalar; ``labels`` are not used."""
        columns = list(sentence_features)
        keep = _keep_mask(columns, self.criterion.layout == "both_views") if self.mask_duplicates else None
        if len(columns) > 1:
            return self.criterion(*embed_columns(self.model, columns), keep=keep)
        if "all_layer_embeddings" in columns[0]:
            raise ValueError(
                "AdaptiveLayerLoss hands layers over through the feature dict, which a single text column cannot "
                "give for two views; duplicate the column in the data set"
            )
        # A copy for the second view: the model writes its outputs into the dict it is given.
        views = embed_columns(self.model, [columns[0], dict(columns[0])], separate_first=False)
        return self.criterion(*views, keep=keep)

    def stats(self) -> dict[str, float]:
        """Means over the anchors of the last batch, for logging; the only place that waits for the device."""
        return self.criterion.stats()

    def get_config_dict(self) -> dict[str, Any]:
        """The options, as the model card prints them."""
        options = inspect.signature(self.criterion_class).parameters
        return {**{name: getattr(self.criterion, name) for name in options}, "mask_duplicates": self.mask_duplicates}

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
        mask_duplicates: As in `InfoNCELoss`; duplicates stay out of each other's tail too, where they would sit on the
            endpoint and fake one.
        **options: Further options of `Weince`: gate, evidence, shape, floor, ...

    Inputs: as for `InfoNCELoss`.

    Source: Erol et al., "When Softmax Fails at the Top", ICML 2026, arXiv 2606.00262.
    """

    criterion_class = Weince
    citation = _WEINCE_CITATION


def text_keys(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit key per text, equal for equal token ids; None for inputs that are not text.

    Args:
        features: One column of a batch: ``input_ids`` and ``attention_mask`` of shape (N, L), padded on any side, or
            texts laid end to end for flash attention, shape (1, total) with ``cu_seq_lens_q`` (N + 1,).

    Returns:
        Shape (N,), int64. Different texts share a key with probability about 2^-64 per pair.
    """
    ids = features.get("input_ids")
    if ids is None or ids.ndim != 2 or features.get("modality", "text") != "text":
        return None
    if "cu_seq_lens_q" in features:
        starts, tokens = features["cu_seq_lens_q"].long(), torch.arange(ids.shape[1], device=ids.device)
        rows = torch.searchsorted(starts, tokens, right=True) - 1
        return ids.new_zeros(len(starts) - 1).index_add(0, rows, _token_keys(ids[0], tokens - starts[rows] + 1))
    mask = features.get("attention_mask", torch.ones_like(ids))
    # Counted from the first real token, so that two columns padded to different widths can be compared.
    return (_token_keys(ids, mask.cumsum(1)) * mask).sum(1)


def _token_keys(ids: Tensor, positions: Tensor) -> Tensor:
    """A multiplicative hash in wrapping int64 arithmetic: no sort, no loop, and nothing that waits for the device."""
    mixed = (ids + 1) * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 30)) * 0x14D049BB133111EB
    mixed = (mixed ^ (mixed >> 27)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 31)


def _keep_mask(columns: list[dict[str, Any]], both_views: bool) -> Tensor | None:
    """Which candidates an anchor is compared with, (A, C): all but copies of itself and of its positive.

    The positive itself may be marked as a copy: a criterion keeps it always.
    """
    keys = [key for key in map(text_keys, columns) if key is not None]
    if len(keys) < len(columns):
        return None
    anchors, positives = (keys * 2)[:2]
    candidates, partners = torch.cat([positives, *keys[2:]]), anchors
    if both_views:
        candidates, partners = torch.cat([anchors, positives]), torch.cat([positives, anchors])
        anchors, positives = candidates, partners
    copies = (candidates == anchors[:, None]) | (candidates == positives[:, None])
    # The positive of a copy of the anchor is a positive of the anchor.
    copies[:, : len(partners)] |= partners == anchors[:, None]
    return ~copies
