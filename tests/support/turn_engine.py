"""A late engine without threads of its own: whoever carries a transfer out does it himself.

So it can be run by ``turns``, which decide who goes on: nothing waits for what they do not know.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import numpy as np

from aio import Engine, Request
from tests.support.late_engine import GARBAGE, Faults, LateEngine


class TurnEngine(LateEngine):
    """Takes the place of ``aio.Engine`` under ``swap``, as ``LateEngine``.

    ``files`` opens files and moves nothing. It is made, and closed, where no threads take turns.
    """

    def __init__(self, lanes: int, files: Engine, *, seed: int, faults: Faults) -> None:
        with patch("tests.support.late_engine.Engine", lambda *_, **__: files):
            super().__init__(lanes, seed=seed, faults=faults)

    def transfer(self, request: Request, *, failing: bool) -> None:
        given: Any = request.buffer
        memory: Any = np.frombuffer(given, dtype=np.uint8)
        file = request.file._fd
        if request.kind == "write":
            data: Any = np.full_like(memory, GARBAGE) if failing else memory
            assert os.pwrite(file, data, request.offset) == memory.nbytes
        elif failing:
            memory[:] = GARBAGE
        else:
            found = os.preadv(file, [memory], request.offset)
            memory[found:] = 0

    def close(self) -> None:
        self.carry_out_all()
