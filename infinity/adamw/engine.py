"""The state of an ``OffloadedAdamW`` and the steps that are taken with it, under torch's optimizer.

Invariants:
- What changes weights, state or the tables of both is a change that is made whole, see ``changes``.
- A step is counted as done by ``num_steps`` when all of it is; until then it is ``unfinished``.
- ``is_mixed`` from before the first value of another state comes in until the last one has.
- Values are read in the turn in which they were brought home, or under a hold from that turn on. A
  step is taken and carried out in one turn, a state loaded under one hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from aio.errors import AioError, advise
from checkpoint.tensors.changes import count_changes
from infinity.adamw import state as offloaded_state
from infinity.adamw.changes import Changes, Hold
from infinity.adamw.local_tensors import local
from infinity.adamw.member import Held, Member, check_distinct, options_of
from infinity.adamw.members import Members
from infinity.adamw.names import names_of
from infinity.adamw.step import MemberUpdate, Step, take
from infinity.adamw.tiers.store import StateStore
from infinity.adamw.tiers.update import Updater
from infinity.optim.adamw import AdamRule
from infinity.parameters.weights_apart import check_parameters, check_updates
from swap.interruptions.mixture import MixedStateError
from swap.timeline import busy_seconds

T = TypeVar("T")
_REMEDY = "the step is not finished: mend that, then call optimizer.flush() to finish it"
Groups = Sequence[Mapping[str, Any]]
States = Iterable[tuple[torch.Tensor, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """What an ``OffloadedAdamW`` takes, in bytes, and what it did so far."""

    steps: int
    budget_host_bytes: int
    host_bytes: int
    nvme_bytes: int
    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float
    kernel_seconds: float
    stall_seconds: float


class StateEngine:
    """State in ``directories`` and in ``host_bytes`` of memory, of parameters in groups."""

    def __init__(self, directories: Sequence[str], host_bytes: int) -> None:
        rule = AdamRule()
        self.store = StateStore(rule, directories, host_bytes)
        self.members = Members(self.store)
        self.unfinished: Step | None = None
        self.is_mixed = False
        self.num_steps = 0
        self._updater = Updater(rule, self.store.links)
        self._changes = Changes()

    def check_whole(self) -> None:
        """Raises ``MixedStateError`` where the loading of a state was stopped."""
        self._changes.wait()
        if self.is_mixed:  # unless another thread has just begun to load
            self._changes.make(self._check_whole, alters=False)

    def check_ready(self) -> None:
        """Raises ``RuntimeError`` where no step can be taken."""
        self._changes.wait()
        if self.is_mixed or self.unfinished is not None:  # or to take a step
            self._changes.make(self._check_ready, alters=False)

    def _check_whole(self) -> None:
        if self.is_mixed:
            raise MixedStateError(
                "loading was stopped, and the state is in part that of before; load again, or make "
                "the optimizer anew"
            )

    def _check_ready(self) -> None:
        self._check_whole()
        if self.unfinished is not None:
            raise RuntimeError(
                "the step before was stopped by an error and is not finished; call "
                "optimizer.flush() to finish it, or optimizer.load(path)"
            )

    def place(self, parameters: Iterable[torch.Tensor], groups: Groups) -> None:
        """Make room for the state of those ``parameters`` that have none yet."""
        self._changes.wait()
        names = names_of(groups)
        self.members.rename(names)
        new = {id(p): p for p in parameters if p not in self.members}
        if new:
            trained = (p for group in groups for p in group["params"] if p.requires_grad)
            every = {id(p): p for p in trained} | new
            check_parameters((names[key], local(p)) for key, p in every.items())
            self._changes.make(partial(self.members.place, new.values(), names))

    # Steps.

    def step(self, now: Callable[[], Groups], makes_state: Callable[[Step], bool]) -> None:
        """Take a step for all that has a gradient, and carry it out; it is ``unfinished`` if that
        fails. All checks come before the first change. One that ``makes_state`` only has every
        member have that of before the first step. The groups of ``now`` are asked for again in its
        turn: another thread may have loaded others.
        """
        check_distinct(groups := now())
        self.place((p for group in groups for p in group["params"] if p.grad is not None), groups)
        self._make(partial(self._step, now, makes_state))

    def _step(self, now: Callable[[], Groups], makes_state: Callable[[Step], bool]) -> None:
        self._check_ready()
        taken = self._take(now())
        if makes_state(taken):
            for member in self.members:
                member.held = Held.ZEROS
        elif taken.updates:
            self._run(taken)

    def _take(self, groups: Groups) -> Step:
        updates: dict[int, MemberUpdate] = {}
        for group in groups:
            options = options_of(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = take(self.members.of(parameter), options)
                    updates[update.member.number] = update
        check_updates([(u.member.name, u.weight, u.gradient) for u in updates.values()])
        left = {group for number in updates for group in self.store.groups_of(number)}
        return Step(updates=updates, left=left)

    def finish(self) -> None:
        """Carry the rest of an unfinished step out, and bring all state home."""
        self._look(lambda: None)

    def _run(self, taken: Step) -> None:
        kept = self._updater.kept
        left = [
            update
            for number, update in taken.updates.items()
            if number in kept or not taken.left.isdisjoint(self.store.groups_of(number))
        ]
        changed = [update.member.parameter for update in left]
        changed += [update.weight for update in left]  # behind a DTensor
        # Tell autograd, and saves, before the first change: a graph from before it is refused.
        count_changes(changed)
        if self.unfinished is None:
            self.unfinished = taken
            for update in taken.updates.values():
                update.member.steps = update.update.step
                update.member.held = Held.VALUES
        try:
            self._carry_out(taken)
        except AioError as error:
            advise(error, _REMEDY)
            raise
        finally:
            self._updater.end_step()
            count_changes(changed)  # again, for saves of other threads that began meanwhile
            taken.note_stop()
        self.unfinished = None
        self.num_steps += 1

    def _carry_out(self, taken: Step) -> None:
        updater = self._updater
        expect = partial(updater.expect, taken) if updater.looks_ahead else None
        try:
            updater.finish()  # of a step that was stopped
            self.store.sweep(taken.left, partial(updater.work, taken), expect)
            updater.finish()
        except BaseException:
            updater.abandon()
            raise

    def _finish(self) -> None:
        self._check_whole()
        if self.unfinished is not None:
            self.unfinished.check_repeatable()
            self._run(self.unfinished)
        self.store.flush()

    # Values of a finished step out, and of another state in.

    def read(self, member: Member, name: str) -> torch.Tensor:
        """One entry of the state of a parameter, as a tensor of its shape on the CPU."""
        return self._look(partial(offloaded_state.tensor_of, member, self.store, name))

    def read_all(self, members: Sequence[Member]) -> defaultdict[torch.Tensor, Any]:
        """The state of those ``members`` that have one, by parameter. Raises ``MemoryError``."""
        offloaded_state.check_memory(members)
        states = self._look(
            lambda: {
                member.parameter: offloaded_state.tensors_of(member, self.store)
                for member in members
                if member.held.is_state
            }
        )
        return defaultdict(dict, states)

    def report(self) -> StateReport:
        store, timeline = self.store, self.store.timeline
        events = timeline.events()
        return StateReport(
            steps=self.num_steps,
            budget_host_bytes=store.budget_bytes,
            host_bytes=store.host_bytes,
            nvme_bytes=store.nvme_bytes,
            read_bytes=timeline.nbytes["read"],
            written_bytes=timeline.nbytes["write"],
            read_seconds=busy_seconds(events, ["read"]),
            write_seconds=busy_seconds(events, ["write"]),
            kernel_seconds=timeline.seconds["kernel"],
            stall_seconds=timeline.seconds["stall"],
        )

    def reading(self, read: Callable[[Hold], T]) -> T:
        """What ``read`` gives, which begins reading with that hold, and may end it."""
        hold = Hold(is_loading=False)
        return self._changes.holding(hold, partial(read, hold))

    def begin_reading(self, hold: Hold) -> None:
        """From now on the store is flushed, and nobody alters it, until that has ended."""
        self._changes.give_way()
        self._look(partial(self._changes.begin, hold))

    def loading(self, load: Callable[[Hold], T]) -> T:
        """What ``load`` gives, which begins loading with that hold, and ends it; others wait."""
        hold = Hold(is_loading=True)
        return self._changes.holding(hold, partial(load, hold))

    def begin_loading(self, hold: Hold) -> None:
        """From now on nothing but loading is allowed, until it has ended."""
        self._changes.make(partial(self._begin_loading, hold))

    def _begin_loading(self, hold: Hold) -> None:
        self.store.flush()
        self._updater.forget()  # of an unfinished step, which nothing can finish from here on
        self._changes.begin(hold)
        self.is_mixed = True

    def take_states(self, states: States, hold: Hold) -> None:
        """End loading with these states, and no state of any other parameter. Others go on."""
        self._make(partial(self._take_states, states))
        hold.ended.set()

    def take_steps(self, saved: Mapping[str, Mapping[str, Any]], groups: Groups) -> None:
        """The step counts of ``saved``, by name, for the values that were loaded."""
        self._changes.make(partial(self._take_steps, saved, self.members.named(names_of(groups))))

    def _take_states(self, states: States) -> None:
        self.members.forget_all_but([])
        for parameter, state in states:
            offloaded_state.take_tensors(self.members.of(parameter), self.store, state)
        self.unfinished, self.is_mixed = None, False

    def _take_steps(
        self, saved: Mapping[str, Mapping[str, Any]], members: Mapping[str, Member]
    ) -> None:
        self.members.forget_all_but(members[name] for name in saved)
        for name, entry in saved.items():
            members[name].steps, members[name].held = entry["steps"], Held.VALUES
        self.unfinished = None

    # The end.

    def end(self, close: Callable[[], object]) -> None:
        """Close, once no change runs any more, and let go of all that belongs to the program."""
        self._changes.make(partial(self._end, close), is_last=True)

    def _end(self, close: Callable[[], object]) -> None:
        close()
        self.unfinished = None

    def _make(self, change: Callable[[], T]) -> T:
        """A change that may have to do with weights on other devices."""
        return self._changes.make(change, self.members.devices)

    def _look(self, look: Callable[[], T]) -> T:
        """What ``look`` gives of a state that is whole and at home, see ``finish``. All of it is,
        and stays so, while somebody reads it under a hold: this alters nothing then.
        """

        def change() -> T:
            self._finish()
            return look()

        return self._changes.make(change, self.members.devices, alters=False)
