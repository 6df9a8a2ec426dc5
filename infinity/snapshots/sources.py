"""What a snapshot holds: the tree that is saved as a checkpoint in the folder of snapshots.

- ``point``: which snapshot it is, see ``POINT_FORMAT``;
- ``training``: what a checkpoint of ``offloaded.save`` has as ``infinity``, without ``TABLES``;
- ``tables``: those, as JSON text, and ``leaves``: of which parameters each tensor consists (more
  than one where it is tiled). A text is one node of the tree, however many parameters there are:
  each node costs time of the training that a snapshot is taken beside;
- ``contents``: how the state is cut into subgroups, and which ranges of which swap files have the
  components that are on NVMe, see ``swap.snapshots.contents``;
- ``host.<subgroup>.<component>``: those that are in host memory, or in that of a device;
- ``model.<name>``: persistent buffers; ``extra``: what the caller gave.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from checkpoint import ChangedTensorError
from checkpoint.saving.unguarded import copied_tree
from checkpoint.tensors.held import HeldSource
from infinity.autograd.versions import HomeWatch
from infinity.values.checkpoint_tensors import checkpoint_tensors_of
from infinity.values.module_state import persistent_buffers
from infinity.values.persistence import TrainingState, scalars_of
from swap.snapshots.contents import Contents, FileRange, Key, SavedGroup
from swap.storage.components import as_bytes
from swap.storage.extents import Extent
from swap.tiered import TieredState

POINT_FORMAT = 2
"""A snapshot of a later one is refused. In 1 the tables were nodes of the tree."""

TABLES = ("steps", "planes", "shapes", "parts")
"""Of what ``scalars_of`` gives, by name of a tensor: plain numbers and names."""


@dataclass(frozen=True, slots=True)
class HostBytes(HeldSource):
    """A component of a subgroup that is an array: a ``checkpoint.ByteSource``, which is written
    from where it lies if that is host memory.
    """

    state: TieredState
    subgroup: int
    name: str
    since: int
    """What ``state.num_changes`` has to be still when something was read."""
    watch: HomeWatch
    """Of programs, which can change weights where they are kept."""

    thread_safe: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._values.numel(),)

    @property
    def address(self) -> int | None:
        values = self._values
        return None if self._is_on_device else values.data_ptr()

    @property
    def tells_all(self) -> bool:
        """No program has a way to state of the optimizer where it lies."""
        return self.name != "weight"

    @property
    def _values(self) -> torch.Tensor:
        return self.state.components.arrays.of(self.subgroup, self.name)

    @property
    def _is_on_device(self) -> bool:
        return self.state.components.arrays.is_on_device(self.subgroup)

    @property
    def _parameters(self) -> list[int]:
        segments = self.state.layout.subgroups[self.subgroup].segments
        return [segment.parameter for segment in segments]

    def is_there(self) -> bool:
        """Whether no other thread took a step, or loaded, since it was to be read."""
        return self.since == self.state.num_changes

    def changed(self, name: str) -> ChangedTensorError:
        name = f"{self.name} of subgroup {self.subgroup}"
        if self.tells_all:
            return ChangedTensorError(name)
        return self.watch.error_of(self._parameters, name)

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``. Raises ``ChangedTensorError`` where
        they are not there any more.
        """
        if self._is_on_device:
            values = torch.frombuffer(out, dtype=self.dtype)
            first = start // self.dtype.itemsize
            self.state.components.arrays.read(self.subgroup, self.name, first, values)
        else:
            here = as_bytes(self._values)
            np.frombuffer(out, dtype=np.uint8)[:] = here[start : start + len(out)]
        if not self.is_there():
            raise self.changed(self.name)

    def check_unchanged(self) -> None:
        """Raises ``ChangedTensorError`` if a program changed what was to be read."""
        if self.name == "weight":
            self.watch.check(self._parameters)

    def check_ended(self) -> None:
        """The same of changes that were under way then."""
        if self.name == "weight":
            self.watch.check_ended()


def tree_of(training: TrainingState, extra: Any, since: int, *, copies: bool) -> dict[str, Any]:
    """All but ``point`` and ``contents``; ``copies`` of what may change before the next step."""
    state, watch = training.state, training.versions.watch_at_home()
    hosts: dict[str, dict[str, HostBytes]] = {}
    for group in state.layout.subgroups:
        if state.components.is_array(group.index):
            names = state.components.names(group.index)
            sources = {name: HostBytes(state, group.index, name, since, watch) for name in names}
            hosts[str(group.index)] = sources
    leaves = checkpoint_tensors_of(training.model, training.records)
    scalars, buffers = scalars_of(training), persistent_buffers(training.model)
    tables = {name: scalars.pop(name) for name in TABLES}
    tables["leaves"] = {leaf.name: [part.name for part in leaf.parts] for leaf in leaves}
    if copies:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        own = {"training": {"module_states": scalars["module_states"]}, "extra": {"value": extra}}
        own = copied_tree(own)
        extra, scalars["module_states"] = own["extra"]["value"], own["training"]["module_states"]
    return {
        "training": scalars | {"own_states": [], "random_of_ranks": {}},
        "tables": {"json": json.dumps(tables)},
        "host": hosts,
        "model": buffers,
        "extra": {"given": extra is not None, "value": extra},
    }


def contents_of(state: TieredState, published: Mapping[Key, Extent | None]) -> Contents:
    """How ``state`` is cut, and where the extents are."""
    groups = tuple(
        SavedGroup(
            tuple(
                state.components.component(group.index, name)
                for name in state.components.names(group.index)
            ),
            group.numel,
            state.components.is_array(group.index),
            group.segments,
        )
        for group in state.layout.subgroups
    )
    for number, group in enumerate(groups):
        for component in () if group.is_host else group.components:
            assert (number, component.name) in published, "neither in host memory nor on NVMe"
    names = [] if state.extents is None else state.extents.names
    ranges = {
        key: ranges_of(extent, names) for key, extent in published.items() if extent is not None
    }
    parameters = tuple((spec.name, spec.numel) for spec in state.layout.specs)
    return Contents(parameters, groups, ranges)


def ranges_of(extent: Extent, names: Sequence[str]) -> tuple[FileRange, ...]:
    return tuple(FileRange(names[p.directory], p.offset, p.nbytes) for p in extent.ranges)


def model_of(training: TrainingState) -> str:
    """Tells models apart: the names and shapes of their parameters, as checkpoints have them."""
    leaves = checkpoint_tensors_of(training.model, training.records)
    text = json.dumps(sorted((leaf.name, list(leaf.shape)) for leaf in leaves))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
