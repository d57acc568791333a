"""The cosines of an encoder as a stream: hardest negatives of every anchor, and all scores over a high threshold.

The N x N matrix is never held: 1,000,000 anchors against 1,000,000 candidates need their embeddings, the K hardest
negatives of each anchor and one chunk of cosines. The time is that of N * N * d multiplications.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor
from tqdm.auto import tqdm, trange

from simcse_weince.losses import text_keys
from simcse_weince.sentence.encoder import keeping_modes
from simcse_weince.sentence.first_token import first_token_only
from simcse_weince.vision.backbones import VisionEncoder
from simcse_weince.vision.probe import extract_features
from simcse_weince.vision.views import TwoViews, ViewOptions

logger = logging.getLogger(__name__)

_CHUNK_COSINES = 1 << 24  # 64 MB in float32
_SAMPLE_ROWS, _SAMPLE_COLUMNS = 1024, 16_384  # of which the threshold is a quantile
_TOKENIZED_AT_ONCE = 4096


@dataclass(frozen=True)
class Scores:
    """What is kept of the cosines of A anchors with their negatives, float32.

    Where anchors are compared with themselves, the pairs (i, j) and (j, i) are one pair everywhere but in ``hardest``.

    Attributes:
        pairs: Number of (anchor, negative) pairs that were compared.
        duplicates: Number of pairs left out because their texts, or those of their anchors, are equal.
        left_out: Rows without a direction (zero, or not finite), left out on both sides; anchors count without them.
        positive: Cosine of each anchor with its positive, (A,); empty without positives.
        hardest: The K largest cosines of each anchor with its negatives, descending, (A, K); -inf where it has fewer.
        threshold: The ``quantile`` of the cosines of a random sample of pairs.
        share_above: The exact share of all pairs above the threshold.
        exceedances: Cosines above the threshold, or a random sample of them, (m,).
        exceedance_pairs: Anchor and negative of each, in the order of the rows that are not left out, (m, 2) int64.
    """

    pairs: int
    duplicates: int
    left_out: int
    positive: np.ndarray
    hardest: np.ndarray
    threshold: float
    share_above: float
    exceedances: np.ndarray
    exceedance_pairs: np.ndarray

    @property
    def total(self) -> int:
        """Number of pairs of which ``exceedances`` are the largest: all, or as many of them as a sample stands for."""
        return round(len(self.exceedances) / self.share_above) if self.share_above else self.pairs


@torch.inference_mode()
def stream_scores(
    anchors: Any,
    candidates: Any = None,
    *,
    keys: Any = None,
    candidate_keys: Any = None,
    hardest: int = 64,
    quantile: float = 0.9,
    max_exceedances: int = 300_000,
    seed: int = 0,
) -> Scores:
    """Compare every anchor with every candidate, a chunk of anchors at a time, in float32 on the tensors' device.

    Args:
        anchors: Embeddings (N, d), a floating array or tensor.
        candidates: Embeddings (N, d) of which row i is the positive of anchor i. None: the anchors themselves, where
            each is compared with all others and there is no positive.
        keys: (N,) integers, equal for anchors with equal texts, see `encode_texts`: such pairs are left out, because a
            duplicate sits at the cap and fakes a tail.
        candidate_keys: (N,), the same for candidates with other texts than the anchors'; default: ``keys``.
        hardest: Negatives kept of each anchor.
        quantile: The threshold over which cosines are kept.
        max_exceedances: Of more cosines a random sample of about so many is kept, each with equal probability.
        seed: Seed of both samples.

    Raises:
        ValueError: Arrays whose shapes do not fit, or fewer than two rows with a direction.
    """
    first = _unit(anchors)
    second = first if candidates is None else _unit(candidates).to(first.device)
    if first.shape != second.shape:
        raise ValueError(f"candidates must be shaped like anchors {tuple(first.shape)}, got {tuple(second.shape)}")
    usable = (first.isfinite() & second.isfinite()).all(1)
    total, left_out = int(usable.sum()), int((~usable).sum())
    if total < 2:
        raise ValueError(f"anchors must hold at least two rows with a direction, got {total}")
    # Without keys no text equals another.
    own = torch.arange(len(first)) if keys is None else torch.as_tensor(keys)
    other = (own if candidate_keys is None else torch.as_tensor(candidate_keys)).to(first.device)
    own = own.to(first.device)
    if left_out:
        logger.warning("%d rows have no direction or a value that is not finite: left out", left_out)
        own, other, first = own[usable], other[usable], first[usable]
        second = first if candidates is None else second[usable]
    rng = np.random.default_rng(seed)
    threshold = _sample_quantile(first, second, own, other, quantile, rng)
    times = 2 if candidates is None else 1  # how often the matrix of cosines holds a pair
    pairs = total * (total - 1) // times
    keep = min(1.0, max_exceedances / max(1.0, (1 - quantile) * pairs))
    # Only anchors whose text occurs again are compared with all keys: in most corpora a handful.
    repeated = torch.isin(own, other) & (own != other)
    for one in (own, other):
        _, inverse, counts = one.unique(return_inverse=True, return_counts=True)
        repeated |= counts[inverse] > 1
    kept: dict[str, list[Tensor]] = {name: [] for name in ("positive", "hardest", "scores", "pairs")}
    above = duplicates = 0
    size = max(1, _CHUNK_COSINES // total)
    with tqdm(total=total, desc="Comparing", unit="anchor", disable=None) as bar:
        for start in range(0, total, size):
            cosine = first[start : start + size] @ second.T
            rows = torch.arange(len(cosine), device=cosine.device)
            if candidates is not None:
                kept["positive"].append(cosine[rows, start + rows])
            cosine[rows, start + rows] = -math.inf
            if len(again := repeated[start : start + size].nonzero()[:, 0]):
                equal = (other == other[start + again, None]) | (other == own[start + again, None])
                equal |= own == own[start + again, None]  # the positive of a copy of the anchor is a positive of it
                cosine[again] = cosine[again].masked_fill(equal, -math.inf)
                duplicates += int(equal.sum()) - len(again)
            kept["hardest"].append(cosine.topk(min(hardest, total - 1)).values)
            if candidates is None:  # a pair is found in the row of its first member alone
                cosine = cosine[:, start:]
                cosine[:, : len(rows)].masked_fill_(rows[:, None] > rows, -math.inf)
            values = cosine.cpu().numpy().ravel()  # NumPy finds the few above several times faster
            places = np.flatnonzero(values > threshold)
            above += len(places)
            if keep < 1:
                places = places[rng.random(len(places)) < keep]
            kept["scores"].append(torch.from_numpy(values[places]))
            anchor, negative = np.divmod(places, cosine.shape[1])
            both = np.column_stack([start + anchor, total - cosine.shape[1] + negative])
            kept["pairs"].append(torch.from_numpy(both))
            bar.update(len(cosine))
    arrays = {name: torch.cat(parts).cpu().numpy() if parts else np.empty(0) for name, parts in kept.items()}
    pairs, duplicates = pairs - duplicates // times, duplicates // times
    return Scores(pairs, duplicates, left_out, arrays["positive"], arrays["hardest"], threshold, above / max(pairs, 1),
                  arrays["scores"], arrays["pairs"])  # fmt: skip


def encode_texts(
    encoder: SentenceTransformer, texts: Sequence[str], *, batch_size: int = 32, dropout_seed: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Embed N texts, sorted by their number of tokens and without a prompt, as training does.

    Args:
        encoder: Any sentence-transformers model; its length limit holds.
        texts: The texts, at least one.
        batch_size: Texts embedded at a time.
        dropout_seed: With a seed, one view with the dropout of training; None: without dropout.

    Returns:
        Embeddings (N, d), float32, and a key (N,) of each text's token ids, int64 (None for other than text).
    """
    lengths: list[int] = []
    keys: list[Tensor | None] = []
    for start in range(0, len(texts), _TOKENIZED_AT_ONCE):
        block = list(texts[start : start + _TOKENIZED_AT_ONCE])
        features = encoder.preprocess(block)
        mask = features.get("attention_mask")
        lengths += map(len, block) if mask is None else mask.sum(1).tolist()
        keys.append(text_keys(features))
    ordered = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
    vectors, devices = torch.empty(0), [encoder.device] if encoder.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), keeping_modes(encoder):
        torch.manual_seed(dropout_seed or 0)
        encoder.train(dropout_seed is not None)
        for start in trange(0, len(texts), batch_size, desc="Encoding", disable=None):
            rows = ordered[start : start + batch_size]
            features = batch_to_device(encoder.preprocess([texts[row] for row in rows]), encoder.device)
            with torch.inference_mode(), first_token_only(encoder):
                output = encoder(features)["sentence_embedding"].float().cpu()
            if not start:  # one tensor for all: a thousand small ones lie scattered and fragment the memory
                vectors = torch.empty(len(texts), output.shape[1])
            vectors[rows] = output
    return vectors, None if any(key is None for key in keys) else torch.cat([key for key in keys if key is not None])


