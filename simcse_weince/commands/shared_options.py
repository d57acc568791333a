"""What the commands share: the parser, the options of an encoder, and the check that an output can be written."""

import argparse
import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from simcse_weince.errors import InputError, refuse_empty

if TYPE_CHECKING:
    import torch

    from simcse_weince.sentence.encoder import SimCSEEncoder


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, and that takes ``--data-dir`` for ``--data_dir``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message into an `InputError`."""
        raise InputError(f"{message.replace('argument --', '--', 1)}; see {self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``, in which hyphens may stand for the underscores of option names."""

        def underscored(word: str) -> str:
            name, equals, value = word.partition("=")
            return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word

        options = self.parse_args([underscored(word) for word in arguments])
        refuse_empty(self, options)
        return options


def at_least(smallest: int) -> Callable[[str], int]:
    """An argparse type: a whole number from ``smallest``."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        if value >= 2**63:  # no library that takes it holds more
            raise argparse.ArgumentTypeError(f"{value} is too large")
        return value

    return number


def check_output(output: str | None, option: str = "--output", inputs: Iterable[str | None] = ()) -> None:
    """Find out before the work, not after it, that its result cannot be written, or would replace a part of `inputs`.

    In a folder that is read, a new file may be written, and a result anew.
    """
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
        if path.is_file() and any(name and _is_part(path, Path(name)) for name in inputs):
            raise InputError(f"{output}: {option} would replace what is read; name another file")
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{output}: {option} cannot be written there ({reason}); name a file in a folder of yours"
        ) from None


def _is_part(path: Path, source: Path) -> bool:
    """Whether a file is one that is read, or in a folder that is read and no result that a command has written."""
    if not source.is_dir():
        return source.exists() and path.samefile(source)
    folder, target = Path(os.path.realpath(source)), Path(os.path.realpath(path))
    link = Path(os.path.realpath(path.parent), path.name)
    return (folder in target.parents or folder in link.parents) and not _is_result(path)


def _is_result(path: Path) -> bool:
    """Whether a file is empty or, by its content, written by a command: an array, page, figure or record."""
    with path.open("rb") as file:
        start = file.read(1000)
    if not start.startswith(b"{"):
        return not start or start.startswith((b"\x93NUMPY", b"<!doctype html>")) or b"Matplotlib" in start
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return False
    return path.name != "run.json" and not record.keys().isdisjoint(("versions", "made_with"))


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str | None] = ()) -> None:
    """`check_output` for several, by their options, which must not replace one another either."""
    places: dict[str, str] = {}
    inputs = [*inputs]
    for option, output in outputs.items():
        check_output(output, option, inputs)
        if output is None or (Path(output).exists() and not Path(output).is_file()):
            continue
        if (other := places.setdefault(os.path.realpath(output), option)) != option:
            raise InputError(f"{output}: {other} and {option} would be one file; name another for one of them")


def check_installed(module: str, remedy: str) -> None:
    """Find out before the work that something is missing which only some of it needs."""
    if find_spec(module) is None:
        raise InputError(f"{module} is not installed; pip install '{remedy}'")


def add_encoder_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a sentence encoder is loaded and run."""
    parser.add_argument("--pooler_type", choices=["cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last"],
                        help="pooling instead of the one that the model stores")  # fmt: skip
    parser.add_argument("--tokenizer_name", help="another tokenizer than the model's own")
    parser.add_argument("--batch_size", type=at_least(1), default=128, help="sentences encoded at a time")
    parser.add_argument("--model_revision", help="branch, tag or commit on the hub")
    parser.add_argument("--torch_dtype", help="type of the weights, for example bfloat16; default: as stored")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: the first GPU if there is one")
    parser.add_argument("--cache_dir", help="where downloads are kept; default: the Hugging Face cache")
    parser.add_argument("--trust_remote_code", action="store_true", help="allow model code from the hub to run")


def load_encoder(model: str, options: argparse.Namespace) -> "SimCSEEncoder":
    """Load an encoder as the options of :func:`add_encoder_options` say."""
    from simcse_weince.sentence.encoder import build_encoder

    names = ("pooler_type", "tokenizer_name", "torch_dtype", "device", "cache_dir", "model_revision",
             "trust_remote_code")  # fmt: skip
    return build_encoder(model, **{name: getattr(options, name) for name in names})


def chosen_device(device: str | None) -> "torch.device":
    """The device that ``--device`` names, or the first accelerator if there is one, tried out."""
    import torch

    try:
        chosen = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device} cannot be used; leave it out or say cpu") from error
    return chosen


def check_finite(model: str, finite: bool) -> None:
    """Refuse an encoder some of whose embeddings are not finite: its scores would mean nothing."""
    if not finite:
        raise InputError(
            f"{model}: an embedding is not finite; use another model if its weights are damaged, or --torch_dtype "
            "float32 if their type is too narrow"
        )
