"""The links of extreme-value choice, as pure functions of scores.

When the best of many candidates is chosen, the tail of the scores says how a score becomes a log-weight
(Fisher-Tippett-Gnedenko): linearly for a light, unbounded tail (Gumbel: the softmax of InfoNCE), through ``log s`` for
a heavy one (Frechet) and through ``-log(endpoint - s)`` for a bounded one (Weibull). A cosine is bounded by 1.

Erol, Evren, Ozel, Morgan, Ryu, Zheng, "When Softmax Fails at the Top: Extreme-Value Corrections for InfoNCE",
ICML 2026, arXiv 2606.00262.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def shortfall(cosine: Tensor) -> Tensor:
    """Distance ``1 - s`` to the endpoint of the cosine, in [0, 2].

    Rounding makes a float32 cosine of a vector with itself as large as 1.0000002: that is a shortfall of 0.
    """
    return (1 - cosine).clamp_(min=0)


def softmax_link(score: Tensor, temperature: float) -> Tensor:
    """Gumbel domain: ``s / temperature``, the logit of InfoNCE."""
    return score * (1 / temperature)


def power_link(score: Tensor, exponent: float | Tensor) -> Tensor:
    """Frechet domain: ``exponent * log s``, for scores that are positive and unbounded (-inf at ``s <= 0``)."""
    return exponent * score.clamp(min=0).log()


def shortfall_link(cosine: Tensor, shape: float | Tensor, floor: float = 1e-4) -> Tensor:
    """Weibull domain: ``-shape * log(1 - s + floor)``.

    The floor keeps the logit finite up to ``s = 1`` without a cliff: its gradient with respect to a unit vector stays
    below ``shape / sqrt(2 * floor)`` and vanishes smoothly at ``s = 1``. ``shape`` broadcasts to that of ``cosine``.
    """
    return shortfall(cosine).add_(floor).log_().mul_(-shape)


def blended_link_and_slope(
    cosine: Tensor, blend: float | Tensor, shape: float | Tensor, temperature: float, floor: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """The WEINCE logit, ``(1 - blend) * s / temperature - blend * shape * log(1 - s + floor)``, and its derivative.

    Both links are finite, so ``blend = 0`` is :func:`softmax_link` and ``blend = 1`` is :func:`shortfall_link` to the
    last bit. ``blend`` and ``shape`` broadcast to the shape of ``cosine``: (A, 1) to (A, C).

    The derivative, ``(1 - blend) / temperature + blend * shape / (1 - s + floor)``, is written out because autograd
    would keep every step. Beyond the endpoint, where rounding may take a cosine, the shortfall is constant and only the
    first part is left.
    """
    steepness, softmax = blend * shape, (1 - blend) * (1 / temperature)
    # In place: memory that is new costs more than the arithmetic.
    distance = 1 - cosine
    link = distance.clamp(min=0).add_(floor).log_().mul_(-steepness)
    link = link.addcmul_(cosine, softmax) if isinstance(softmax, Tensor) else link.add_(cosine, alpha=softmax)
    distance = F.threshold(distance, -torch.finfo(cosine.dtype).tiny, math.inf, inplace=True).add_(floor)
    return link, distance.reciprocal_().mul_(steepness).add_(softmax)
