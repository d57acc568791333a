"""``simcse-weince evaluate``."""

import argparse
import sys
from collections.abc import Sequence

from simcse_weince.commands.shared_options import (
    CommandParser,
    add_encoder_options,
    at_least,
    check_finite,
    check_output,
    load_encoder,
)
from simcse_weince.errors import InputError

# Options of evaluate that say how --pairs are read.
_PAIR_OPTIONS = ("pair_columns", "delimiter", "decimal", "encoding", "skip_bad")


def run(arguments: Sequence[str]) -> None:
    """Evaluate an encoder; print the table and write the JSON."""
    parser = CommandParser(prog="simcse-weince evaluate", description="Score an encoder on graded sentence pairs.")
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the encoder")
    parser.add_argument("--tasks", default=None, help="stsb, sts12 ... sts16, sickr, comma separated, or sts for all")
    parser.add_argument("--split", choices=["train", "dev", "test"], help="split of stsb; default: test")
    parser.add_argument("--data_dir", help="local folder with the STS data; default: the hub")
    parser.add_argument(
        "--pairs",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="own graded pairs (.csv .tsv .txt .jsonl .parquet, also .gz)",
    )
    parser.add_argument("--pair_columns", nargs=3, metavar=("SENTENCE1", "SENTENCE2", "SCORE"))
    parser.add_argument("--delimiter", type=_separator, help="field separator of --pairs; default: by file")
    parser.add_argument("--decimal", choices=[".", ","], help="decimal sign of the scores in --pairs")
    parser.add_argument("--encoding", help="encoding of --pairs; default: utf-8")
    parser.add_argument("--skip_bad", action="store_true", help="leave out and count unusable rows of --pairs")
    parser.add_argument("--protocol", default="all", choices=["all", "mean", "wmean"], help="over parts of a set")
    parser.add_argument("--bootstrap", type=at_least(0), default=1000, help="resamples of the 95 %% intervals; 0: none")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the resamples")
    parser.add_argument("--output", metavar="FILE.json", help="write every figure with its provenance")
    add_encoder_options(parser)
    options = parser.parse(arguments)
    other = ("tasks", "split", "data_dir") if options.pairs else _PAIR_OPTIONS
    for name in other:
        if getattr(options, name):
            relation = "does not go with" if options.pairs else "goes only with"
            raise InputError(f"--{name} {relation} --pairs; leave one of them out")
    read = [*(options.pairs or []), options.data_dir, options.model, options.tokenizer_name]
    check_output(options.output, inputs=read)

    from simcse_weince.sentence.pairs import read_pair_files
    from simcse_weince.sentence.sts import NOT_FINITE, evaluate_model, format_table, load_suite, parse_tasks

    if options.pairs:
        sets = [
            read_pair_files(options.pairs, columns=options.pair_columns, delimiter=options.delimiter,
                            decimal=options.decimal, encoding=options.encoding or "utf-8", skip_bad=options.skip_bad)
        ]  # fmt: skip
    else:
        tasks = parse_tasks(options.tasks) if options.tasks else None
        sets = load_suite(tasks, options.split or "test", options.data_dir, options.cache_dir)
    model = load_encoder(options.model, options)
    results = evaluate_model(model, sets, batch_size=options.batch_size, bootstrap=options.bootstrap, seed=options.seed)
    # Gold scores are finite: the reader refuses others.
    check_finite(options.model, all(task.correlations["all"].reason != NOT_FINITE for task in results.tasks))
    sys.stdout.write(format_table(results, options.protocol) + "\n")
    if options.output:
        from simcse_weince.outputs import shown_name, write_json

        pooling = options.pooler_type or "as stored"
        write_json(options.output, {"model": shown_name(options.model), "pooler_type": pooling, **results.to_json()})


def _separator(text: str) -> str:
    character = text.replace("\\t", "\t")  # what a shell makes of '\t'
    if len(character) != 1 or character in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is not one character that can stand between cells")
    return character
