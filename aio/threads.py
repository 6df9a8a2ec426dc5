"""Starting threads, the error where the machine has none to give, and logging on them."""

import contextlib
import errno
import threading
from collections.abc import Callable

from aio.errors import AioError


def start_thread(thread: threading.Thread) -> None:
    """Starts `thread`, which its owner has recorded already.

    So an interrupt while it starts leaves its owner able to end it, whether or not it runs. Raises
    AioError (EAGAIN) when the process may have no more threads; nothing was started then.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if thread.ident is not None:
            raise
        raise AioError(
            f"cannot start the thread {thread.name}: {error}; the process or its user has as many"
            " threads as it may have: raise RLIMIT_NPROC (ulimit -u) or pids.max of its cgroup, or"
            " use fewer workers",
            errno=errno.EAGAIN,
        ) from error


def join_thread(thread: threading.Thread) -> None:
    """Waits for the end of `thread`; at once if it was never started."""
    if thread.ident is not None:
        thread.join()


def say(log: Callable[..., None], *args: object) -> None:
    """Logs on a thread that others wait for, which must not end with a logging handler.

    What a handler or a filter raises goes to `threading.excepthook`, which prints it; on the main
    thread, for which nobody waits, it is raised as usual.
    """
    try:
        log(*args)
    except BaseException as error:
        thread = threading.current_thread()
        if thread is threading.main_thread():
            raise
        with contextlib.suppress(BaseException):  # the hook is the program's own as well
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
            )
