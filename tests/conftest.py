"""Skips what this machine cannot run, each time with the reason."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from aio.process import unasked

pytest_plugins = ["tests.support.skips", "tests.support.counts", "tests.support.parts"]

# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("test", deadline=None, max_examples=25)
settings.register_profile("proof", deadline=None, max_examples=200)
settings.load_profile("test")  # --hypothesis-profile=proof comes after it


@pytest.fixture(autouse=True)
def no_errors_of_others() -> Iterator[None]:
    """What a test left without asking for its result is told in that test."""
    yield
    unasked.tell()


@pytest.fixture(autouse=True)
def no_modes_left() -> Iterator[None]:
    """A test that leaves autograd off fails, and not those behind it."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("autograd was left off")


@pytest.fixture(autouse=True)
def no_locks_of_logs() -> Iterator[None]:
    """An interrupt within a log leaves its lock held, and threads of later tests would wait."""
    yield
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        while handler is not None and handler.lock is not None and handler.lock._is_owned():
            handler.release()


@pytest.fixture(autouse=True)
def frozen_modules() -> Iterator[None]:
    """As ``pytest_collection_finish`` left them: a search for kept views unfreezes everything.

    What is frozen is not counted, which takes longer than most tests.
    """
    calls, unfreeze = [], gc.unfreeze

    def noted() -> None:
        calls.append("unfreeze")
        unfreeze()

    gc.unfreeze = noted
    yield
    gc.unfreeze = unfreeze
    if calls:
        gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks, and workers of a test run, compute: how sums are rounded depends on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _why_not_root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


def pytest_configure(config: pytest.Config) -> None:
    # A shell has this signal ignored in what it runs in the background, and in all below that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # beside other workers: their threads are enough
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Modules are there to stay: a collection need not walk them each time that a test asks."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, why_not in (("gpu", _why_no_gpu), ("root", _why_not_root)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
