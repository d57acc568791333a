"""The ``simcse-weince`` command: find the command, run it, turn what went wrong into a sentence and an exit code."""

import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import simcse_weince
from simcse_weince.commands import COMMANDS
from simcse_weince.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for input that cannot be used."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that a terminal cannot show must not cost a result
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"simcse-weince {simcse_weince.__version__}\n")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if arguments else 2
    _set_up_logging()
    try:
        if arguments[0] not in COMMANDS:
            raise InputError(f"unknown command {arguments[0]}; choose one of {', '.join(COMMANDS)}")
        import_module(f"simcse_weince.commands.{arguments[0].replace('-', '_')}").run(arguments[1:])
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


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join([
        "usage: simcse-weince COMMAND [options]", "", *lines, "",
        "simcse-weince COMMAND --help lists the options of a command; simcse-weince --version prints the version.", "",
    ])  # fmt: skip


def _set_up_logging() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("simcse_weince").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        # tqdm, which draws every bar of the host libraries, reads this when it is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")


if __name__ == "__main__":
    sys.exit(main())
