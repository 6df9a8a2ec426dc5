"""``OffloadedAdamW``: an optimizer for models that are in memory, its own state on NVMe.

Parameters and gradients stay what and where they are: ordinary tensors on the CPU or on a GPU, DDP
replicas, or the shards of FSDP2 (DTensors). What AdamW keeps beside them (moments, and the rest of
a float32 master of 16-bit weights) is tiered over host memory and NVMe.

The state of a bfloat16 parameter is the low half of its master; the weights are the other half.
Whoever changes such weights between steps (loading, clamping, averaging) moves the master along;
its low half, at most half a unit in the last place of the weights, stays. A float16 parameter has a
master of its own, which follows weights that were changed exactly.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from infinity.adamw import state as offloaded_state
from infinity.adamw.local_tensors import local
from infinity.adamw.member import Held, Member, member_of, options_of, spec_of, torch_defaults
from infinity.adamw.names import lengths_of, named_groups, names_of
from infinity.adamw.placement import TRANSFER_BYTES
from infinity.adamw.state_view import ParameterState, TieredStateView
from infinity.adamw.step import MemberUpdate, Step, Updater, makes_state_only, take
from infinity.adamw.store import StateStore
from infinity.arguments import Directories, budget_of_rank, directories_of
from infinity.optim.optimizer import AdamW
from swap.plan.layout import ParameterSpec
from swap.plan.rules import AdamRule
from swap.timeline import busy_seconds


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


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW whose state takes at most ``host_memory`` bytes of host memory; the rest is on NVMe.

    - ``params``, ``lr``, ``betas``, ``eps``, ``weight_decay``: as ``torch.optim.AdamW``. Options
      are read from ``param_groups`` at every step, so schedulers work. Results are those of
      ``infinity.AdamW`` with everything in memory, bit for bit, under every budget.
    - ``nvme``: a directory, or one for each SSD. Swap files live there until ``close``, the end of
      a ``with`` block, or the end of the optimizer; nothing stays.
    - ``host_memory``: most bytes that the library takes. It does not count parameters and
      gradients, which are the model's. Default: half of what is free, of which each rank of a
      ``torch.distributed`` job takes its part as if all of them were on this machine; ranks on
      several machines may be given more.

    Of torch's options groups may have ``maximize`` and ``decoupled_weight_decay`` (False: Adam);
    ``amsgrad`` and ``differentiable`` are refused. ``add_param_group`` works at any time; state
    that is added late is placed in the memory that is left. Parameters that do not require
    gradients take no room before they get one. ``state`` is true when there is some, and
    ``state[parameter]`` reads it, but it lists nothing and takes nothing: see ``state_dict`` and
    ``save``. The functions of ``torch.distributed.checkpoint.state_dict`` work as with torch's own
    AdamW, and change nothing when they come before the first step.

    DDP replicas each keep a whole state, the ranks of FSDP2 that of their shards; give each rank an
    ``nvme`` of its own SSDs where you can.

    Raises ``ValueError``, ``TypeError``, ``BudgetError`` (with the least budget that works) or
    ``OSError``, and leaves nothing behind.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        nvme: Directories,
        host_memory: int | str | None = None,
    ) -> None:
        options = AdamW(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        rule = AdamRule()
        self._members: dict[int, Member] = {}
        self._updater = Updater(rule)
        self._unfinished: Step | None = None
        self._num_steps = 0
        self._has_transfer = False
        self._store = StateStore(rule, directories_of(nvme), budget_of_rank(host_memory))
        self._close = weakref.finalize(self, _close_in, os.getpid(), self._store)
        self._is_built = False
        try:
            super().__init__(params, torch_defaults() | options.defaults())
            self._show_state()
            self._place(p for p in self._parameters() if p.requires_grad)
        except BaseException:
            self._close()
            raise
        self._is_built = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; all are updated when it returns.

        State is read, worked on and written back at once, a part of it each.

        Raises ``RuntimeError`` for a sparse gradient, before anything is changed. An ``AioError``
        leaves the step unfinished: ``flush`` finishes it with the gradients that it was taken
        with (do not zero them in place before); until then ``step`` raises ``RuntimeError``.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._unfinished is not None:
            raise RuntimeError(
                "the step before was stopped by an error and is not finished; call "
                "optimizer.flush() to finish it, or optimizer.load(path)"
            )
        with torch.no_grad():
            taken = self._take()
            if self._makes_state_only(taken):
                for member in self._members.values():
                    member.held = Held.ZEROS
            elif taken.updates:
                self._run(taken)
        return loss

    def flush(self) -> None:
        """Finish a step that an error stopped, and bring all state to where it is at home.

        Raises ``AioError`` when that fails again; a further call tries again.
        """
        self._check_open()
        if self._unfinished is not None:
            for update in self._unfinished.updates.values():
                update.check_unchanged()
            with torch.no_grad():
                self._run(self._unfinished)
        self._store.settle()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``. Raises ``BudgetError`` when no memory is left for it, and
        ``ValueError`` for options that AdamW does not have, or that are not computed here.
        """
        if self._is_built:
            self._check_open()
        super().add_param_group(param_group)
        try:
            options_of(self.param_groups[-1])
            if not self._is_built:
                return
            self._place(p for p in self.param_groups[-1]["params"] if p.requires_grad)
        except BaseException:
            self.param_groups.pop()
            raise

    def report(self) -> StateReport:
        """Memory and space taken, and the traffic so far."""
        timeline = self._store.timeline
        events = timeline.events()
        return StateReport(
            steps=self._num_steps,
            budget_host_bytes=self._store.budget_bytes,
            host_bytes=self._store.host_bytes,
            nvme_bytes=self._store.nvme_bytes,
            read_bytes=timeline.nbytes["read"],
            written_bytes=timeline.nbytes["write"],
            read_seconds=busy_seconds(events, ["read"]),
            write_seconds=busy_seconds(events, ["write"]),
            kernel_seconds=timeline.seconds["kernel"],
            stall_seconds=timeline.seconds["stall"],
        )

    def close(self) -> None:
        """Remove the swap files, and the state with them. Idempotent."""
        self._close()

    def __enter__(self) -> OffloadedAdamW:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OffloadedAdamW cannot be copied or pickled, its state is in files; call "
            "optimizer.save(path)"
        )

    # State out and in.

    def state_dict(self) -> dict[str, Any]:
        """All state as tensors on the CPU, beyond the budget: ``step``, ``exp_avg``,
        ``exp_avg_sq`` in float32, and ``lo`` or ``master`` of 16-bit parameters; of this rank.

        Raises ``MemoryError`` when that is more than the memory that is free; see ``save``.
        """
        self.flush()
        members = [self._members[id(p)] for p in self._parameters() if id(p) in self._members]
        offloaded_state.check_memory(members)
        # Where torch looks for it, for as long as it takes.
        self.state = defaultdict(dict)
        try:
            for member in members:
                if member.held is not Held.NOTHING:
                    tensors = offloaded_state.tensors_of(member, self._store)
                    self.state[member.parameter] = tensors
            return super().state_dict()
        finally:
            self._show_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dict of this class or of ``torch.optim.AdamW``; an unfinished step is given
        up. Raises ``ValueError`` for one that does not fit, and ``BudgetError`` for one that has
        state for which there is no room, before anything is changed.
        """
        self._check_open()
        states: list[tuple[torch.Tensor, Any]] = []

        def take_states(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            states.extend(self._states_in(final))
            if lengths_of(final["param_groups"]) == lengths_of(self.param_groups):
                self._place(parameter for parameter, _ in states)
                self._store.settle()
            return final | {"state": {}}

        # After every hook that changes the state dict; before torch copies it.
        last = self.register_load_state_dict_pre_hook(take_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            self._show_state()
        self._unfinished = None
        self._forget_all_but([])
        for parameter, state in states:
            offloaded_state.take_tensors(self._members[id(parameter)], self._store, state)

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> Any:
        """Stream the state to a checkpoint at ``path``; returns what ``checkpoint.save`` returns.

        Parameters are not in it: save the model's state dict, in ``extra`` if you like. ``extra``
        is any state tree; ``load`` returns it. Each rank saves to a path of its own. Raises as
        ``checkpoint.save``.
        """
        self.flush()
        members, groups = self._named_members(), named_groups(self.param_groups)
        return offloaded_state.save(path, members, self._store, groups, extra)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Stream the state back that ``save`` wrote; returns its ``extra``. The model must have
        the parameters of then. An unfinished step is given up.

        Raises as ``checkpoint.load``, and ``ValueError`` for groups or parameters that differ,
        before anything is changed. A failure later leaves the state mixed: load again.
        """
        self._check_open()
        header = offloaded_state.read_header(path, named_groups(self.param_groups))
        names = names_of(self.param_groups)
        self._place(p for p in self._parameters() if names[id(p)] in header["parameters"])
        self._store.settle()
        members = self._named_members()
        extra = offloaded_state.load(path, members, self._store, header["parameters"])
        self._forget_all_but(members.values())
        self._unfinished = None
        for group, values in zip(self.param_groups, header["groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        return extra

    def _named_members(self) -> dict[str, Member]:
        """By the names of now, in the order of the groups; none that left the groups."""
        names = names_of(self.param_groups)
        return {name: self._members[key] for key, name in names.items() if key in self._members}

    def _forget_all_but(self, kept: Iterable[Member]) -> None:
        numbers = {member.number for member in kept}
        for member in self._members.values():
            if member.number not in numbers:
                member.steps, member.held = 0, Held.NOTHING

    # What torch asks an optimizer for its state by.

    def _show_state(self) -> None:
        self.state = TieredStateView(self)  # type: ignore[assignment]

    def has_state(self) -> bool:
        """Whether there is state of any parameter."""
        return any(member.held is not Held.NOTHING for member in self._members.values())

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        """The state of ``parameter``, read when it is looked at. Raises ``KeyError``."""
        self._check_open()
        self._place([parameter] if id(parameter) in names_of(self.param_groups) else [])
        return ParameterState(self._members[id(parameter)], self._store, self.flush)

    def _makes_state_only(self, taken: Step) -> bool:
        trainable = sum(parameter.requires_grad for parameter in self._parameters())
        is_whole = 0 < trainable <= len(taken.updates)
        return is_whole and not self.has_state() and makes_state_only(taken.updates.values())

    def _states_in(self, state_dict: Mapping[str, Any]) -> list[tuple[torch.Tensor, Any]]:
        """Parameters and their states in a state dict, checked."""
        for group in state_dict["param_groups"]:
            options_of(group)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters, names = self._parameters(), names_of(self.param_groups)
        states = [
            (parameter, state_dict["state"][key])
            for key, parameter in zip(saved, parameters, strict=False)
            if key in state_dict["state"]
        ]
        for parameter, state in states:
            shape = local(parameter).shape
            offloaded_state.check_tensors(names[id(parameter)], shape, state)
        return states

    # Taking a step.

    def _take(self) -> Step:
        """Fix the step. All checks come before the first change."""
        self._place(p for p in self._parameters() if p.grad is not None)
        updates: dict[int, MemberUpdate] = {}
        for group in self.param_groups:
            options = options_of(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = take(self._members[id(parameter)], options)
                    updates[update.member.number] = update
        left = {block for number in updates for block in self._store.blocks_of(number)}
        return Step(updates=updates, left=left)

    def _run(self, taken: Step) -> None:
        """Carry ``taken`` out, or what is left of it; kept for ``flush`` if that fails."""
        if self._unfinished is None:
            self._unfinished = taken
            for update in taken.updates.values():
                update.member.steps = update.update.step
                update.member.held = Held.VALUES
            changed = [update.member.parameter for update in taken.updates.values()]
            changed += [update.weight for update in taken.updates.values()]  # behind a DTensor
            # Tell autograd before the first change: a graph from before the step is refused.
            torch.autograd.graph.increment_version(changed)
        self._store.sweep(taken.left, partial(self._updater.work, taken))
        self._unfinished = None
        self._num_steps += 1

    # Making room.

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _place(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make room for the state of those ``parameters`` that have none yet."""
        names = names_of(self.param_groups)
        for known in self._members.keys() & names.keys():
            self._members[known].name = names[known]
        members: list[Member] = []
        specs: list[ParameterSpec] = []
        for parameter in parameters:
            if id(parameter) not in self._members:
                member = member_of(parameter, names[id(parameter)], len(self._members) + len(specs))
                members.append(member)
                specs.append(spec_of(member, len(specs)))
        if not members:
            return
        needs_transfer = any(member.device.type != "cpu" for member in members)
        transfer = TRANSFER_BYTES if needs_transfer and not self._has_transfer else 0
        self._store.add(specs, caller_bytes=transfer)
        self._has_transfer = self._has_transfer or needs_transfer
        self._members.update({id(member.parameter): member for member in members})

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError("the optimizer is closed, and its state is gone")


def _close_in(pid: int, store: StateStore) -> None:
    """Close, unless this is a forked child: the files are its parent's."""
    if os.getpid() == pid:
        store.close()
