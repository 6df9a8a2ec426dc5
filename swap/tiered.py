"""Training state over tiers: what ``infinity`` holds instead of tensors.

``TieredState`` builds the engine, the slabs, the swap files and the pipeline for a placement, and
takes them down again. It knows parameters by index and values as flat tensors; modules, shapes and
optimizers are its caller's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from aio import Engine, Slab
from aio.process.threads import surely
from swap.cache.arena import Arena, HostArena
from swap.cache.device_arena import DeviceArena
from swap.cache.weight_cache import WeightCache
from swap.device.interface import ComputeDevice
from swap.device.opening import open_homes, open_memory, open_visits, register_all
from swap.gradients.inbox import GradientInbox
from swap.gradients.store import GradientStore
from swap.interruptions.apart import run_apart
from swap.interruptions.forks import check_process, note
from swap.interruptions.mixture import Mixture
from swap.interruptions.refusals import Refusals, refuse_at_end
from swap.interruptions.undo import Undo
from swap.masters import components_from, values_from
from swap.memory.passage import Passage, wide_passage
from swap.memory.slabs import slab_of, slab_sizes, slots_of
from swap.plan.layout import Subgroup, neighbours, parts_of
from swap.plan.placement import Placement
from swap.plan.rules import ParameterUpdate, UpdateRule
from swap.storage.components import ComponentStore
from swap.storage.extents import ExtentStore
from swap.storage.opening import open_extents
from swap.timeline import Timeline
from swap.update.pipeline import UpdatePipeline
from swap.update.speculation import Speculation
from swap.update.stages import Stages, Step

CHUNK_ELEMENTS = 256 * 1024
"""Elements that are converted at once when values go in or out."""


class TieredState:
    """Weights, gradients and optimizer state of a list of parameters, each byte in its home tier.

    ``directories`` are folders on the SSDs, ``shares`` the part of the load that each takes
    (bandwidths do). Raises ``OSError`` subclasses naming a directory that cannot be used and
    ``AioError`` (ENOSPC) when the swap files do not fit; nothing is left behind then. ``undo`` is
    told to ``close`` before anything is made: an interrupt may come before the caller has this
    object. One that nobody closes runs nothing as it goes, see ``SwapDirectory``.
    ``after_close`` is called when all files are closed, or are to stay open, and may be so twice.
    """

    def __init__(
        self,
        placement: Placement,
        rule: UpdateRule,
        directories: Sequence[str | os.PathLike[str]],
        *,
        shares: Sequence[float] | None = None,
        device: ComputeDevice | None = None,
        overlap: bool = True,
        undo: Undo | None = None,
        after_close: Callable[[], object] = lambda: None,
    ) -> None:
        self.placement, self.rule = placement, rule
        self.layout, self.timeline = placement.layout, Timeline()
        self.compute = device  # what weights are copied to; None: they are used in host memory
        self.device = torch.device("cpu") if device is None else device.torch_device
        self._process = os.getpid()
        self.num_changes = 0  # grows before a step, or somebody who writes values, changes any
        self.changing = threading.RLock()  # who saves waits for it; a rule may, within
        note(self)
        self.refusals, self.is_kept = Refusals(), False  # kept: to be read after ``close``
        self._undo, self._after_close = Undo(), after_close
        self._undo.callback(after_close)
        if undo is not None:
            undo.callback(self.close)
        try:
            self._build(rule, directories, shares, overlap)
        except BaseException:
            self._undo.close()
            raise

    def _build(
        self,
        rule: UpdateRule,
        directories: Sequence[str | os.PathLike[str]],
        shares: Sequence[float] | None,
        overlap: bool,
    ) -> None:
        placement = self.placement
        self.engine: Engine | None = None
        self.extents: ExtentStore | None = None
        if placement.nvme_bytes:
            self.engine, self.extents = open_extents(
                self._undo, directories, shares, verify=placement.verifies
            )
            self.extents.reserve(placement.nvme_bytes)
        self.slabs: dict[str, Slab] = {}
        for name, nbytes in slab_sizes(placement).items():
            self.slabs[name] = slab = slab_of(name, nbytes)
            self._undo.callback(slab.close)
        home = self.slabs.get("home")
        aside = self.slabs.get("passage")
        self._passage = None if aside is None else Passage(aside)
        register_all(self.compute, self.slabs.values(), self._undo)
        self.homes = open_homes(self.compute, placement, self.slabs.get("bridge"), self._undo)
        self.components = ComponentStore(
            placement, rule, home, self.extents, self._passage, self.homes
        )
        self.gradients = GradientStore(
            placement, home, self.slabs.get("spill"), self.extents, self.timeline, self.homes
        )
        self.visits = open_visits(self.compute, placement, self.slabs.get("inbox"), self._undo)
        self.inbox: GradientInbox | None = None
        self.arena = self._make_arena()
        if self.compute is not None:
            self.inbox = GradientInbox(
                self.compute, self.slabs["inbox"], self._store_part, self.gradients.lose, self._undo
            )
        self.weights = WeightCache(self.components, self.arena, self.timeline, prefetch=overlap)
        slots = deque(slots_of(self.slabs.get("staging"), placement))
        self.stages = Stages(
            self.components, self.gradients, self.weights, rule, slots, self.timeline, self.visits
        )
        self.pipeline = UpdatePipeline(self.stages, self.weights, self._undo, overlap=overlap)
        self.speculation = Speculation(self.layout, self.components, self.pipeline, overlap=overlap)
        self._overlap = overlap
        self._neighbours = neighbours(self.layout)

    def _make_arena(self) -> Arena | None:
        slab = self.slabs.get("arena")
        if self.compute is None:
            return None if slab is None else HostArena(slab)
        memory = open_memory(self.compute, self.placement, self._undo)
        return DeviceArena(self.compute, memory, slab)

    @property
    def used_host_bytes(self) -> int:
        """Host memory in use but for the arena: state at home, gradients, staging, spills."""
        return sum(slab.used_bytes for name, slab in self.slabs.items() if name != "arena")

    @property
    def peak_host_bytes(self) -> int:
        """No more than this many bytes of host memory were ever in use, the arena included."""
        sums = 0 if self.extents is None else self.extents.transfers.checksum_bytes
        slabs = sum(slab.peak_bytes for slab in self.slabs.values())
        return slabs + self.placement.scratch_bytes + sums

    @property
    def mixture(self) -> Mixture:
        """Whether values and state are of one moment."""
        return self.components.mixture

    # Values in and out. No update may be under way; ``flush`` sees to that.

    def fill(self, parameter: int, values: torch.Tensor) -> None:
        """Set weights (and their master) from ``values`` of any float dtype, device and shape."""
        flat = values.detach().reshape(-1)
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            self.write_values(parameter, start, flat[start : start + CHUNK_ELEMENTS])

    def fill_all(self, parts: Iterable[tuple[int, int, torch.Tensor]], memory_bytes: int) -> None:
        """``write_values`` each of ``parts`` (parameter, start, values), no element twice, but from
        ``memory_bytes`` of memory, behind the making of the next; returns when all are at home.
        Raises ``AioError`` and what ``parts`` raises.
        """
        made = (
            (parameter, name, start, component)
            for parameter, start, values in parts
            for name, component in self._changing(parameter, values).items()
        )
        with Slab(memory_bytes, inherited=False) as memory:
            self.components.fill(made, wide_passage(memory))

    def write_values(self, parameter: int, start: int, values: torch.Tensor) -> None:
        """Set elements from ``start``, with all the precision that the master keeps."""
        for name, component in self._changing(parameter, values).items():
            self.components.write(parameter, name, start, component)

    def _changing(self, parameter: int, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The components of values that are to be set now."""
        self.num_changes += 1
        self.weights.drop()  # or what is cached would hide these values
        dtype = self.layout.specs[parameter].dtype
        return components_from(values.to("cpu"), dtype, self.component_names(parameter))

    def read_values(self, parameter: int, start: int, length: int) -> torch.Tensor:
        """Elements from ``start`` in the precision of the master, or that of the weights alone."""

        def read(name: str, out: torch.Tensor) -> None:
            self.components.read(parameter, name, start, out)

        dtype = self.layout.specs[parameter].dtype
        return values_from(read, length, dtype, self.component_names(parameter))

    def read_all(self, parameter: int, out: torch.Tensor) -> None:
        """Copy the whole parameter into flat ``out`` (any float dtype, any device), in chunks.

        Where ``out`` has the dtype of the weights, it gets these: a master that lies in the middle
        between two of them is rounded differently by PyTorch.
        """
        dtype = self.layout.specs[parameter].dtype
        for start in range(0, out.numel(), CHUNK_ELEMENTS):
            part = out[start : start + CHUNK_ELEMENTS]
            if out.dtype == dtype:
                values = torch.empty(part.numel(), dtype=dtype, device="cpu")
                self.components.read(parameter, "weight", start, values)
            else:
                values = self.read_values(parameter, start, part.numel())
            part.copy_(values)

    def widen(self) -> None:
        """No checkpoint is made any more: its memory is there for reading values."""
        if self._passage is not None:
            with suppress(MemoryError):  # it goes with less
                slab = Slab(self.placement.checkpoint_bytes, inherited=False)
                self._undo.callback(slab.close)
                self._passage.widen(slab)

    def component_names(self, parameter: int) -> tuple[str, ...]:
        """Names of the components that hold ``parameter``, the weights first."""
        return self.components.names(self.layout.segments_of[parameter][0].subgroup)

    # A step.

    def add_gradient(self, parameter: int, gradient: torch.Tensor) -> None:
        """Set or accumulate a gradient; waits for an update of ``parameter`` that is still under
        way.

        Raises what stopped that update, and ``AioError`` if the gradient cannot be kept. It is
        lost then, and so is one that fails on its way behind this call: until it is cleared, no
        step is taken.
        """
        self.mixture.check()
        check_process(self._process, "the offloaded model")
        self.gradients.check_memory(parameter, gradient)
        for other in self._neighbours[parameter]:
            self.weights.wait_until_updated(other)
        if self.speculation.is_surplus(parameter):
            self._await_gradients()
            self.speculation.roll_back()
        self.speculation.begin_adding(parameter)
        if self.gradients.is_on_device(parameter):
            self.gradients.add(parameter, gradient)
            self.speculation.stayed(parameter)
        elif self.inbox is not None and gradient.device == self.device:
            self.inbox.add(parameter, gradient)
        else:
            self._await_gradients()
            self.gradients.add(parameter, gradient.cpu())
            self.speculation.arrived(parameter)
        self.speculation.end_adding()

    def clear_gradients(self, parameter: int | None = None) -> None:
        """Forget the gradient of ``parameter``, or of all; also one that was lost."""
        self._await_gradients()
        self.speculation.roll_back()
        self.speculation.cleared()
        self.gradients.clear(parameter)

    def _store_part(
        self, parameter: int, start: int, values: torch.Tensor, *, is_last: bool
    ) -> None:
        self.gradients.add_part(parameter, start, values, is_last=is_last)
        if is_last:
            self.speculation.arrived(parameter)

    def collect_gradients(self) -> None:
        """Wait until every gradient that was added is stored; raises if one was lost, until that
        is cleared.
        """
        self._await_gradients()
        self.gradients.check()

    def has_gradient(self, parameter: int) -> bool:
        """Whether ``parameter`` has a gradient, or had one that was lost."""
        self._await_gradients()
        return parameter in self.gradients.present or parameter in self.gradients.lost

    def _await_gradients(self) -> None:
        check_process(self._process, "the offloaded model")  # no thread brings them in a child
        if self.inbox is not None:
            self.inbox.wait()

    def step(
        self,
        updates: Mapping[int, ParameterUpdate],
        gradient_scale: float,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a step for ``updates``, consuming their gradients; returns before it is finished.

        ``then`` is called when it is taken, on another thread; an interrupt comes before or after.
        Raises what stopped the step before, and ``ValueError`` for options that cannot be; nothing
        of this one is done then. ``MixedStateError`` where the rule, or a lack of memory, stops it.
        """
        self.mixture.check()
        for update in updates.values():
            self.rule.check(update)
        self.collect_gradients()
        self.timeline.mark_step()
        step = Step(updates=dict(updates), gradient_scale=gradient_scale)
        done = self.speculation.done_for(step)
        if not done:
            self.speculation.roll_back()
            self.pipeline.wait()
        run_apart(partial(self._take, step, done, then), "infinity-step")
        if not self._overlap:
            self.pipeline.join()  # what stopped it is raised by the next call, as ever

    def _take(self, step: Step, done: list[Subgroup], then: Callable[[], None]) -> None:
        with self.changing:
            self.refusals.check()
            self.gradients.check_present(step.updates)  # a load that came between has cleared them
            self.num_changes += 1
            small, moving = self.components.parted(step.touched(self.layout.subgroups))
            self.weights.schedule.end_cycle()
            changed: Collection[int] = step.updates
            try:
                self.gradients.capture()  # used up: it is done to its end, or not to be repeated
                self.weights.begin_update(parts_of(small), step.updates, frozenset())
                self.stages.update_now(step, small)
                if not self.speculation.validate(step, done, moving) and moving:
                    self.pipeline.wait()
                    self.pipeline.submit(step, moving)
                changed = ()
                self.speculation.taken()
                self.speculation.end()
                then()
            except BaseException as failure:
                surely(partial(self.weights.fail, failure))
                raise surely(partial(self.mixture.stop_step, failure, changed)) from failure

    def after_fork(self) -> None:
        self.changing = threading.RLock()  # another thread may have had it

    def end_steps(self) -> None:
        """A step (or load) from now on, of any thread, is refused: values are to be given out."""
        with self.changing:
            self.refusals.add(refuse_at_end)

    def flush(self) -> None:
        """Wait until every value is at home; finishes a step that an I/O error stopped, or raises
        it again. Raises ``MixedStateError`` where what there is is of no one moment.
        """
        self.finish_step()
        self.gradients.flush()

    def finish_step(self) -> None:
        """As ``flush``, of values alone: spilled gradients may still be on their way."""
        self.wait_for_updates()
        self.mixture.check()
        if self.pipeline.failure is not None:
            self.pipeline.retry()
        self.pipeline.wait()

    def wait_for_updates(self) -> None:
        """Wait until no update changes values any more, whatever it has come to."""
        with self.changing:  # a step that another thread has begun is given to the pipeline first
            pass
        # Gradients that are still to arrive could begin a speculative pass, which would not end.
        self._await_gradients()
        self.speculation.roll_back()
        self.pipeline.join()

    def discard_step(self) -> None:
        """Forget a step that was stopped: all values are about to be replaced."""
        self.wait_for_updates()
        for group in self.pipeline.discard():
            self.gradients.release(group.index)
        self.weights.forget_update()

    @property
    def unfinished(self) -> frozenset[int]:
        """Parameters that a step which an I/O error stopped has left as they were before it."""
        return self.pipeline.unfinished

    @property
    def folders(self) -> list[Path]:
        return [] if self.extents is None else self.extents.folders

    def close(self) -> None:
        """Stop, and remove the swap files, unless they are to be kept. Idempotent; raises nothing
        that happened in the background. Does nothing in a forked child.
        """
        if os.getpid() == self._process:
            (self._after_close if self.is_kept else self._undo.close)()
