"""Image encoders trained on 10,000 CIFAR-10 images: every loss with every seed against random weights, mean and spread.

    python scripts/benchmarks/vision_cifar.py --images ../shared/data/images/cifar10_sample.npz

ResNet-18 at a quarter of its width, 20 epochs of batch 256, the recipe of the paper otherwise. Scores are of all test
images on frozen features, those of the last step: nothing is selected. Finished runs are not repeated, and stopped ones
go on where they stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SCORES = ("knn_test_accuracy", "knn_test_recall_at_1", "linear_test_accuracy")


def train(options: argparse.Namespace, loss: str, seed: int) -> dict[str, float]:
    """Scores and seconds of an epoch of one run."""
    folder = options.output_dir / f"{loss}-{options.width}-{options.epochs}-{seed}"
    if not (folder / "run.json").is_file():
        command = [
            sys.executable, "-m", "simcse_weince.cli", "vision-train", "--images", options.images, "--loss", loss,
            "--seed", str(seed), "--model_name_or_path", "resnet18", "--width", str(options.width),
            "--num_train_epochs", str(options.epochs), "--eval_strategy", "no", "--output_dir", str(folder),
            "--resume_from_checkpoint", "last",
        ]  # fmt: skip
        subprocess.run(command, check=True, env={"HF_HUB_OFFLINE": "1", **os.environ}, stdout=subprocess.DEVNULL)
    seconds = json.loads((folder / "train_results.json").read_text())["train_runtime"]
    result = json.loads((folder / "run.json").read_text())["result"]
    print(f"{folder.name}: {seconds / options.epochs:.0f} s an epoch", flush=True)
    return {**{name: result[name] for name in SCORES}, "seconds": seconds / options.epochs}


def untrained(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Scores of the encoder with which a run of this seed starts."""
    from transformers import set_seed

    from simcse_weince.vision import VisionEncoder, build_backbone, load_images
    from simcse_weince.vision.probe import ProbeOptions
    from simcse_weince.vision.training_run import score

    bank, test = (load_images(options.images, split) for split in ("train", "test"))
    size = bank.images.shape[-1]
    set_seed(seed)
    encoder = VisionEncoder(build_backbone("resnet18", image_size=size, width=options.width), size)
    result = score(encoder, bank, test, ProbeOptions())["result"]
    return {name: result[name] for name in SCORES}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/vision_cifar"))
    parser.add_argument("--losses", nargs="+", default=["infonce", "weince", "released"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 21])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=float, default=0.25)
    options = parser.parse_args()
    rows = {"untrained": [untrained(options, seed) for seed in options.seeds]}
    for loss in options.losses:
        rows[loss] = [train(options, loss, seed) for seed in options.seeds]

    print(f"\nCIFAR-10 sample, ResNet-18 at width {options.width:g}, {options.epochs} epochs, seeds {options.seeds}")
    print("mean, standard deviation and each seed, in per cent of all test images")
    for name in SCORES:
        print(name.replace("_", " "))
        for loss, runs in rows.items():
            values = [100 * run[name] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            each = " ".join(f"{value:.2f}" for value in values)
            print(f"  {loss:10}{statistics.mean(values):8.2f}{spread:7.2f}   {each}")


if __name__ == "__main__":
    main()
