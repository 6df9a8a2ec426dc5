"""Programs from their beginning to their end, each of their lives in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import at their first step, in each process
import torch._functorch

from soaking.judging import Counts, Judge
from soaking.lives import live, tidy, told_to, undisturbed
from soaking.offloaded import Place, Tell
from soaking.programs import MOST_LIVES, Task, life_of, task_of

_PATIENCE_SECONDS = 120.0
"""Without a word from a process: it hangs, where it could not tell by itself."""


@dataclass(frozen=True, slots=True)
class End:
    """Of a process: what it said, and how it ended; a negative status is a signal."""

    said: list[list[Any]]
    status: int
    is_hang: bool


def forked(work: Callable[[Tell], None]) -> End:
    """A process that does `work`. The caller has computed nothing and has no threads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work_and_end(work, writer)
    os.close(writer)
    raw, is_hang = bytearray(), False
    while True:
        if not select.select([reader], [], [], _PATIENCE_SECONDS)[0]:
            is_hang = True
            os.kill(child, signal.SIGKILL)
        part = os.read(reader, 1 << 16)
        if not part:
            break
        raw += part

    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    whole = raw[: raw.rfind(b"\n") + 1].splitlines()
    return End([json.loads(line) for line in whole], status, is_hang)


def _work_and_end(work: Callable[[Tell], None], writer: int) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        work(told_to(writer))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Program:
    """One program: its task, and the place where it lives."""

    def __init__(self, seed: int, number: int, top: Path, counts: Counts) -> None:
        self.task: Task = task_of(seed, number)
        self._place = Place.make(top, 1 + number % 2)
        self._counts = counts

    def run(self) -> list[str]:
        """All lives; what did not hold, after which there are no more."""
        self._counts.programs += 1
        end = forked(partial(undisturbed, self.task, self._place))
        if wrong := _ended_badly(end, may_be_killed=False):
            return [f"the undisturbed run {wrong}"]
        judge = Judge(self.task, end.said[0][1], self._counts)
        for number in range(MOST_LIVES + 1):
            life = life_of(self.task, number)
            end = forked(partial(live, self.task, life, self._place))
            self._count(end)
            if wrong := self._wrong(judge, end, may_be_killed=life.kill is not None):
                return [f"life {number}: {wrong}", str(life)]
            if judge.is_complete:
                break
        else:
            return ["the last life has not come to the end"]
        end = forked(partial(tidy, self.task, self._place))
        wrong = self._wrong(judge, end, may_be_killed=False)
        return [f"at the end: {wrong}"] if wrong else []

    def _count(self, end: End) -> None:
        self._counts.lives += 1
        self._counts.kills += end.status == -signal.SIGKILL and not end.is_hang

    def _wrong(self, judge: Judge, end: End, *, may_be_killed: bool) -> str:
        ended = _ended_badly(end, may_be_killed=may_be_killed)
        return "; ".join([*judge.faults(end.said), *([ended] if ended else [])])


def _ended_badly(end: End, *, may_be_killed: bool) -> str:
    if end.is_hang:
        return f"hangs, after {end.said[-1:]}"
    if end.status == 0 or (may_be_killed and end.status == -signal.SIGKILL):
        return ""
    return f"ended with status {end.status}, after {end.said[-1:]}"
