"""Standard output of a command: it may be full, closed, or of few characters."""

import contextlib
import io
import os
import sys

NAME = "standard output"
"""What errors call it that name no file."""


def escape_others() -> None:
    """Has characters that standard output lacks, and bytes in names that are none, come as escapes
    in place of an error: what is told of is the work of hours.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # of what is in it already, which whoever writes is told
            sys.stdout.reconfigure(errors="backslashreplace")


def has_character(text: str) -> bool:
    """Whether standard output has these characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def give_up_unwritten() -> None:
    """Lets go of what cannot be written: as it ends, Python would try again, with a traceback and
    an exit code of its own.
    """
    try:
        if sys.stdout is not None:  # it is where it was closed from the beginning
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # what is no file has nothing to give up
            os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
