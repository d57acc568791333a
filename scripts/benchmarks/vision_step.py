"""Time of a training step of the ResNet-18 recipe: the share of the views, and WEINCE against InfoNCE.

    python scripts/benchmarks/vision_step.py

Every repetition times one step with each criterion, one after the other, on the same views, so that whatever else the
machine does hits them alike; printed are medians and quartiles of the ratios. Steps scatter by more than the criteria
differ, so the criteria are also timed alone, on the projections of such a step, and their difference is given as a
share of the step. A GPU is used if there is one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from simcse_weince import InfoNCE, Weince
from simcse_weince.vision import TwoViews, ViewOptions, VisionEncoder, build_backbone


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--image_size", type=int, default=32)
    parser.add_argument("--width", type=float, default=1.0, help="factor on the channels, 0.25 for a CPU")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    backbone = build_backbone("resnet18", image_size=options.image_size, width=options.width)
    encoder = VisionEncoder(backbone, options.image_size).to(device)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-4, weight_decay=0.0)
    make_views = TwoViews(ViewOptions(), options.image_size)
    shape = (options.batch_size, 3, options.image_size, options.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    criteria = {"InfoNCE": InfoNCE(0.5, layout="both_views"), "WEINCE": Weince(0.5, layout="both_views")}

    def step(views: tuple[Tensor, Tensor], criterion: torch.nn.Module) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            projections = encoder(torch.cat(views))
        optimizer.zero_grad()
        criterion(*projections.chunk(2)).backward()
        optimizer.step()

    def seconds(call: Callable[[], object]) -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize()
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    def compare(projections: tuple[Tensor, Tensor], criterion: torch.nn.Module) -> None:
        for _ in range(10):
            criterion(*(projection.detach().requires_grad_() for projection in projections)).backward()

    shares, ratios, lengths, extras = [], [], [], []
    with torch.no_grad():
        projections = encoder(torch.cat(make_views(images))).float().chunk(2)
    for repetition in range(options.repetitions + 2):
        views = seconds(partial(make_views, images))
        pair = make_views(images)
        order = list(criteria.items())[:: 1 if repetition % 2 else -1]
        times = {name: seconds(partial(step, pair, criterion)) for name, criterion in order}
        if repetition >= 2:  # the first ones warm up
            shares.append(views / (views + times["InfoNCE"]))
            ratios.append((views + times["WEINCE"]) / (views + times["InfoNCE"]))
            lengths.append(views + times["InfoNCE"])
            alone = {name: seconds(partial(compare, projections, criterion)) / 10 for name, criterion in order}
            extras.append((alone["WEINCE"] - alone["InfoNCE"]) / lengths[-1])
    print(f"{device}, batch {options.batch_size}, width {options.width:g}, {options.repetitions} repetitions")
    for name, values in (("views, share of the step", shares), ("step of WEINCE / step of InfoNCE", ratios),
                         ("WEINCE less InfoNCE alone / step", extras), ("step of InfoNCE, s", lengths)):  # fmt: skip
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:34}{middle:8.4f}   quartiles {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
