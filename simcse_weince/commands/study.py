"""``simcse-weince study``."""

import argparse
from collections.abc import Sequence
from typing import Any

from simcse_weince.commands.shared_options import CommandParser, at_least
from simcse_weince.errors import InputError


def run(arguments: Sequence[str]) -> None:
    """Run what a study still lacks."""
    parser = CommandParser(
        prog="simcse-weince study", description="Compare losses over seeds: run what is missing of STUDY.yaml."
    )
    parser.add_argument("study", metavar="STUDY.yaml", help="arms, seeds and settings; see scripts/studies")
    parser.add_argument("--output_dir", metavar="DIR", help="folder of the records; default: the one in the file")
    parser.add_argument("--set", nargs="+", action="extend", type=_assignment, default=[], metavar="NAME=VALUE",
                        help="options of every run, as train_file=FILE, instead of those in the file")  # fmt: skip
    parser.add_argument("--parallel", type=at_least(1), default=1, help="runs at a time, which share the devices")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="this one of N machines")
    parser.add_argument(
        "--keep_models", action="store_true", help="keep the encoders that are reported, not only their scores"
    )
    options = parser.parse(arguments)
    names = [name for name, _ in options.set]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--set: {twice[0]} is given twice; leave one of them out")

    from simcse_weince.study.plan import read_study

    study = read_study(options.study, output_dir=options.output_dir, options=dict(options.set))

    from simcse_weince.study.runner import run_study

    run_study(study, parallel=options.parallel, shard=options.shard, keep_models=options.keep_models)


def _assignment(text: str) -> tuple[str, Any]:
    import yaml

    from simcse_weince.study.plan import load_yaml

    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    try:
        return name, load_yaml(value)
    except (yaml.YAMLError, ValueError):
        raise argparse.ArgumentTypeError(f"{text} holds no value that YAML can read; quote it") from None


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N, such as 1/4 for the first of four machines")
    return int(number), int(count)
