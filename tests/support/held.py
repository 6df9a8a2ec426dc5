"""A source of bytes that a test holds back."""

from __future__ import annotations

import threading

import torch


class Held:
    """A source that is read when the test lets it."""

    dtype = torch.uint8
    shape = (4,)

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def read(self, start: int, out: memoryview) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        out[:] = bytes(len(out))
