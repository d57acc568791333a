"""``simcse-weince vision-eval``."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from simcse_weince.commands.shared_options import check_output, chosen_device
from simcse_weince.errors import InputError


def run(arguments: Sequence[str]) -> None:
    """Score the frozen features of an image encoder; print the scores, write the JSON and the features.

    The options of its training, which are in the folder of the encoder, are the defaults of this command.
    """
    from simcse_weince.configuration import parse_groups
    from simcse_weince.run_folder import saved_options
    from simcse_weince.vision.arguments import EvaluationArguments, ImageArguments
    from simcse_weince.vision.probe import ProbeOptions

    if not arguments or not arguments[0] or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise InputError("name the encoder first: vision-eval MODEL --images SOURCE")
    model = arguments[0]
    groups = (ImageArguments, ProbeOptions, EvaluationArguments)
    given = arguments if model in ("-h", "--help") else arguments[1:]
    prog, usage = "simcse-weince vision-eval", "%(prog)s MODEL --images SOURCE [options]"
    images, probes, options, chosen = parse_groups(groups, given, prog, usage, saved_options(model))
    normalize = images.view_options().normalize
    check_output(options.output, inputs=[images.images, model])
    check_output(options.features and f"{options.features}/train_features.npy", "--features")
    device = chosen_device(options.device)

    from simcse_weince.outputs import shown_name, versions, write_json
    from simcse_weince.vision.backbones import VisionEncoder
    from simcse_weince.vision.training_run import load_labelled, score

    bank, test = load_labelled(images)
    encoder = VisionEncoder.from_pretrained(model, image_size=images.image_size).to(device)
    record = score(encoder, bank, test, probes, normalize, options.batch_size, options.features)
    sys.stdout.write(format_scores(record["scores"]))
    if options.output:
        record = {"model": shown_name(model), "versions": versions(), "arguments": chosen, **record}
        write_json(options.output, record)


def format_scores(scores: Mapping[str, Any]) -> str:
    """Each probe with its protocol, the number of images and its scores in per cent."""
    lines = []
    for probe, record in scores.items():
        count = record["images"]
        lines.append(f"{probe}: {record['protocol']}; {len(record['seeds'])} seeds")
        lines.append(f"  {count['train']} training, {count['validation']} validation and {count['test']} test images")
        for name, summary in record["scores"].items():
            spread = "" if summary["sd"] is None else f" (sd {100 * summary['sd']:.2f})"
            lines.append(f"  {name.replace('_', ' '):26}{100 * summary['mean']:6.2f}{spread}")
    return "".join(f"{line}\n" for line in lines)
