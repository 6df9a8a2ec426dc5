"""What an interrupt must not cut in two."""

from __future__ import annotations

from collections.abc import Callable

import torch

from aio.errors import let_go
from aio.process.threads import Thread, begun, join_thread, start_thread
from swap.processors import stay_in_background


def run_apart(action: Callable[[], None], name: str) -> None:
    """Run ``action`` on a thread of its own and wait for its end.

    Handlers of signals run in the main thread alone. So an interrupt may be raised here before the
    action has begun or after it has ended, and nowhere in between. Raises what ``action`` raises,
    and ``AioError`` where there is no thread to be had; nothing is done then.
    """
    # With a place for what it raises, which may be that there is no memory.
    outcome: list[BaseException | None] = [MemoryError(f"the thread {name} did not end its work")]

    def run() -> None:
        try:
            begun()
            stay_in_background()
            with torch.no_grad():
                action()
            outcome[0] = None
        except BaseException as failure:  # raised where it is waited for
            outcome[0] = failure
            let_go(failure)

    thread = Thread(run, name, tells=True)
    try:
        start_thread(thread)
        join_thread(thread)
    except BaseException:
        # Not in a function of its own: where two signals come at once, what the handler of the
        # second raises comes up at the very next call, and that has to be within the inner block.
        while True:
            try:
                join_thread(thread)
                break
            except BaseException:  # there is one interrupt on its way, which says so
                pass
        raise
    if outcome[0] is not None:
        raise outcome[0]
