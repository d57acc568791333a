"""``simcse-weince vision-train``."""

import sys
from collections.abc import Sequence

from simcse_weince.commands.vision_eval import format_scores


def run(arguments: Sequence[str]) -> None:
    """Train an image encoder as the options say and print the scores of its frozen features."""
    from simcse_weince.vision.arguments import parse_vision_arguments

    groups = parse_vision_arguments(arguments, prog="simcse-weince vision-train")
    from simcse_weince.vision.training_run import train

    record = train(groups)
    if record:
        sys.stdout.write(f"{record['steps']} steps; the encoder is in {groups.training.output_dir}\n")
        sys.stdout.write(format_scores(record["scores"]))
