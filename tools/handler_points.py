"""Where Python may run a signal handler: for whoever interrupts at a line of its choice."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FrameType


def runs_handler(frame: FrameType) -> bool:
    """Whether a handler may run in front of the line that `frame` is about to begin.

    Not where a ``with`` is about to call ``__exit__``, or a ``finally`` begins, because its block
    has come to its end, and not where an ``except`` begins or lets go of its exception: of Python's
    instructions these are none behind which a handler runs. What is raised there all the same
    leaves the block without its ``__exit__`` or ``finally``, or the thread with an exception that
    it handles for ever, and with all that the frames of it hold.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if _has_left_a_block(frame.f_code, at):
        return False
    # The first also for a block that an exception leaves.
    if dis.opname[code[at]] in ("PUSH_EXC_INFO", "POP_EXCEPT"):
        return False
    if dis.opname[code[at]] == "SWAP":  # what the block returns
        at += 2
    return any(dis.opname[code[i]] != "LOAD_CONST" for i in range(at, min(at + 6, len(code)), 2))


def _has_left_a_block(code: CodeType, at: int) -> bool:
    """Whether the instruction before is the last one of a block that others catch errors of: what a
    handler raises behind it is raised by it, within the block.
    """
    before = at - 2
    while before > 0 and dis.opname[code.co_code[before]] == "CACHE":
        before -= 2
    within = catcher(code, before) if before >= 0 else None
    return within is not None and within != catcher(code, at)


@cache
def catcher(code: CodeType, at: int) -> int | None:
    """Where an exception goes that comes up at an instruction; None where it leaves the function.

    The table has numbers of 6 bits a byte, the highest first; where 0x40 is set the number goes on.
    Four of them are a range of code, its start, length and target in units of two bytes, and the
    stack there.
    """
    numbers: list[int] = []
    number = 0
    for byte in code.co_exceptiontable:
        number = number << 6 | byte & 0x3F
        if not byte & 0x40:  # else there is more of it
            numbers.append(number)
            number = 0
    for first in range(0, len(numbers), 4):
        start, length, target = numbers[first : first + 3]
        if 2 * start <= at < 2 * (start + length):
            return 2 * target
    return None
