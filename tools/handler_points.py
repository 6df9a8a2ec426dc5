"""Where Python may run a signal handler: for whoever interrupts at a line of its choice."""

from __future__ import annotations

import dis
from types import FrameType


def runs_handler(frame: FrameType) -> bool:
    """Whether a handler may run in front of the line that `frame` is about to begin.

    Not where a ``with`` is about to call ``__exit__`` because its block has come to its end, and
    not where an ``except`` begins or lets go of its exception: of Python's instructions these are
    none behind which a handler runs. What is raised there all the same leaves the block without its
    ``__exit__``, or the thread with an exception that it handles for ever, and with all that the
    frames of it hold.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    # The first also for a block that an exception leaves.
    if dis.opname[code[at]] in ("PUSH_EXC_INFO", "POP_EXCEPT"):
        return False
    if dis.opname[code[at]] == "SWAP":  # what the block returns
        at += 2
    return any(dis.opname[code[i]] != "LOAD_CONST" for i in range(at, min(at + 6, len(code)), 2))
