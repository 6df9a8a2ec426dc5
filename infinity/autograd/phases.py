"""When forward and backward passes run, as seen from hooks: autograd tells nobody when it begins
or ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from infinity.backward_passes import threads_alive
from swap.interruptions.forks import note
from swap.marks import HostMark, Mark, marks_on
from swap.timeline import Timeline

Marks = Callable[[torch.device], Callable[[], Mark]]


class Phases:
    """Turns what hooks notice into ``forward`` and ``backward`` events of the timeline.

    A backward pass is taken to last from the first saved tensor that it asks for to the last
    gradient or saved tensor before a forward pass or a step. A forward inside it (recomputation)
    belongs to it. Forward passes that overlap, on several threads, are one. On a device they last
    as long as it computes what they gave it. Thread-safe.
    """

    def __init__(self, timeline: Timeline, device: torch.device, marks: Marks = marks_on) -> None:
        self._timeline = timeline
        self._mark = marks(device)
        self._forwards: set[int] = set()
        """Threads that one runs on, or did when an interrupt came."""
        self._forward_start: Mark = HostMark()
        self._backward: tuple[Mark, Mark] | None = None
        self._lock = threading.RLock()
        note(self)

    def after_fork(self) -> None:
        """What a child computes with tensors of its own comes by here, too."""
        self._lock = threading.RLock()  # another thread may have had it

    def forward_begins(self) -> None:
        """The outermost module begins its forward, inside no other."""
        this = threading.get_ident()
        with self._lock:
            self._forwards &= threads_alive() - {this}
            if not self._forwards:
                self.end_backward()
                self._forward_start = self._mark()
            self._forwards.add(this)

    def forward_ends(self) -> None:
        """It returned or raised."""
        with self._lock:
            if self._forwards == {threading.get_ident()}:
                self._timeline.add_between("forward", self._forward_start, self._mark())
            self._forwards.discard(threading.get_ident())

    def backward_works(self) -> None:
        """Autograd asked for a saved tensor or delivered a gradient."""
        with self._lock:
            if self._backward is None:
                self._backward = self._mark(), self._mark()
            else:
                self._backward[1].move()

    def end_backward(self) -> None:
        """Whatever comes now is not the backward pass any more."""
        with self._lock:
            if self._backward is not None:
                self._timeline.add_between("backward", *self._backward)
                self._backward = None


class Passes:
    """Where a pass of inference ends, for which no step is taken: when the module that began it, or
    another that began a part of it, begins again.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._begun: dict[int, nn.Module] = {}  # by identity: what one hashes by may change

    def begins(self, module: nn.Module) -> None:
        """A forward of ``module`` begins, inside no other."""
        if id(module) in self._begun:
            self._begun.clear()
            self._end()
        self._begun[id(module)] = module
