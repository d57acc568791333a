"""The criteria as losses for sentence-transformers: embed the columns, mask the duplicates, call the criterion."""

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


class _ContrastiveLoss(nn.Module):
    """Embeds the text columns of a batch and hands them to a criterion.

    One column: the batch is embedded twice in one forward of 2N rows, so that dropout makes the two views. Two columns:
    anchors and positives. Further columns: hard negatives, candidates of every anchor.
    """

    def __init__(self, model: SentenceTransformer, criterion: nn.Module, mask_duplicates: bool) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.mask_duplicates = mask_duplicates

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of the anchors of this batch, a scalar; ``labels`` are not used."""
        columns = list(sentence_features)
        keep = _keep_mask(columns) if self.mask_duplicates else None
        if len(columns) == 1:
            if "all_layer_embeddings" in columns[0]:
                raise ValueError(
                    "AdaptiveLayerLoss hands layers over through the feature dict, which a single text column cannot "
                    "give for two views; duplicate the column in the data set"
                )
            # A copy for the second view: the model writes its outputs into the dict it is given.
            first, second = embed_columns(self.model, [columns[0], dict(columns[0])], separate_first=False)
            return self.criterion(first, second, keep=keep)
        return self.criterion(*embed_columns(self.model, columns), keep=keep)

    def stats(self) -> dict[str, float]:
        """Means over the anchors of the last batch, for logging; the only place that waits for the device."""
        return self.criterion.stats()

    def get_config_dict(self) -> dict[str, Any]:
        """The options, as the model card prints them."""
        return {**self.criterion.get_config_dict(), "mask_duplicates": self.mask_duplicates}

    @property
    def temperature(self) -> float:
        """Temperature of the softmax part."""
        return self.criterion.temperature

    @property
    def scale(self) -> float:
        """1 / temperature, sentence-transformers' name for the same option."""
        return 1 / self.temperature


class InfoNCELoss(_ContrastiveLoss):
    """InfoNCE over in-batch negatives (SimCSE), for ``SentenceTransformerTrainer``.

    Equals ``MultipleNegativesRankingLoss`` at scale 1/temperature on batches without duplicates.

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
    """

    def __init__(
        self, model: SentenceTransformer, temperature: float = 0.05, *, mask_duplicates: bool = True, **options: Any
    ) -> None:
        """Create the loss."""
        super().__init__(model, InfoNCE(temperature, **options), mask_duplicates)

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return _SIMCSE_CITATION


class WeinceLoss(_ContrastiveLoss):
    """WEINCE: InfoNCE logits blended per anchor with a Weibull shortfall logit, for ``SentenceTransformerTrainer``.

    Args:
        model: The encoder.
        temperature: Divides the cosines of the softmax part; 0.05 as in SimCSE.
        mask_duplicates: Texts with equal token ids after truncation are not each other's negatives and stay out of
            each other's tail, where a duplicate would sit on the endpoint and fake one.
        **options: Further options of `Weince`: gate, evidence, shape, floor, ...

    Inputs: as for `InfoNCELoss`.

    Source: Erol et al., "When Softmax Fails at the Top", ICML 2026, arXiv 2606.00262.
    """

    def __init__(
        self, model: SentenceTransformer, temperature: float = 0.05, *, mask_duplicates: bool = True, **options: Any
    ) -> None:
        """Create the loss."""
        super().__init__(model, Weince(temperature, **options), mask_duplicates)

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return _WEINCE_CITATION


def text_keys(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit key per text, equal for equal token ids; None for inputs without token ids.

    Args:
        features: One column of a batch with ``input_ids`` and ``attention_mask`` of shape (N, L), padded on any side.

    Returns:
        Shape (N,), int64. Different texts share a key with probability about 2^-64 per pair.
    """
    ids = features.get("input_ids")
    if ids is None or ids.ndim != 2 or "cu_seq_lens_q" in features:
        return None
    mask = features.get("attention_mask", torch.ones_like(ids))
    # Counted from the first real token, so that two columns padded to different widths can be compared.
    positions = mask.cumsum(1)
    # A multiplicative hash in wrapping int64 arithmetic: no sort, no loop, and nothing that waits for the device.
    mixed = (ids + 1) * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 30)) * 0x14D049BB133111EB
    mixed = (mixed ^ (mixed >> 27)) * 0x2545F4914F6CDD1D
    return ((mixed ^ (mixed >> 31)) * mask).sum(1)


def _keep_mask(columns: list[dict[str, Any]]) -> Tensor | None:
    """Which candidates an anchor is compared with, (N, N * columns): all but copies of itself and of its positive."""
    keys = [text_keys(column) for column in columns]
    if any(key is None for key in keys):
        return None
    anchors, candidates = keys[0], torch.cat(keys[1:] or keys)
    positives = keys[1] if len(keys) > 1 else anchors
    copies = (candidates == anchors[:, None]) | (candidates == positives[:, None])
    # A positive of an equal anchor is one of this anchor's positives too.
    size = len(anchors)
    copies[:, :size] |= anchors == anchors[:, None]
    copies[:, :size].fill_diagonal_(False)
    return ~copies
