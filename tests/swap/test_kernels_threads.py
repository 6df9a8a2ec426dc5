"""Threads of kernels: a team or the pool, and what a forked child has of them."""

import os
import signal
import threading
import warnings
from pathlib import Path

import psutil
import torch

from swap.kernels import sum_of_squares
from swap.processors import stay_in_background
from tests.support.scripts import Script

ROOT = Path(__file__).parents[2]

FORK_FIRST = """
import os, signal, torch
from swap.kernels import sum_of_squares

grad = torch.randn(2_000_000)
(grad + 1).sum()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    sum_of_squares(grad, threads=3)
    os._exit(0)
raise SystemExit(os.waitpid(pid, 0)[1])
"""


def _num_threads() -> int:
    return psutil.Process().num_threads()


def test_thread_in_the_background_gets_no_team_and_the_same_sums() -> None:
    grad = torch.randn(300_000)
    expected = sum_of_squares(grad)
    found: list[float] = []
    started: list[int] = []

    def work() -> None:
        stay_in_background()
        before = _num_threads()
        found.extend(sum_of_squares(grad, threads=threads) for threads in (2, 3, 7))
        started.append(_num_threads() - before)

    for _ in range(2):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    assert found == [expected] * 6
    # The threads of the pool are there since the first one; a team would be the caller's own. What
    # others left may end meanwhile.
    assert started[1] <= 0


def _exit_status_of_child_that_sums(grad: torch.Tensor, expected: float) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is the point
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)  # a child that hangs must not hang the test
            os._exit(0 if sum_of_squares(grad, threads=3) == expected else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1]


def test_kernels_after_fork_start_threads_of_their_own() -> None:
    grad = torch.randn(500_000)
    expected = sum_of_squares(grad, threads=3)
    assert _exit_status_of_child_that_sums(grad, expected) == 0


def test_kernels_after_fork_in_the_midst_of_work_still_run() -> None:
    grad = torch.randn(300_000)
    expected = sum_of_squares(grad)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            sum_of_squares(grad, threads=4)

    busy = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        statuses = [_exit_status_of_child_that_sums(grad, expected) for _ in range(10)]
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert statuses == [0] * 10


def test_first_kernel_may_be_in_a_child_of_a_process_that_has_computed() -> None:
    script = Script(FORK_FIRST)
    _, errors = script.end()
    assert script.returncode == 0, errors
