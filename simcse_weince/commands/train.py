"""``simcse-weince train``."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simcse_weince.sentence.training_run import TrainingResult


def run(arguments: Sequence[str]) -> None:
    """Train as the options say and print the scores before and after."""
    from simcse_weince.sentence.arguments import parse_training_arguments

    groups = parse_training_arguments(arguments, prog="simcse-weince train")
    from simcse_weince.sentence.training_run import train as run_training

    result = run_training(groups)
    training = groups.training
    if training.process_index == 0:
        sys.stdout.write(_training_summary(result, str(training.output_dir)) + "\n")


def _training_summary(result: "TrainingResult", output_dir: str) -> str:
    def points(score: float | None) -> str:
        return "-" if score is None else f"{100 * score:.2f}"

    lines = [f"{result.steps} steps; the encoder is in {output_dir}"]
    if result.test_name:
        lines.append(f"{result.test_name}: {points(result.test_before)} before, {points(result.test_after)} after")
    if result.dev_name:
        lines.append(
            f"{result.dev_name}: {points(result.dev_before)} before, {points(result.dev_best)} at the best step "
            f"({result.best_step}), {points(result.dev_last)} at the last"
        )
    if result.test_name or result.dev_name:
        lines.append("Spearman correlation x 100 of cosines with the graded pairs")
    return "\n".join(lines)
