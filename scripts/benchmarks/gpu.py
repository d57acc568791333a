"""Time of a training step on a GPU: WEINCE against InfoNCE, and both against sentence-transformers' own loss.

    python scripts/benchmarks/gpu.py

An encoder of BERT-base's shape with random weights, token ids with the lengths of Wikipedia sentences cut at 32, bf16,
fused AdamW. Every repetition times one step of each loss, one after the other, so that whatever else the machine does
hits them alike; printed are medians of the ratios and their quartiles. Steps scatter by more than the losses differ, so
the two criteria are also timed alone, on embeddings of that size, and their difference is given as a share of the step
("criterion", in per cent). The host embeds the pair (s, s) in two columns,
ours one column twice. Batches larger than --mini_batch_size use the cached losses. Five minutes on one H200;
`--device cpu --layers 6 --width 384 --batches 64 --float32` is the same for MiniLM on a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from simcse_weince import CachedInfoNCELoss, CachedWeinceLoss, InfoNCE, InfoNCELoss, Weince, WeinceLoss


class MeanOfBert(nn.Module):
    """A BERT and the mean of its tokens, as the losses look at an encoder."""

    def __init__(self, **shape: int) -> None:
        """Random weights."""
        super().__init__()
        self.bert = BertModel(BertConfig(**shape), add_pooling_layer=False)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Add the embedding to the features."""
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        mask = features["attention_mask"][..., None]
        return {**features, "sentence_embedding": (self.bert(**inputs)[0] * mask).sum(1) / mask.sum(1)}


def batch_of(rows: int, device: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Token ids whose lengths are spread as those of Wikipedia sentences: a third at the limit of 32, mean 26."""
    lengths = torch.empty(rows).log_normal_(3.28, 0.45, generator=generator).round().long().clamp(6, 32)
    lengths[0] = 32
    mask = (torch.arange(32) < lengths[:, None]).long()
    ids = torch.randint(1000, 30000, (rows, 32), generator=generator) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def seconds(call: Callable[[], object], device: str) -> float:
    """Time of a call, by CUDA events on a GPU."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def compare(criterion: nn.Module, views: list[Tensor]) -> None:
    """Forward and backward of a criterion, ten times."""
    for _ in range(10):
        criterion(*(view.detach().requires_grad_() for view in views)).backward()


def main() -> None:
    """Print one line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--mini_batch_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    bert = MeanOfBert(num_hidden_layers=options.layers, hidden_size=options.width, intermediate_size=4 * options.width)
    encoder: Any = nn.Sequential(bert).to(options.device).train()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-5, fused=True)

    def step(loss: nn.Module, columns: list[dict[str, Tensor]]) -> None:
        optimizer.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=not options.float32):
            value = loss(columns, None)
        value.backward()
        optimizer.step()

    print(f"{options.device}, {options.layers} layers of width {options.width}, {options.repetitions} repetitions")
    print(f"{'batch':>6}{'sentences/s':>13}{'WEINCE / InfoNCE step':>28}{'host / InfoNCE step':>28}{'criterion %':>24}")
    criteria = (InfoNCE(), Weince())
    for rows in options.batches:
        cached = {"mini_batch_size": options.mini_batch_size} if rows > options.mini_batch_size else {}
        kinds: list[tuple[Any, int]] = [
            (CachedInfoNCELoss if cached else InfoNCELoss, 1),
            (CachedWeinceLoss if cached else WeinceLoss, 1),
            (CachedMultipleNegativesRankingLoss if cached else MultipleNegativesRankingLoss, 2),
        ]
        losses = [(kind(encoder, **cached), columns) for kind, columns in kinds]
        times, extras = [], []
        views = [torch.randn(rows, options.width, device=options.device) for _ in range(2)]
        for repetition in range(options.repetitions + 2):
            batch = batch_of(rows, options.device, generator)
            measured = [0.0] * len(losses)
            for index in range(len(losses)) if repetition % 2 else reversed(range(len(losses))):
                loss, columns = losses[index]
                work = partial(step, loss, [dict(batch) for _ in range(columns)])
                measured[index] = seconds(work, options.device)
            times.append(measured)
            alone = [seconds(partial(compare, criterion, views), options.device) / 10 for criterion in criteria]
            extras.append(100 * (alone[1] - alone[0]) / measured[0])
        infonce, *others = zip(*times[2:], strict=True)  # the first two warm up
        cells = []
        for other in others:
            low, middle, high = statistics.quantiles([a / b for a, b in zip(other, infonce, strict=True)], n=4)
            cells.append(f"{middle:.4f} ({low:.4f} to {high:.4f})")
        low, middle, high = statistics.quantiles(extras[2:], n=4)
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(
            f"{rows:6d}{rows / statistics.median(infonce):13.0f}{cells[0]:>28}{cells[1]:>28}{cells[2]:>24}", flush=True
        )


if __name__ == "__main__":
    main()
