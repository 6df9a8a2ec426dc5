"""Which parameters have their weights in place right now: module hooks around forward, and access
by attribute.

A *frame* is one running forward of one module on one thread. It holds the weights of the module's
own parameters from before its forward until after it. A parameter that is reached through attribute
access instead (``self.out_proj.weight`` in the parent's forward) is *accessed outside its module*:
it is fetched on access and stays until the frame that reached for it ends, or until newer ones need
the room.

Whoever gets hold of a parameter in another way, or outside of all forward passes
(``model.head.weight`` in a loss function), can use it all the same: its weights are fetched for
each operation (see ``parameter``), or waited for, where they are at home in host memory.

Forward passes may run on several threads at once. A parameter has its weights in place for as long
as one of them holds it; no lock is held while weights are waited for. Who holds it while its values
change (by a step) goes on with the memory that it has, which gets the new values, as in memory,
when somebody asks for them: it may see old ones until then, and nobody who comes later does.

Invariants, between any two instructions, for an interrupt may come there:
- A parameter that has the class ``OffloadedParameter`` has its weights, with the values that they
  have now. Whatever an interrupt or a change has left has the class ``AbsentParameter``: each
  operation fetches them.
- What is held, in place or on its way belongs to a ``Hold`` that a frame has; frames come before
  what they hold, and go after it. Nothing is counted; giving up a hold can be done again.
- A frame whose forward was ended by what goes past torch's hooks (they see an ``Exception`` alone)
  is told by Python's own frame, which does not run any more. It goes before the next forward or
  operation of its thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn

from infinity.autograd.refusals import Watched, check_late
from infinity.backward_passes import has_ended, threads_alive
from infinity.parameters.frames import Frame, Hold, numbers_of
from infinity.parameters.homes import Homes
from infinity.parameters.offloaded.becoming import cover, is_ours, ours, overwrite_data, uncover
from infinity.parameters.offloaded.handlers import is_moving
from infinity.parameters.offloaded.modes import own_modes, unseen
from infinity.parameters.offloaded.parameter import (
    AbsentParameter,
    OffloadedParameter,
    mark_absent,
    put_data,
)
from infinity.parameters.offloaded.placeholders import (
    end_lending,
    is_placeholder,
    lend,
    placeholder,
    refusal_of_weights,
)
from infinity.parameters.records import Record
from infinity.ranks.gathered_weights import Weights
from swap.interruptions.forks import check_process, note


class ModuleResidency:
    """Puts weights into parameters and takes them out again."""

    def __init__(
        self, records: list[Record], weights: Weights, device: torch.device, outside_bytes: int
    ) -> None:
        self._records = records
        self._weights = weights
        self._outside_bytes = outside_bytes
        self._process = os.getpid()
        self._frames_of: dict[int, list[Frame]] = {}
        """By thread, the outermost first: of modules."""
        self._operations_of: dict[int, list[Frame]] = {}
        """The same: of operations on parameters whose weights are not in place."""
        self._lock = threading.Lock()
        self._holds: dict[int, set[Hold]] = {}
        """By parameter: who has its weights in place. None is empty, but for an interrupt."""
        self._num_changes = 0
        """How often values have changed: what was fetched before the last time may be old."""
        self._kept_out: set[int] = set()
        self._watched = Watched()
        self._placeholders = [
            placeholder(record.shape, record.spec.dtype, device, refusal_of_weights(record.name))
            for record in records
        ]
        self.at_home = Homes(records, weights)

    # Putting the model under watch, and releasing it.

    def attach(self, model: nn.Module) -> None:
        """Swap every parameter's data for what it is while offloaded, and watch access to it."""
        note(self)
        self._put_out(record.index for record in self._records)
        for record, face in zip(self._records, self._placeholders, strict=True):
            lend(face, record.parameter)
        self._watched.begin(model, self)

    def unwatch(self, modules: Collection[nn.Module]) -> None:
        """Access to the parameters of these is not watched any more: graphs are made of it."""
        self._watched.end_of(modules)

    def detach(self) -> None:
        """Give every module its own dictionary of parameters back. Idempotent; can be called again
        after an interrupt.
        """
        for face in self._placeholders:
            end_lending(face)
        self._watched.end()

    # What hooks and access call.

    @property
    def held(self) -> list[int]:
        """Parameters whose weights are in place now, for whichever thread."""
        return [*self._holds]  # at once: saves ask, which must not wait for a thread with the lock

    @property
    def is_computing(self) -> bool:
        """Whether a forward runs on this thread. What was interrupted there goes."""
        thread = threading.get_ident()
        frames = self._frames_of.get(thread)
        if not frames:
            return False
        while frames and has_ended(frames[-1].call):
            self._end_last(frames)
        return bool(frames)

    def working(self, *, elsewhere: bool = False, but: Collection[int] = ()) -> Set[int]:
        """Numbers of the forwards and operations that run, of all threads or of all but this, and
        ``but`` those.
        """
        others = {*but, threading.get_ident()} if elsewhere else but
        return numbers_of(has_ended, self._frames_of, self._operations_of, but=others)

    def innermost(self) -> int:
        """The number of the last forward that runs on this thread; -1 if none does."""
        frames = self._frames_of.get(threading.get_ident(), ())
        return next((frame.number for frame in reversed(frames) if not has_ended(frame.call)), -1)

    def enter(
        self, module: nn.Module, own: list[int], call: FrameType, *, is_compiled: bool = False
    ) -> None:
        """``module`` begins its forward, in ``call``: its own parameters are fetched and held; of a
        compiled block, with the class that they came with.

        To be called after ``is_computing``.
        """
        thread = threading.get_ident()
        frames = self._frames_of.setdefault(thread, [])
        if not frames:
            self._end_operations(thread)
        frames.append(frame := Frame(module, Hold(own), call, is_compiled))
        if any(frame.outside for frame in frames):
            self._make_room(frames, 0)
        self._take(frame.own)
        if is_compiled:
            self._uncover(frame)

    def leave(self, module: nn.Module) -> bool:
        """``module`` ended its forward, or failed; True if another one runs on this thread."""
        frames = self._frames_of.get(threading.get_ident(), [])
        if any(frame.module is module for frame in frames):
            while self._end_last(frames).module is not module:
                pass
        return bool(frames)

    def _end_last(self, frames: list[Frame]) -> Frame:
        frame = frames[-1]
        if frame.is_compiled:
            self._cover(frame)
        strangers = [i for hold in (frame.own, *frame.outside.values()) for i in self._drop(hold)]
        frames.pop()
        self.check_faces(strangers)
        return frame

    def _uncover(self, frame: Frame) -> None:
        """Graphs are made of parameters as they came, and ask for their class."""
        while True:
            with self._lock:
                own = {index: self._parameter(index) for index in frame.own.indices}
                if not any(isinstance(parameter, AbsentParameter) for parameter in own.values()):
                    for index, parameter in own.items():
                        uncover(parameter, self._records[index].kind)
                    return
            self._take(frame.own)  # a thread has changed their values

    def _cover(self, frame: Frame) -> None:
        """Undo ``_uncover``, but for what a graph on another thread computes with. Idempotent."""
        others = [other for frames in [*self._frames_of.values()] for other in [*frames]]
        used = {i for f in others if f.is_compiled and f is not frame for i in f.own.indices}
        with self._lock:
            for index in {*frame.own.indices} - used:
                cover(self._records[index].parameter, absent=index not in self._kept_out)

    def _end_operations(self, thread: int) -> None:
        """Those of a thread that were interrupted."""
        operations = self._operations_of.get(thread, [])
        while operations and has_ended(operations[-1].call):
            self._end_last(operations)

    def visit(self, index: int) -> None:
        """Somebody reached for a parameter that no forward running on this thread may hold."""
        frames = self._frames_of.get(threading.get_ident())
        if not frames or index in self._kept_out:
            return  # each operation fetches it
        if any(index in frame.outside or index in frame.own.indices for frame in frames):
            return
        if not self.is_computing or is_moving():
            return
        nbytes = self._moving_bytes(index)
        if nbytes:
            self._make_room(frames, nbytes)
        hold = frames[-1].outside[index] = Hold((index,), nbytes)
        try:
            self._take(hold)
        except Exception:  # nothing was taken, which of an interrupt nobody knows: see ``_take``
            self._dismiss(frames[-1], index)
            raise

    def _make_room(self, frames: list[Frame], nbytes: int) -> None:
        """Give up the oldest parameters accessed outside on a thread, for one of ``nbytes``, and
        for what its modules hold beyond half of all room.
        """
        own_bytes = sum(self._moving_bytes(i) for frame in frames for i in frame.own.indices)
        room = min(self._outside_bytes, 2 * self._outside_bytes - own_bytes)
        used_bytes = sum(hold.nbytes for frame in frames for hold in frame.outside.values())
        for frame in frames:
            while frame.outside and used_bytes + nbytes > room:
                oldest = next(iter(frame.outside))
                used_bytes -= frame.outside[oldest].nbytes
                self._dismiss(frame, oldest)

    def check_room(self, what: str, indices: Iterable[int]) -> None:
        """Raises ``RuntimeError`` where these, of ``what``, cannot be in place at once."""
        check_late(what, sum(map(self._moving_bytes, indices)), 2 * self._outside_bytes)

    def _moving_bytes(self, index: int) -> int:
        """What a parameter takes of the room. At home it takes none, and nobody has to leave."""
        return 0 if self.at_home[index] is not None else self._records[index].weight_bytes

    def _dismiss(self, frame: Frame, index: int) -> None:
        strangers = self._drop(frame.outside[index])
        del frame.outside[index]
        self.check_faces(strangers)

    def reset(self) -> None:
        """Forget frames of this thread and of those that ended: exceptions went past the hooks."""
        alive = threads_alive() - {threading.get_ident()}
        for stacks in (self._frames_of, self._operations_of):
            for thread in stacks.keys() - alive:
                while stacks[thread]:
                    self._end_last(stacks[thread])
                del stacks[thread]

    def keep_out(self, index: int, data: torch.Tensor) -> None:
        """Leave a parameter alone until ``let_in``: its ``data`` is the program's to change."""
        self._kept_out.add(index)
        put_data(self._parameter(index), data, absent=False)

    def is_gathered(self, indices: Iterable[int]) -> bool:
        """Whether all of these parameters hold real tensors of their own."""
        return self._kept_out.issuperset(indices)

    @property
    def kept_out(self) -> Set[int]:
        """Parameters whose data is the program's now."""
        return self._kept_out

    def let_in(self, indices: Iterable[int]) -> None:
        """Undo ``keep_out``: the parameters have their offloaded face again."""
        let_in = list(indices)
        self._kept_out.difference_update(let_in)
        self._put_out(let_in)
        self.outdate(let_in)

    @contextmanager
    def in_place(self, indices: Collection[int], call: FrameType) -> Iterator[None]:
        """Weights of these are in place inside, for an operation that runs in ``call``."""
        thread = threading.get_ident()
        self._end_operations(thread)
        operations = self._operations_of.setdefault(thread, [])
        operation = Frame(None, Hold(tuple(indices)), call)
        operations.append(operation)
        try:
            self._take(operation.own)
            yield
        finally:
            while operation in operations:
                self._end_last(operations)

    def after_fork(self) -> None:
        """In a child every use of a parameter is refused, also where its weights are in place; what
        is gathered stays the program's.
        """
        self._lock = threading.Lock()  # another thread may have had it
        self._frames_of.clear()
        self._operations_of.clear()
        for record in self._records:
            if is_ours(record.parameter) and record.index not in self._kept_out:
                mark_absent(self._parameter(record.index))

    @own_modes  # tensors made in inference mode count no versions: changes in them would go unseen
    def _take(self, hold: Hold) -> None:
        """The weights of what ``hold`` holds are in place now, with the values that they have now;
        all or none but for an interrupt.
        """
        if hold.indices:
            name = self._records[hold.indices[0]].name
            check_process(self._process, f"the offloaded {name}")
        wanted = [index for index in hold.indices if index not in self._kept_out]
        while True:
            seen = self._num_changes
            weights = self._weights.acquire(wanted, hold)
            with self._lock:
                if seen == self._num_changes:
                    for index, weight in zip(wanted, weights, strict=True):
                        self._put_in(index, weight, hold)
                    return
            del weights  # or they would keep the room of those that came since
            self._weights.release(hold)

    def _put_in(self, index: int, weight: torch.Tensor, hold: Hold) -> None:
        parameter = self._parameter(index)
        holds = self._holds.setdefault(index, set())
        is_shared = bool(holds - {hold})
        holds.add(hold)
        if not isinstance(parameter, AbsentParameter):
            return
        home = self.at_home[index]
        data = weight.view(self._records[index].shape) if home is None else home
        if is_shared and not is_placeholder(parameter):
            # Somebody computes with the memory that is there, which must stay where it is.
            memory = overwrite_data(parameter, data)
            if home is None:
                self._weights.renew(index, memory.view(-1))
        else:
            put_data(parameter, data, absent=False)

    def outdate(self, indices: Collection[int]) -> None:
        """The values of these parameters are others from now on: where they are in place, whoever
        uses one next gets the new ones first.
        """
        with self._lock:
            self._num_changes += 1
            self.at_home.come_home(indices)
            for index in self._holds.keys() & set(indices) - self._kept_out:
                if is_ours(self._records[index].parameter):
                    mark_absent(self._parameter(index))

    @unseen
    def _drop(self, hold: Hold) -> list[int]:
        """Give up ``hold``. Returns parameters that are no offloaded ones any more. Idempotent."""
        strangers = []
        with self._lock:
            for index in hold.indices:
                holds = self._holds.get(index, set())
                if len(holds) > 1:
                    holds.discard(hold)
                elif hold in holds:
                    if not is_ours(self._records[index].parameter):
                        strangers.append(index)
                    elif index not in self._kept_out:
                        self._take_out(index)
                    del self._holds[index]
        self._weights.release(hold)
        return strangers

    @unseen
    def _put_out(self, indices: Iterable[int]) -> None:
        """Whatever data these parameters have, they have their offloaded face now.

        Raises ``RuntimeError`` for one that cannot have it; all others have theirs then.
        """
        strangers = []
        for index in indices:
            if is_ours(self._records[index].parameter):
                self._take_out(index)
            else:
                strangers.append(index)
        self.check_faces(strangers)

    def _take_out(self, index: int) -> None:
        put_data(self._parameter(index), self._placeholders[index], absent=True)

    def check_faces(self, indices: Iterable[int]) -> None:
        """Raises ``RuntimeError`` naming one of these parameters that is no offloaded one."""
        for index in indices:
            self._parameter(index)

    def _parameter(self, index: int) -> OffloadedParameter:
        return ours(self._records[index].parameter, self._records[index].name)
