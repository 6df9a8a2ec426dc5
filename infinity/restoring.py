"""What becomes of a model when it leaves the block: real tensors with the trained values, where it
came from.

Invariant: what is still to be done is a list, the agenda of ``Restoring``, and an entry leaves it
when it is done. Every entry can be done again, and an error that is kept holds no buffer. So an
interrupt, or what else a handler of a signal raises, costs a repetition and no parameter, and an
error of one parameter leaves the others theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from aio.errors import let_go, may_be_repeated, without_frames
from aio.process.threads import Latch
from checkpoint.errors import RankFailedError
from infinity.autograd.lost_values import RestoreError, alive, listed, refuse_calls
from infinity.parameters.offloaded.becoming import become_plain, replace_parameter
from infinity.parameters.offloaded.modes import own_modes
from infinity.parameters.offloaded.parameter import take_grad
from infinity.parameters.offloaded.placeholders import (
    device_of_values,
    lost,
    reason_of,
    refusal_of_gone,
    refusal_of_lost,
    refusal_of_mixed,
)
from infinity.parameters.records import Record
from infinity.ranks.collectives import LEAVE
from infinity.ranks.context import RankContext
from swap.interruptions.apart import run_apart
from swap.interruptions.undo import Closing, told_of
from swap.tiered import TieredState

_log = logging.getLogger(__name__)

_PAUSES_SECONDS = (0.0, 0.05, 0.25)
"""Before each try to read; after a failure that outlasts all of them, none is waited for."""
T = TypeVar("T")


class Restoring:
    """Gives parameters back their values, on the device and in the dtype that they came with.

    Until the block has begun those are the ones that they came with, whatever the tiers have. Those
    of partitioned parameters are with all ranks; they are on meta where one has failed.
    """

    def __init__(
        self, model: nn.Module, state: TieredState, rank_context: RankContext, begun: Latch
    ) -> None:
        self._model = model
        self._begun = begun
        self._own: dict[int, torch.Tensor] = {}  # that parameters came with, until it has begun
        self._state = state
        self._rank_context = rank_context
        self._first: deque[Callable[[], object]] = deque()
        self._agenda: deque[Callable[[], object]] = deque()
        self._records: dict[int, Record] = {}
        self._now: dict[int, nn.Parameter] = {}
        self._missing: dict[int, Record] = {}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}  # of those, as the block was left
        self._refusals: list[RemovableHandle] = []
        self._came_without: dict[int, str | None] = {}  # why, of those lost in an earlier block
        self.gradients: dict[int, torch.Tensor] = {}
        """Those that parameters came with; what is in here is given back with the values."""
        self._failures: list[BaseException] = []
        self._interrupt: BaseException | None = None
        self._repeated: list[BaseException] = []  # what the entry has raised that is done again
        self._pauses: Sequence[float] = _PAUSES_SECONDS
        self._met: dict[object, Any] = {}  # what ranks last met for, and what that gave
        self._is_partitioned = False
        self._is_told = False
        self._turn = threading.RLock()  # of retries
        self._closing: Closing | None = None
        """Of the swap files, once they are kept for errors."""

    def add(self, record: Record) -> None:
        """From now on the parameter is not itself, and is to be restored."""
        self._now[record.index] = record.parameter
        self._own[record.index] = record.parameter.data
        self._came_without[record.index] = reason_of(record.parameter)
        record = replace(record, device=device_of_values(record.parameter))
        if record.parameter.grad is not None:
            self.gradients[record.index] = record.parameter.grad
        self._is_partitioned = self._is_partitioned or record.is_partitioned
        # An interrupt may come before or behind this: all else of it is there now.
        self._records[record.index] = record
        self._agenda.append(partial(self._restore, record))

    def begin(self, gradients: dict[int, torch.Tensor]) -> None:
        """All of the model is in the block: from now on what that has is given back, and of the
        gradients what is in these then.
        """
        self._begun.set()
        self._own.clear()
        self.gradients = gradients

    def before(self, steps: Callable[[], int], *waits: Callable[[], object]) -> None:
        """What ``run`` is to do first; ``waits`` can be repeated, and ``steps`` were taken."""
        self._first = deque([*waits, self._finish_step])
        self._first += [partial(self._meet, steps), self._state.widen]

    def run(self) -> None:
        """Restore what is left to restore; once it is, raise what went wrong.

        Raises ``RestoreError``, what stopped the last step, what kept other ranks from giving
        their values, and an interrupt, when everything is done. Called again it does the rest, if
        an interrupt has left some, or nothing.
        """
        self._work_off(self._first)
        self._work_off(self._agenda)
        self._met.clear()
        self._refuse_calls()
        self._tell()

    def _lost(self) -> Iterator[nn.Parameter]:
        """Those without their trained values, and what took their places since."""
        for index in [*self._missing]:  # a retry on another thread changes it
            yield self._now[index]
            yield from (p for _, _, p in self._found_at_places(index) if p is not None)

    def _work_off(self, agenda: deque[Callable[[], object]]) -> None:
        while agenda:
            try:
                agenda[0]()
                self._interrupt = self._interrupt or next(iter(self._repeated), None)
            except Exception as failure:  # of whatever kind: the rest is to be undone still
                if self._is_repeated(failure):
                    self._repeated.append(let_go(failure))
                    continue
                self._failures.append(self._told(failure))
            except BaseException as interrupt:
                self._interrupt = self._interrupt or let_go(interrupt)
                _log.warning(
                    "interrupted while the model gets its values back; that is finished first, "
                    "%d of %d parameters are left",
                    min(len(self._agenda), len(self._now)),
                    len(self._now),
                )
                continue
            self._repeated.clear()
            agenda.popleft()

    def _refuse_calls(self) -> None:
        """Of modules with parameters that came with values and have none now."""
        while self._refusals:
            self._refusals.pop().remove()
        came_with_values = [r for r in self._records.values() if r.device.type != "meta"]
        lost = [self._now[r.index] for r in came_with_values if self._now[r.index].is_meta]
        self._refusals = refuse_calls(self._model, lost) if lost else []

    def _tell(self) -> None:
        """An error is told when it is on its way; one that an interrupt kept back is told later."""
        verdict = None if self._is_told else self._verdict()
        if verdict is None:
            return
        try:
            raise verdict
        finally:
            self._is_told = True
            del verdict  # or it would keep itself, and the swap files

    def _verdict(self) -> BaseException | None:
        if self._missing:
            self._state.is_kept = True
            if self._state.extents is not None:  # others say from now on what snapshots need
                self._state.extents.let_adopted_go(False)
            if (stopped_by := self._state.pipeline.failure) is not None:
                without_frames(stopped_by)  # which the state keeps: of who was told, they lead here
            self._closing = self._closing or Closing(self, partial(_close_kept, self._state))
            error = self._error(self._failures[0])
            error.__cause__ = self._failures[0]
            return error
        if self._is_partitioned and not self._rank_context.is_whole:
            _log.warning(
                "parameters that were partitioned over ranks are on the meta device: their values "
                "went with the rank that failed; load the last checkpoint"
            )
        return self._failures[0] if self._failures else self._interrupt

    @own_modes
    def _again(self) -> None:
        """What ``RestoreError.retry`` does, on one thread at a time: each does what is left."""
        with self._turn:
            for record in self._missing.values():
                self._check_place(record)
            if self._missing and not self._agenda:
                self._pauses, self._is_told = _PAUSES_SECONDS, False
                self._failures, self._interrupt = [], None
                again = (partial(self._restore, record) for record in self._missing.values())
                self._agenda = deque([self._finish_step, *again])
            self.run()
            if self._closing is not None:
                self._closing.now()

    def _found_at_places(self, index: int) -> Iterator[tuple[nn.Module, str, nn.Parameter | None]]:
        for module, name in self._places.get(index, ()):
            yield module, name, module._parameters.get(name)

    def _check_place(self, record: Record) -> None:
        """Raises ``RuntimeError`` where values would get lost if they were given back now."""
        stay = "the swap files stay until then"
        found = [parameter for _, _, parameter in self._found_at_places(record.index)]
        for parameter in (self._now[record.index], *found):
            if getattr(parameter, "is_offloaded", False):
                raise RuntimeError(
                    f"{record.name} is in an offload block, and its values from an earlier one "
                    f"cannot be given back inside: call retry() after that block; {stay}"
                )
            if parameter is None or parameter.shape != record.shape:
                now = "gone" if parameter is None else f"of shape {tuple(parameter.shape)}"
                raise RuntimeError(
                    f"{record.name} is {now}, and its values have shape {tuple(record.shape)}: put "
                    f"a parameter of that shape there and call retry() again; {stay}"
                )

    # The entries of the agenda.

    def _finish_step(self) -> None:
        """Where that fails, parameters have their values from before the step: not what they should
        have.
        """
        if self._state.mixture.is_left:  # which is told
            self._state.wait_for_updates()
            return
        try:
            self._insist(self._state.finish_step)
        except Exception as failure:  # of whatever kind: the others are not to count on this step
            with suppress(Exception):
                self._state.wait_for_updates()  # where the handler of a signal has raised
            left = [self._records[i] for i in self._state.unfinished & self._records.keys()]
            if self._state.mixture.is_left or any(record.is_partitioned for record in left):
                # The others have their parts from after the step, and nobody those from before it.
                self._rank_context.leave(failure)
            if isinstance(failure, OSError):
                self._missing.update((r.index, r) for r in left if not r.is_partitioned)
            raise

    def _meet(self, steps: Callable[[], int]) -> None:
        if self._rank_context.is_whole:
            self._rank_context.drop_gradients()
            self._together("leaving", lambda: self._rank_context.meet(LEAVE, steps()))

    def _restore(self, record: Record) -> None:
        data = self._values_of(record)
        try:
            self._give(record, data)
        except Exception:  # of whatever kind: it has no values then
            if not record.is_partitioned and record.device.type != "meta":
                self._missing[record.index] = record
            raise
        if not data.is_meta and record.index not in self._state.unfinished:
            self._missing.pop(record.index, None)  # a handler of a signal had raised before

    def _values_of(self, record: Record) -> torch.Tensor:
        """On the meta device if they cannot be had."""
        stride = record.stride or torch.empty(record.shape, device="meta").stride()
        nothing = partial(lost, record.shape, stride, record.dtype, device=record.device)
        if not self._rank_context.is_given_back(record):
            return nothing(None)
        if not self._begun.is_set():
            return self._own[record.index]
        if record.index in self._state.mixture.without_values:
            self._missing.pop(record.index, None)
            return nothing(self._came_without[record.index] or refusal_of_mixed(*record.who))
        if record.is_partitioned and not self._rank_context.is_whole:
            return nothing(refusal_of_gone(*record.who))
        read = partial(self._read, record)
        if record.is_partitioned:
            read = partial(self._together, record.index, read)
        try:
            return self._insist(read)
        except RankFailedError as failure:
            self._failures.append(let_go(failure))
        except Exception as failure:  # of whatever kind: the other parameters come first
            if self._is_repeated(failure):
                raise
            self._failures.append(self._told(failure))
            if record.is_partitioned:  # the others wait for the part that this rank keeps
                self._rank_context.leave(failure)
            else:
                self._missing[record.index] = record
        return nothing((refusal_of_gone if record.is_partitioned else refusal_of_lost)(*record.who))

    def _read(self, record: Record) -> torch.Tensor:
        data = torch.empty(record.shape, dtype=record.dtype, device=record.device)
        self._rank_context.read_values(record, data)
        if record.stride is None:
            return data
        permuted = torch.empty_strided(
            record.shape, record.stride, dtype=record.dtype, device=record.device
        )
        return permuted.copy_(data)

    def _give(self, record: Record, data: torch.Tensor) -> None:
        parameter = self._now[record.index]
        take_grad(parameter)
        restored = become_plain(parameter, record.kind, data)
        if restored is not parameter:
            replace_parameter(self._model, parameter, restored)
            self._now[record.index] = restored
        if not data.is_meta:
            for module, name, found in list(self._found_at_places(record.index)):
                if found is not restored:  # another was put there since, as ``to_empty`` does
                    module._parameters[name] = restored
        gradient = self.gradients.get(record.index)
        if gradient is not None and gradient.device == restored.device:
            restored.grad = gradient

    def _is_repeated(self, error: BaseException) -> bool:
        """Whether the entry is done again, as a handler of a signal may have raised this. Not over
        ranks, where it is not known what the others have done of it.
        """
        is_alone = self._rank_context.world_size == 1
        return is_alone and may_be_repeated(error, len(self._repeated))

    def _told(self, failure: Exception) -> BaseException:
        return told_of(next(iter(self._repeated), None), let_go(failure))

    def _together(self, what: object, action: Callable[[], T]) -> T:
        """Ranks meet in ``action``, each of them once: an interrupt comes before or after, and an
        entry that is done again has what it gave.
        """
        if self._rank_context.world_size == 1:
            return action()

        def meet() -> None:
            self._met = {what: action()}

        if what not in self._met:
            run_apart(meet, "infinity-restore")
        given: T = self._met[what]
        return given

    def _insist(self, action: Callable[[], T]) -> T:
        """What fails for a moment is no failure."""
        failures: list[OSError] = []
        for pause in self._pauses:
            time.sleep(pause)
            try:
                return action()
            except OSError as error:
                if self._is_repeated(error):
                    raise
                failures = [let_go(error)]
        self._pauses = _PAUSES_SECONDS[:1]
        raise failures.pop()

    def _error(self, failure: BaseException) -> RestoreError:
        names = [record.name for record in self._missing.values()]
        absent = [r.name for r in self._missing.values() if self._now[r.index].is_meta]
        before = [name for name in names if name not in absent]
        what = [
            *([f"{listed(absent)} on the meta device"] if absent else []),
            *([f"{listed(before)} with the values from before the last step"] if before else []),
        ]
        folders = [str(folder) for folder in self._state.folders]
        for index in self._missing.keys() - self._places.keys():
            self._places[index] = self._places_of(self._now[index])
        error = RestoreError(
            f"{len(names)} of {len(self._records)} parameters could not be given their trained "
            f"values ({failure}): the model has {' and '.join(what)}, and all others as they were "
            f"trained. The swap files in {', '.join(folders)} stay for as long as this error is "
            "kept: catch it and call its retry() when the disk works again",
            failure,
            names,
            folders,
            self._again,
        )
        error._lost = self._lost
        alive.add(error)
        return error

    def _places_of(self, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._model.modules()
            for name, own in module._parameters.items()
            if own is parameter
        ]


def _close_kept(state: TieredState) -> None:
    """The swap files go: nobody can ask for a retry any more, or it has worked."""
    state.is_kept = False
    state.close()
