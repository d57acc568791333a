"""The ``simcse-weince`` command: parse, call, print."""

import argparse
import errno
import io
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import simcse_weince
from simcse_weince.errors import InputError

if TYPE_CHECKING:
    from simcse_weince.sentence.encoder import SimCSEEncoder
    from simcse_weince.sentence.training_run import TrainingResult

_OVERVIEW = """usage: simcse-weince COMMAND [options]

  train     train a sentence encoder on sentences (or pairs) without labels
  evaluate  score an encoder on STS-Benchmark, the SimCSE suite, or your own graded pairs
  encode    turn a file of sentences into an array of embeddings

simcse-weince COMMAND --help lists the options of a command; simcse-weince --version prints the version."""

# Options of evaluate that say how --pairs are read.
_PAIR_OPTIONS = ("pair_columns", "delimiter", "decimal", "encoding", "skip_bad")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, and that takes ``--data-dir`` for ``--data_dir``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.replace('argument --', '--', 1)}; see {self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        def underscored(word: str) -> str:
            name, equals, value = word.partition("=")
            return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word

        return self.parse_args([underscored(word) for word in arguments])


def _at_least(smallest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    return number


def _separator(text: str) -> str:
    character = text.replace("\\t", "\t")  # what a shell makes of '\t'
    if len(character) != 1 or character in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is not one character that can stand between cells")
    return character


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for input that cannot be used."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"train": train, "evaluate": evaluate, "encode": encode}
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"simcse-weince {simcse_weince.__version__}\n")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_OVERVIEW + "\n")
        return 0 if arguments else 2
    _set_up_logging()
    try:
        if arguments[0] not in commands:
            raise InputError(f"unknown command {arguments[0]}; choose train, evaluate or encode")
        commands[arguments[0]](arguments[1:])
    except InputError as error:
        sys.stderr.write(f"simcse-weince: error: {error}\n")
        return 2
    except OSError as error:  # a full disk, a folder of somebody else: nothing that a traceback would explain
        place = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"simcse-weince: error: {place}{error.strerror or error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("simcse-weince: interrupted\n")
        return 130
    return 0


