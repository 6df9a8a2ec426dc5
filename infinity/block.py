"""What ``offload`` returns: a block to be entered once, and left once; and which parameters are a
block's.

Invariants: a block that was entered stays alive, with the model in it, until it is left or the
process ends, whoever still refers to it; a parameter is of one block at a time, from before that
begins until all of it has ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from sys import is_finalizing
from types import TracebackType
from typing import Any, NoReturn

from torch import nn

from infinity.model import OffloadedModel, training_of
from infinity.parameters.offloaded.handlers import check_not_amid, is_amid
from infinity.parameters.offloaded.modes import own_modes
from infinity.training import Training
from swap.interruptions.undo import Undo

_log = logging.getLogger(__name__)
_entered: dict[int, OffloadBlock] = {}
"""Blocks that were entered and not left, by ``id``."""
_claimed: dict[int, Claim] = {}
"""By the ``id`` of each parameter. Changed by single steps: an interrupt leaves no lock held."""
os.register_at_fork(after_in_child=_claimed.clear)  # blocks are the parent's


class Claim:
    """To the parameters of one block. What they look like tells whose they are only while they are
    offloaded: two blocks that begin on two threads would take values from under each other.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []  # alive, so that an ``id`` is of one of them

    def take(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """These are of this block until ``end``, which must follow. Raises ``ValueError`` naming
        one that is another's.
        """
        for name, parameter in named:
            self._parameters.append(parameter)
            if _claimed.setdefault(id(parameter), self) is not self:
                raise ValueError(
                    f"{name} is offloaded already; leave the first offload block before the next"
                )

    def end(self) -> None:
        """Idempotent."""
        for parameter in self._parameters:
            if _claimed.get(id(parameter)) is self:
                _claimed.pop(id(parameter), None)


class OffloadBlock(AbstractContextManager[OffloadedModel]):
    """A context manager for one use: ``with infinity.offload(...) as offloaded``, or
    ``offloaded = stack.enter_context(infinity.offload(...))`` with an ``ExitStack`` that is closed
    where the block ends.

    Entering raises what ``offload`` says, and ``RuntimeError`` for a block that was entered before.
    """

    def __init__(self, model: Any, begin: Callable[[Undo], OffloadedModel]) -> None:
        self._kind = type(model).__name__
        self._begin: Callable[[Undo], OffloadedModel] | None = begin
        self._undo = Undo()
        self._turn = threading.RLock()  # of leaving
        self._process = os.getpid()
        self._training: Training | None = None
        self._is_refused = False

    def __enter__(self) -> OffloadedModel:
        if self._begin is None:
            raise RuntimeError(
                f"this offload block of a {self._kind} was entered before, and a block is for one "
                "use; call infinity.offload(...) again"
            )
        begin, self._begin = self._begin, None
        try:
            self._process = os.getpid()
            offloaded = own_modes(begin)(self._undo)
            self._training = training_of(offloaded)
            _entered[id(self)] = self
            return offloaded
        except BaseException as error:
            try:
                self._leave(type(error), error, error.__traceback__)
            finally:  # should another interrupt have kept it from beginning
                self._leave(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises ``RuntimeError``, and stays entered, where a handler of a signal (or the garbage
        collector) would leave it in the midst of its own work.
        """
        try:
            self._is_refused = id(self) in _entered and is_amid(_LEAVING)
        finally:  # an interrupt that comes as that is asked refuses nothing
            if not self._is_refused:
                try:
                    self._leave(kind, error, trace)
                finally:  # should one have kept that from beginning
                    self._leave(kind, error, trace)
        if self._is_refused:
            self._is_refused = False
            check_not_amid("the end of the offload block")

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Idempotent. Waits for another thread that leaves it."""
        # A forked child has nothing to give back, and nor has a finalizer at the interpreter's end:
        # the values went before, in `_abandon`, and torch ends the process that is called then.
        if os.getpid() != self._process or is_finalizing():
            self._undo.forget()
            return
        with self._turn:
            try:
                own_modes(self._undo.__exit__)(kind, error, trace)
            finally:
                self._training = None
                _entered.pop(id(self), None)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"infinity.offload(...) returns a block that has to be entered, which has no {name!r}: "
            "write `with infinity.offload(...) as offloaded:`, or `offloaded = "
            f"stack.enter_context(infinity.offload(...))`, and use `offloaded.{name}`"
        )

    def __repr__(self) -> str:
        stage = "entered" if id(self) in _entered else "left" if self._begin is None else "new"
        return f"<offload block of a {self._kind}, {stage}>"

    def discard(self) -> None:
        """At the end of the process, in place of leaving: the files go, and the model, which has no
        values from now on, with them. Idempotent.
        """
        if _entered.pop(id(self), None) is not None and os.getpid() == self._process:
            assert self._training is not None
            self._training.state.close()

    def _abandon(self) -> None:
        """At the end of the process: the files go, the values with them."""
        _log.warning(
            "the offload block of a %s was never left: what was trained in it and not saved is "
            "lost; enter blocks by `with`, or through an ExitStack that is closed",
            self._kind,
        )
        assert self._training is not None
        self._training.state.close()


_LEAVING = frozenset({OffloadBlock.__exit__.__code__})


@atexit.register
def _abandon_all() -> None:
    for block in list(_entered.values()):
        if block._process == os.getpid():
            block._abandon()
