"""What is read of a tiered state while it goes on: saves behind training, and snapshots."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from aio import AioError
from aio.process.threads import Thread, join_thread, start_thread
from infinity.snapshots.adoption import adopt, alike
from infinity.snapshots.sources import contents_of
from swap.interruptions.apart import run_apart
from swap.storage.extents import Extent
from swap.tiered import TieredState
from tests.support.tiers import Plain, same_bits

Values = list[dict[str, torch.Tensor]]
_CHUNK = 3000
"""Elements that a save reads at once."""


def _copied(plain: Plain) -> Values:
    return [{name: c.clone() for name, c in of.items()} for of in plain.components]


def read_all(state: TieredState, plain: Plain) -> None:
    """Compare all components, part by part. Raises ``AssertionError``, and ``AioError``."""
    _compare(state, plain.components)


def _compare(state: TieredState, values: Values) -> None:
    for parameter, components in enumerate(values):
        for name, expected in components.items():
            for start in range(0, expected.numel(), _CHUNK):
                wanted = expected[start : start + _CHUNK]
                out = torch.empty_like(wanted)
                state.components.read(parameter, name, start, out)
                assert same_bits(out, wanted), f"{name} of p{parameter} from {start} on differs"


class Behind:
    """A save that reads what is there now, on a thread of its own, until ``end``."""

    def __init__(self, state: TieredState, plain: Plain) -> None:
        self._state, self._values = state, _copied(plain)
        self._since = state.num_changes
        self._failure: BaseException | None = None
        self._thread = Thread(self._read, "behind")
        start_thread(self._thread)

    def _read(self) -> None:
        try:
            _compare(self._state, self._values)
            assert self._since == self._state.num_changes
        except AioError:  # the save fails, and training goes on
            pass
        except BaseException as failure:
            self._failure = failure

    def end(self) -> None:
        join_thread(self._thread)
        if self._failure is not None:
            raise self._failure


class Point:
    """A snapshot: what is on the SSDs is pinned, what is in memory copied. Nothing is under way."""

    def __init__(self, state: TieredState, plain: Plain) -> None:
        self._values, self._steps = _copied(plain), list(plain.steps)
        # As no update is under way, these are the extents that are pinned below.
        published = state.components.extents
        self._bytes = {
            extent: _bytes_of(state, extent)
            for group in state.layout.subgroups
            if not state.components.is_array(group.index)
            for extent in published(group.index).values()
            if extent is not None
        }
        self._published = state.components.pin_all()
        self._contents = contents_of(state, self._published)
        self._host = {
            (group.index, name): state.components.arrays.of(group.index, name).clone()
            for group in state.layout.subgroups
            if state.components.is_array(group.index)
            for name in state.components.names(group.index)
        }

    @property
    def _extents(self) -> list[Extent]:
        return [extent for extent in self._published.values() if extent is not None]

    def check(self, state: TieredState) -> None:
        """Nothing has been written to what it keeps."""
        for extent in self._extents:
            assert (_bytes_of(state, extent) == self._bytes[extent]).all(), "a snapshot changed"

    def restore(self, state: TieredState, plain: Plain) -> None:
        """Go on from it, on both sides; gradients are forgotten."""
        state.clear_gradients()
        state.discard_step()
        run_apart(partial(adopt, state, self._contents, alike(state, self._contents)), "adopt")
        for (group, name), values in self._host.items():
            state.components.arrays.of(group, name).copy_(values)
        state.weights.drop()
        plain.gradients.clear()
        plain.steps = list(self._steps)
        for components, saved in zip(plain.components, self._values, strict=True):
            for name, values in saved.items():
                components[name].copy_(values)

    def drop(self, state: TieredState) -> None:
        if state.extents is not None:
            state.extents.unpin(self._extents)


def _bytes_of(state: TieredState, extent: Extent) -> np.ndarray:
    assert state.extents is not None
    out = np.empty(extent.nbytes, dtype=np.uint8)
    state.extents.read(extent, 0, out, urgent=False).result()
    return out
