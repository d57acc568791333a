"""The one exception that a person's input can cause, and the words of others that it quotes."""


class InputError(ValueError):
    """Input that cannot be used: the message is one sentence that names the file, the line and the remedy.

    The command line prints the message alone and exits with code 2; a library user sees an ordinary ``ValueError``.
    """


def first_line(error: BaseException) -> str:
    """What another library says went wrong, without its further lines and full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")
