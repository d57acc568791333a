"""Dropout for CPUs, where drawing its random numbers takes a quarter of a training step in bfloat16.

torch draws one number of 32 bits for each element, on one core. Sixteen bits are enough: `cpu_dropout` draws four of
them at a time from the same generator, so that seeds, resumed runs and the replay of cached losses work as ever.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A probability is rounded to a multiple of this.
_STEP = 2.0**-16


_torch_dropout, _torch_attention = F.dropout, F.scaled_dot_product_attention


@contextmanager
def cpu_dropout() -> Iterator[None]:
    """Within the block dropout, also that of attention, is drawn more cheaply; for modules on the CPU.

    The distribution is that of ``torch.nn.functional.dropout`` with the probability rounded to a multiple of 2^-16
    (0.1 becomes 0.100006), and the expectation of each value is unchanged. Other masks are drawn, so a run is another
    than without this block, as a run with another seed is. Causal attention is left to torch.
    """
    before = F.dropout, F.scaled_dot_product_attention
    # In their own place: torch leaves a mode, its hook for this, out of all that a backward calls, and there cached
    # losses and gradient checkpointing run the encoder once more.
    F.dropout, F.scaled_dot_product_attention = _dropout, _attention
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = before


class _Dropout(torch.autograd.Function):
    """Keeps, like torch, one number of the values' type per element for backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, probability: float) -> Tensor:
        lanes = round(probability / _STEP)
        ctx.scale = 1 / (1 - lanes * _STEP)
        # From the lowest number on, else the highest bit is always 0.
        drawn = torch.empty(math.ceil(values.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
        # 0 or 1 in the type of the values: comparing into it and multiplying by it are vectorized, a bool mask is not.
        keep = torch.empty(values.shape, dtype=values.dtype)
        torch.ge(drawn.view(torch.int16)[: values.numel()].view(values.shape), lanes - 2**15, out=keep)
        ctx.save_for_backward(keep)
        # Not scaled in the mask itself, where bfloat16 would round 1 / 0.9 down by 0.2 %.
        return (values * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not _STEP / 2 < p < 1 - _STEP or inplace or input.device.type != "cpu" or not input.numel():
        return _torch_dropout(input, p, training, inplace)
    return _Dropout.apply(input, p)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With dropout, attention written out: torch does the same on a CPU, in more steps."""
    if not dropout_p > 0 or is_causal or enable_gqa or query.device.type != "cpu":
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The lowest number, not -inf: a row that attends to nothing must not become NaN.
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return _dropout(shares, dropout_p) @ value
