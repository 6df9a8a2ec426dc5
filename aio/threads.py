"""Starting threads, and the error where the machine has none to give."""

import errno
import threading

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