def train(arguments: Sequence[str]) -> None:
    """Train as the options say and print the scores before and after."""
    from simcse_weince.sentence.arguments import parse_training_arguments

    groups = parse_training_arguments(arguments, prog="simcse-weince train")
    from simcse_weince.sentence.training_run import train as run

    result = run(groups)
    training = groups[-1]
    if training.process_index == 0:
        sys.stdout.write(_training_summary(result, str(training.output_dir)) + "\n")


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate an encoder; print the table and write the JSON."""
    parser = _Parser(prog="simcse-weince evaluate", description="Score an encoder on graded sentence pairs.")
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the encoder")
    parser.add_argument("--tasks", default=None, help="stsb, sts12 ... sts16, sickr, comma separated, or sts for all")
    parser.add_argument("--split", choices=["train", "dev", "test"], help="split of stsb; default: test")
    parser.add_argument("--data_dir", help="local folder with the STS data; default: the hub")
    parser.add_argument(
        "--pairs", nargs="+", metavar="FILE", help="own graded pairs (.csv .tsv .txt .jsonl .parquet, also .gz)"
    )
    parser.add_argument("--pair_columns", nargs=3, metavar=("SENTENCE1", "SENTENCE2", "SCORE"))
    parser.add_argument("--delimiter", type=_separator, help="field separator of --pairs; default: by file")
    parser.add_argument("--decimal", choices=[".", ","], help="decimal sign of the scores in --pairs")
    parser.add_argument("--encoding", help="encoding of --pairs; default: utf-8")
    parser.add_argument("--skip_bad", action="store_true", help="leave out and count unusable rows of --pairs")
    parser.add_argument("--protocol", default="all", choices=["all", "mean", "wmean"], help="over parts of a set")
    parser.add_argument(
        "--bootstrap", type=_at_least(0), default=1000, help="resamples of the 95 %% intervals; 0: none"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="seed of the resamples")
    parser.add_argument("--output", metavar="FILE.json", help="write every figure with its provenance")
    _add_encoder_options(parser)
    options = parser.parse(arguments)
    other = ("tasks", "split", "data_dir") if options.pairs else _PAIR_OPTIONS
    for name in other:
        if getattr(options, name):
            relation = "does not go with" if options.pairs else "goes only with"
            raise InputError(f"--{name} {relation} --pairs; leave one of them out")
    _check_output(options.output)

    from simcse_weince.sentence.pairs import read_pair_files
    from simcse_weince.sentence.sts import evaluate_model, format_table, load_suite, parse_tasks

    if options.pairs:
        sets = [
            read_pair_files(options.pairs, columns=options.pair_columns, delimiter=options.delimiter,
                            decimal=options.decimal, encoding=options.encoding or "utf-8", skip_bad=options.skip_bad)
        ]  # fmt: skip
    else:
        tasks = parse_tasks(options.tasks) if options.tasks else None
        sets = load_suite(tasks, options.split or "test", options.data_dir, options.cache_dir)
    model = _load_encoder(options)
    results = evaluate_model(model, sets, batch_size=options.batch_size, bootstrap=options.bootstrap, seed=options.seed)
    sys.stdout.write(format_table(results, options.protocol) + "\n")
    if options.output:
        from simcse_weince.outputs import write_text

        # The name alone of a local folder: a shared file tells nothing about this machine.
        name = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
        record = {"model": name, "pooler_type": options.pooler_type or "as stored", **results.to_json()}
        write_text(options.output, json.dumps(record, indent=2, allow_nan=False) + "\n")


def encode(arguments: Sequence[str]) -> None:
    """Encode the sentences of a file, in their order, into a .npy array of shape (sentences, d), float32."""
    parser = _Parser(prog="simcse-weince encode", description="Turn sentences into an array of embeddings.")
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the encoder")
    parser.add_argument("input", metavar="INPUT", help="sentences: .txt .csv .tsv .jsonl .parquet, also .gz")
    parser.add_argument("--output", metavar="FILE.npy", required=True, help="where the array goes")
    parser.add_argument("--text_column", help="column of the sentences in a table")
    parser.add_argument("--encoding", default="utf-8", help="encoding of INPUT")
    parser.add_argument("--normalize", action="store_true", help="scale every embedding to length 1")
    _add_encoder_options(parser)
    options = parser.parse(arguments)
    _check_output(options.output)

    import numpy as np

    from simcse_weince.outputs import replacing
    from simcse_weince.sentence.corpus import read_corpus

    # Blank lines are kept: row i of the array is line i of the file.
    corpus = read_corpus(options.input, text_columns=options.text_column, encoding=options.encoding, keep_blank=True,
                         one_column=True, max_characters=None, cache_dir=options.cache_dir)  # fmt: skip
    model = _load_encoder(options)
    column = corpus.dataset.column_names[0]
    vectors = model.encode(
        list(corpus.dataset[column]),
        batch_size=options.batch_size,
        normalize_embeddings=options.normalize,
        show_progress_bar=sys.stderr.isatty(),
    )
    if not (finite := np.isfinite(vectors).all(axis=1)).all():
        raise InputError(
            f"{options.input}: sentence {1 + int(np.argmin(finite))}: its embedding is not finite; nothing was "
            "written; the model's weights are damaged or --torch_dtype is too narrow"
        )
    array = io.BytesIO()  # a pipe takes bytes, but no array: NumPy asks a file for its position
    np.save(array, np.asarray(vectors, dtype=np.float32), allow_pickle=False)
    with replacing(options.output) as temporary:
        temporary.write_bytes(array.getbuffer())
    sys.stdout.write(f"{vectors.shape[0]} embeddings of width {vectors.shape[1]} in {options.output}\n")


def _check_output(output: str | None) -> None:
    """Find out before the work, not after it, that its result cannot be written."""
    if output is None:
        return
    path = Path(output)
    folder = Path(os.path.realpath(path)).parent
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists() or path.is_file():
            tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{output}: --output cannot be written there ({reason}); name a file in a folder of yours"
        ) from None


def _add_encoder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pooler_type", choices=["cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last"],
                        help="pooling instead of the one that the model stores")  # fmt: skip
    parser.add_argument("--tokenizer_name", help="another tokenizer than the model's own")
    parser.add_argument("--batch_size", type=_at_least(1), default=128, help="sentences encoded at a time")
    parser.add_argument("--torch_dtype", help="type of the weights, for example bfloat16; default: as stored")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: the first GPU if there is one")
    parser.add_argument("--cache_dir", help="where downloads are kept; default: the Hugging Face cache")
    parser.add_argument("--trust_remote_code", action="store_true", help="allow model code from the hub to run")


def _load_encoder(options: argparse.Namespace) -> "SimCSEEncoder":
    from simcse_weince.sentence.encoder import build_encoder

    return build_encoder(
        options.model,
        pooler_type=options.pooler_type,
        tokenizer_name=options.tokenizer_name,
        torch_dtype=options.torch_dtype,
        cache_dir=options.cache_dir,
        trust_remote_code=options.trust_remote_code,
        device=options.device,
    )


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


def _set_up_logging() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("simcse_weince").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        # tqdm, which draws every bar of the host libraries, reads this when it is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")


if __name__ == "__main__":
    sys.exit(main())