def encode_images(
    encoder: VisionEncoder, images: Tensor, options: ViewOptions, *, batch_size: int = 32, view_seed: int | None = None
) -> Tensor:
    """Embed images as the criterion sees them: by the projection head, or by their features if it was not loaded.

    Args:
        encoder: The encoder, whose mode is left as it was.
        images: (N, 3, H, W) uint8.
        options: How views were drawn in its training.
        batch_size: Images embedded at a time.
        view_seed: With a seed, one random view of each image; None: the whole image, nothing random.

    Returns:
        (N, d) float32 on the CPU.
    """
    view = None
    if view_seed is not None:
        draw = TwoViews(options, encoder.image_size)
        generator = torch.Generator().manual_seed(view_seed)

        def view(batch: Tensor) -> Tensor:
            return draw(batch, generator)[0]

    features = extract_features(encoder, images, normalize=options.normalize, batch_size=batch_size, view=view)
    with torch.no_grad():
        return (encoder.head(features) if encoder.head_is_trained else features).float().cpu()


def with_direction(*views: Any) -> np.ndarray:
    """Which rows (N,) have a direction in every one of the views (N, d): the others are left out of all numbers."""
    return np.logical_and.reduce([_unit(view).isfinite().all(1).cpu().numpy() for view in views])


def _unit(vectors: Any) -> Tensor:
    """Unit vectors, float32, with NaN in the rows that have no direction."""
    vectors = torch.as_tensor(vectors)
    if vectors.ndim != 2 or not vectors.is_floating_point():
        raise ValueError(f"embeddings must be a floating (N, d) array, got {vectors.dtype} {tuple(vectors.shape)}")
    wide = torch.promote_types(vectors.dtype, torch.float32)
    norm = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=wide)
    return vectors.float() / torch.where((norm > 0) & norm.isfinite(), norm, math.nan)


def _sample_quantile(
    first: Tensor, second: Tensor, own: Tensor, other: Tensor, quantile: float, rng: np.random.Generator
) -> float:
    rows = rng.permutation(len(first))[:_SAMPLE_ROWS]
    columns = rng.permutation(len(first))[:_SAMPLE_COLUMNS]
    cosine, keys = first[rows] @ second[columns].T, other[columns]
    negative = (keys != other[rows][:, None]) & (keys != own[rows][:, None]) & (own[columns] != own[rows][:, None])
    return float(np.quantile((cosine[negative] if negative.any() else cosine).cpu().numpy(), quantile))
