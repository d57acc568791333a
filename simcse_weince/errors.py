"""The one exception that a person's input can cause."""


class InputError(ValueError):
    """Input that cannot be used: the message is one sentence that names the file, the line and the remedy.

    The command line prints the message alone and exits with code 2; a library user sees an ordinary ``ValueError``.
    """
