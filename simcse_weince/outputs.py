"""Files that a run leaves behind: written whole or not at all, and saying with what they were made."""

import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

import simcse_weince
from simcse_weince.errors import InputError

_LIBRARIES = ("torch", "transformers", "sentence-transformers", "datasets", "accelerate", "scipy", "numpy")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends without an error.

    A link stays a link, and its target is replaced. What exists and is no file, such as a pipe or a device, is yielded
    itself: it can be written into but not replaced.

    Raises:
        OSError: It cannot be written; ``filename`` is `path`.
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".writing-{uuid.uuid4().hex}{target.suffix[-8:]}")
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        try:
            mode = temporary.stat().st_mode  # of any new file of this person; safetensors puts a private one there
            yield temporary
            temporary.chmod(mode)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def replacing_files_of(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder, whose content moves into `folder` when the block ends without an error."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        yield temporary
        for source in sorted(temporary.iterdir()):
            destination = Path(folder, source.name)
            if destination.is_dir():
                shutil.rmtree(destination)
            os.replace(source, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all; what UTF-8 lacks, as in a file name of bytes, is escaped."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Write a record, in which every number is finite, whole or not at all."""
    write_text(path, json.dumps(record, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], shape: Any, remedy: str) -> Any:
    """Read a file that a run has left.

    Args:
        path: The file.
        shape: Of its content: a type, a dictionary of the shapes of some names, or a list of the shape of every item.
        remedy: What to do if it cannot be read; ends the message.

    Raises:
        InputError: It cannot be read or is of another shape.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'not JSON'}; {remedy}") from None
    if not has_shape(value, shape):
        raise InputError(f"{path}: not what a run leaves there; {remedy}")
    return value


def has_shape(value: Any, shape: Any) -> bool:
    """Whether a value from JSON or YAML is of a type, such as ``dict[str, Any]``, or of a shape as in `read_json`."""
    kind, inner = get_origin(shape), get_args(shape)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(has_shape(value.get(name), part) for name, part in shape.items())
    if isinstance(shape, list) or kind is list:
        return isinstance(value, list) and all(has_shape(item, (inner or shape)[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and has_shape([*value], [inner[0]]) and has_shape([*value.values()], [inner[1]])
    return shape is Any or isinstance(value, float | int if shape is float else shape)


def shown_name(path: str) -> str:
    """The name alone of a local folder or file, else (an id on the hub) all: so a shared file tells of no machine."""
    return Path(path).resolve().name if Path(path).exists() else path


def shown_names(paths: Sequence[str]) -> list[str]:
    """The `shown_name` of each, those of local folders with as many of their parents as tell them apart."""
    places = [Path(path).resolve() if Path(path).exists() else Path(path) for path in paths]
    names = []
    for path, place in zip(paths, places, strict=True):
        count = 1
        while len({other for other in places if other.parts[-count:] == place.parts[-count:]}) > 1:
            count += 1
        names.append(str(Path(*place.parts[-count:])) if Path(path).exists() else path)
    return names


def shareable(value: Any) -> Any:
    """A copy in which absolute paths are cut to their names, and without the token of the hub."""
    if isinstance(value, Mapping):
        return {name: shareable(item) for name, item in value.items() if name != "hub_token"}
    if isinstance(value, list):
        return [shareable(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the libraries that decide a result."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "simcse-weince": simcse_weince.__version__, **libraries}
