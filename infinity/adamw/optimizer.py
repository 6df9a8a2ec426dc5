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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from sys import is_finalizing
from typing import Any

import torch

from checkpoint.directory.destination import check_place
from checkpoint.saving.guard import wait_for_saves
from infinity.adamw import state as offloaded_state
from infinity.adamw.changes import Hold
from infinity.adamw.engine import StateEngine, StateReport
from infinity.adamw.local_tensors import local
from infinity.adamw.member import check_distinct, check_same_decay, defaults_of, options_of
from infinity.adamw.names import lengths_of, named_groups, names_of
from infinity.adamw.state_view import (
    Handover,
    Hooks,
    Loading,
    ParameterState,
    Reading,
    StateDict,
    TieredStateView,
    refuse_change,
)
from infinity.adamw.step import Step, is_asked_by_torch, makes_state_only, never
from infinity.arguments import Directories, budget_of_rank, directories_of
from swap.interruptions.undo import Closing


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW whose state takes at most ``host_memory`` bytes of host memory; the rest is on NVMe.

    - ``params``, ``lr``, ``betas``, ``eps``, ``weight_decay``: as ``torch.optim.AdamW``. Options
      are read from ``param_groups`` at every step, so schedulers work. Results are those of
      ``infinity.AdamW`` with everything in memory, bit for bit, under every budget.
    - ``nvme``: a directory, or one for each SSD. Swap files live there until ``close``, the end of
      a ``with`` block, or the end of the optimizer; nothing stays.
    - ``host_memory``: most bytes that the library takes. It does not count parameters and
      gradients, which are the model's, but what those on a GPU pass through (2 to 64 MiB).
      Default: half of what is free, of which each rank of a ``torch.distributed`` job takes its
      part as if all of them were on this machine; ranks on several machines may be given more.

    Of torch's options groups may have ``maximize`` and ``decoupled_weight_decay`` (False: Adam);
    ``amsgrad`` and ``differentiable`` are refused. ``add_param_group`` works at any time; state
    that is added late is placed in the memory that is left. Parameters that do not require
    gradients take no room before they get one. ``state`` is true when there is some, and
    ``state[parameter]`` reads it, but it lists nothing and takes nothing: see ``state_dict`` and
    ``save``. The functions of ``torch.distributed.checkpoint.state_dict`` work as with torch's own
    AdamW, and change nothing when they come before the first step.

    Two parameters over the same memory, and a gradient in the memory of other weights, are refused
    wherever they are: what comes out would depend on which of them comes first.

    DDP replicas each keep a whole state, the ranks of FSDP2 that of their shards; give each rank an
    ``nvme`` of its own SSDs where you can.

    Raises ``ValueError``, ``TypeError``, ``BudgetError`` (with the least budget that works),
    ``OSError`` or, of a GPU, ``RuntimeError``, and leaves nothing behind.
    """

    has_own_tiers = True
    """What ``offload`` asks of an optimizer that it is given."""

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
        if not isinstance(params, Iterable):
            raise TypeError(
                f"params is a {type(params).__name__}; give model.parameters(), or a list of groups"
            )
        defaults = defaults_of(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._process, self._is_built = os.getpid(), False
        self._view = TieredStateView(self)
        self._handover = Handover()
        self._engine = StateEngine(directories_of(nvme), budget_of_rank(host_memory))
        self._closing = Closing(self, self._engine.store.close)
        try:
            super().__init__(params, defaults)
            self._optimizer_load_state_dict_pre_hooks = Hooks(last=Handover.begin_loading)
            self._optimizer_state_dict_pre_hooks = Hooks(last=Handover.begin_reading)
            self._optimizer_state_dict_post_hooks = Hooks(first=Handover.finish_reading)
            self._place(p for p in self._parameters() if p.requires_grad)
        except BaseException:
            self.close()
            raise
        self._is_built = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; all are updated when it returns.

        State is read, worked on and written back at once, a part of it each; weights and gradients
        on a GPU come to the host and go back beside that. An interrupt (Ctrl-C) is raised when the
        step has ended, or before it has begun.

        Raises ``RuntimeError`` for a sparse gradient, and ``ValueError`` for one in the memory of
        weights, before anything is changed. An ``AioError``,
        or what a GPU raises, leaves the step unfinished: ``flush`` finishes it with the gradients
        that it was taken with; until then ``step`` raises ``RuntimeError``. A part of the weights
        is new then: leave weights and gradients as they are, and where they are, before.
        """
        self._check_open()
        self._engine.check_ready()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        makes_state = self._makes_state_only if is_asked_by_torch() else never
        with torch.no_grad():
            self._engine.step(lambda: self.param_groups, makes_state)
        return loss

    def flush(self) -> None:
        """Finish a step that an error stopped, and bring all state to where it is at home.

        As a step, it waits for the saves that the optimizer guards. Raises ``AioError`` when that
        fails again; a further call tries again. Raises ``RuntimeError`` naming a parameter of that
        step that has other memory by now, which can be put back, or whose weights or gradient were
        changed in place, as torch counts it, or freed: ``load`` gives the step up then.
        """
        self._wait_for_turn()
        self._engine.finish()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``. Raises ``BudgetError`` when no memory is left for it, and
        ``ValueError`` for options out of range, or that are not computed here; other keys stay.
        """
        if self._is_built:
            self._check_open()
        super().add_param_group(param_group)
        try:
            options_of(param_group)
            check_distinct(self.param_groups)
            if not self._is_built:
                return
            self._place(p for p in param_group["params"] if p.requires_grad)
        except BaseException:
            del self.param_groups[[group is param_group for group in self.param_groups].index(True)]
            raise

    def report(self) -> StateReport:
        """Memory and space taken, and the traffic so far."""
        return self._engine.report()

    def close(self) -> None:
        """Remove the swap files, and the state with them. Idempotent."""
        if is_finalizing():  # in a finalizer, behind `atexit`, which has closed it; no thread runs
            return
        if os.getpid() == self._process:
            self._engine.end(self._closing.now)
        self._closing.is_done = True  # in a forked child, which has nothing to remove

    def __enter__(self) -> OffloadedAdamW:
        return self

    def __exit__(self, *_: object) -> None:
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
        self._wait_for_turn()
        return self._engine.reading(self._state_dict)

    def _state_dict(self, hold: Hold) -> dict[str, Any]:
        def begin() -> defaultdict[torch.Tensor, Any]:
            self._engine.begin_reading(hold)  # the groups as well are those of now
            members = self._engine.members.named(names_of(self.param_groups))
            return self._engine.read_all([*members.values()])

        before, packed = self._handover.reading, self._handover.packed
        self._handover.reading = Reading(begin, hold.ended.set)
        try:
            return super().state_dict()
        finally:
            self._handover.reading, self._handover.packed = before, packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dict of this class or of ``torch.optim.AdamW``; an unfinished step is given
        up. Raises ``ValueError`` for one that does not fit, and ``BudgetError`` for one that has
        state for which there is no room, before anything is changed. A failure later leaves the
        state mixed, and all but loading again is refused.
        """
        self._check_open()
        self._engine.loading(partial(self._load_state_dict, state_dict))

    def _load_state_dict(self, state_dict: StateDict, hold: Hold) -> None:
        states: list[tuple[torch.Tensor, Any]] = []

        def begin(final: StateDict) -> StateDict:
            states.extend(self._states_in(final))
            if lengths_of(final["param_groups"]) == lengths_of(self.param_groups):
                offloaded_state.check_owners(final["state"], final["param_groups"])
                self._place(parameter for parameter, _ in states)
                self._engine.begin_loading(hold)
            return final | {"state": {}}

        loading = Loading(begin, lambda: self._engine.take_states(states, hold))
        before, self._handover.loading = self._handover.loading, loading
        try:
            super().load_state_dict(state_dict)
        finally:
            self._handover.loading = before

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch gives the groups that it has loaded by."""
        super().__setstate__(state)
        if self._handover.loading is not None:
            self._handover.loading.finish()

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> Any:
        """Stream the state to a checkpoint at ``path``; returns what ``checkpoint.save`` returns.

        Parameters are not in it: save the model's state dict, in ``extra`` if you like. ``extra``
        is any state tree; ``load`` returns it. Each rank saves to a path of its own. Steps, loads
        and ``close`` of other threads wait until it has ended. Raises as ``checkpoint.save``.
        """
        self._wait_for_turn()

        def save(hold: Hold) -> Any:
            self._engine.begin_reading(hold)
            members = self._engine.members.named(names_of(self.param_groups))
            groups = named_groups(self.param_groups)
            return offloaded_state.save(path, members, self._engine.store, groups, extra)

        return self._engine.reading(save)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Stream the state back that ``save`` wrote; returns its ``extra``. The model must have
        the parameters of then. An unfinished step is given up. Where somebody saves over ``path``
        meanwhile, all of it is of the later save. Other threads wait until it has ended.

        Raises as ``checkpoint.load``, and ``ValueError`` for groups or parameters that differ,
        before anything is changed. A failure later leaves the state mixed, and all but loading
        again is refused.
        """
        self._check_open()
        check_place(path)

        def load(hold: Hold) -> Any:
            extra = offloaded_state.of_one_save(path, partial(self._load, path, hold))
            self._engine.is_mixed = False
            return extra

        return self._engine.loading(load)

    def _load(self, path: str | os.PathLike[str], hold: Hold) -> Any:
        header = offloaded_state.read_header(path, named_groups(self.param_groups))
        names, saved = names_of(self.param_groups), header["parameters"]
        self._place(p for p in self._parameters() if names[id(p)] in saved)
        members = self._engine.members.named(names)
        offloaded_state.check_described(path, members, saved)
        self._engine.begin_loading(hold)
        extra = offloaded_state.load(path, members, self._engine.store, saved)
        self._engine.take_steps(saved, self.param_groups)
        for group, values in zip(self.param_groups, header["groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        return extra

    # What torch asks an optimizer for its state by.

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """True if there is some, and ``state[parameter]`` reads it; it takes nothing."""
        packed = self._handover.packed
        return self._view if packed is None else packed  # type: ignore[return-value]

    @state.setter
    def state(self, value: Any) -> None:
        if self._is_built:
            refuse_change()

    def has_state(self, parameter: object = None) -> bool:
        """Whether there is state of ``parameter``, or of any."""
        members = self._engine.members
        if isinstance(parameter, torch.Tensor):
            return parameter in members and members.of(parameter).held.is_state
        return parameter is None and any(member.held.is_state for member in members)

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        """The state of ``parameter``, read when it is looked at. Raises ``KeyError``."""
        self._check_open()
        self._place([parameter] if id(parameter) in names_of(self.param_groups) else [])
        member = self._engine.members.of(parameter)
        names = ("step", *offloaded_state.component_dtypes(member))

        def read(name: str) -> torch.Tensor:
            self._wait_for_turn()
            return self._engine.read(member, name)

        return ParameterState(names, read)

    def _makes_state_only(self, taken: Step) -> bool:
        trainable = sum(parameter.requires_grad for parameter in self._parameters())
        is_whole = 0 < trainable <= len(taken.updates)
        return is_whole and not self.has_state() and makes_state_only(taken.updates.values())

    def _states_in(self, state_dict: Mapping[str, Any]) -> list[tuple[torch.Tensor, Any]]:
        """Parameters and their states in a state dict, checked. What reads its tensors when they
        are looked at, as our ``state[parameter]``, reads them here: of the state that it replaces.
        """
        for group in state_dict["param_groups"]:
            options_of(group)
        check_same_decay(state_dict["param_groups"], self.param_groups)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters, names = self._parameters(), names_of(self.param_groups)
        given = state_dict["state"]
        states: list[tuple[torch.Tensor, Any]] = []
        for key, parameter in zip(saved, parameters, strict=False):
            if key in given:
                state = given[key]
                states.append((parameter, dict(state) if isinstance(state, Mapping) else state))
        for parameter, state in states:
            shape = local(parameter).shape
            offloaded_state.check_tensors(names[id(parameter)], shape, state)
        return states

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _place(self, parameters: Iterable[torch.Tensor]) -> None:
        self._engine.place(parameters, self.param_groups)

    def _wait_for_turn(self) -> None:
        """To finish a step changes weights, for which the saves that the optimizer guards are
        waited for.
        """
        self._check_open()
        self._engine.check_whole()
        if self._engine.unfinished is not None:
            wait_for_saves(self)

    def _check_open(self) -> None:
        if self._closing.is_done:
            raise RuntimeError("the optimizer is closed, and its state is gone")
        if os.getpid() != self._process and self._engine.store.extents is not None:
            raise RuntimeError(
                f"the state of this optimizer is in files of process {self._process}, from which "
                f"process {os.getpid()} was forked; use the optimizer there, or make another one "
                "here and load what optimizer.save(path) saved there"
            )
