"""The one exception that a person's input can cause, the words of others that it quotes, and what is not there."""

import argparse
from importlib import import_module
from typing import Any


class InputError(ValueError):
    """Input that cannot be used: the message is one sentence that names the file, the line and the remedy.

    The command line prints the message alone and exits with code 2; a library user sees an ordinary ``ValueError``.
    """


def import_extra(module: str, extra: str, need: str) -> Any:
    """Import a package of an extra of this one.

    Raises:
        InputError: It is not installed; ``need`` says what for.
    """
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"{need}; pip install 'simcse-weince[{extra}]'") from None


def refuse_empty(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse an empty word, as of a shell variable that is not set: it would count as an option that is left out.

    Raises:
        InputError: An option or argument is empty; names it.
    """
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if value != action.default and (value == "" or (isinstance(value, list) and "" in value)):
            name = action.option_strings[0] if action.option_strings else action.metavar
            raise InputError(f"{name} is empty; give it a value, or leave it out")


def first_line(error: BaseException) -> str:
    """What another library says went wrong, without its further lines and full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")
