"""Training of a tiered state whose disk fails now and then, beside the same without tiers."""

import copy
import errno
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from aio import AioError
from swap.plan.layout import PIECE, Subgroup, pack
from swap.tiered import TieredState
from swap.update.stages import Step
from tests.support.late_engine import Faults
from tests.support.tiers import (
    RULE,
    Plain,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    random_values,
    same_bits,
    specs_of,
)

SIZES = (3 * PIECE + 5, 100, 5 * PIECE, 1, 2 * PIECE, PIECE)
NUM_SLOTS = 3
ERRNOS = {"read": errno.EIO, "write": errno.EIO, "allocate": errno.ENOSPC}


def write_of_component(request: Any) -> bool:
    """Write-backs are whole components of two pieces; spills are chunks of one."""
    return bool(memoryview(request.buffer).nbytes > 4 * PIECE)


class Training:
    """Training that meets errors, says so, and goes on when the disk works again."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        speculative: bool = False,
        overlap: bool = True,
        **homes: Any,
    ) -> None:
        self.faults = Faults()
        stack.enter_context(late_engines(seed, self.faults))
        self.specs = specs_of(SIZES, dtype)
        layout = pack(self.specs, 2 * PIECE)
        placement = placement_of(layout, arena_bytes=11 * PIECE * 4, num_slots=NUM_SLOTS, **homes)
        self.state = TieredState(placement, RULE, [folder], overlap=overlap)
        stack.callback(self.state.close)
        self.plain = Plain(self.specs)
        fill_both(self.state, self.plain)
        self.before = copy.deepcopy(self.plain.components)
        self.errors: list[AioError] = []
        self.seeds = itertools.count(seed)
        if speculative:
            everything = range(len(SIZES))
            self.state.speculation.expect_step = lambda: Step(
                updates=self.plain.updates(everything), gradient_scale=0.5
            )

    def meet(self, action: Callable[[], Any]) -> Any:
        """Do ``action`` until it works; after an error, mend the disk and finish the step."""
        while True:
            try:
                return action()
            except AioError as error:
                self.errors.append(error.with_traceback(None))
                self.check_error(error)
                self.mend()

    def mend(self) -> None:
        self.faults.disarm()
        for attempt in itertools.count():
            try:
                return self.state.flush()
            except AioError as error:
                # One error of a step, and one for each spill that waits to be written again.
                assert attempt < 20
                self.check_error(error)
                self.check_subgroups()

    def check_error(self, error: AioError) -> None:
        assert error.errno in ERRNOS.values()
        assert error.filename is not None
        assert error.filename.endswith("state.swap")
        assert error.offset is not None
        assert error.filename in str(error)

    def check_subgroups(self) -> None:
        """Each is before or after the step, in every component."""
        for group in self.state.layout.subgroups:
            assert self._is(group, self.before) or self._is(group, self.plain.components)

    def _is(self, group: Subgroup, components: list[dict[str, torch.Tensor]]) -> bool:
        for segment in group.segments:
            for name, whole in components[segment.parameter].items():
                expected = whole[segment.start : segment.start + segment.length]
                out = torch.empty_like(expected)
                self.state.components.read(segment.parameter, name, segment.start, out)
                if not same_bits(out, expected):
                    return False
        return True

    def step(self) -> None:
        """Forward, backward with two gradients for some, and an update."""
        order = range(len(SIZES))
        for parameter in order:
            self._use(parameter)
        for parameter in reversed(order):
            self._use(parameter)
            seeds = [next(self.seeds) for _ in range(1 + parameter % 2)]
            self._add_gradients(parameter, seeds)
        updates = self.plain.updates(order)
        self.meet(lambda: self.state.step(updates, 0.5))
        self.before = copy.deepcopy(self.plain.components)
        self.plain.step(updates, 0.5)

    def _use(self, parameter: int) -> None:
        weight = self.meet(lambda: self.state.weights.acquire([parameter], "test"))[0]
        assert same_bits(weight, self.plain.weight(parameter))
        self.state.weights.release("test")

    def _add_gradients(self, parameter: int, seeds: list[int]) -> None:
        """All of them again when one fails: what there was of the sum may be gone."""
        spec = self.specs[parameter]
        gradients = [random_values(seed, spec.numel, spec.dtype) for seed in seeds]

        def add_all() -> None:
            self.state.clear_gradients(parameter)
            for gradient in gradients:
                self.state.add_gradient(parameter, gradient)

        self.meet(add_all)
        for gradient in gradients:
            self.plain.add_gradient(parameter, gradient)

    def check_all(self) -> None:
        self.meet(self.state.flush)
        assert_same(self.state, self.plain)
        assert len(self.state.stages._slots) == NUM_SLOTS
        spill = self.state.slabs.get("spill")
        assert spill is None or spill.used_bytes == 0
        extents = self.state.extents
        assert extents is not None
        published = {e for e in self.state.components._on_nvme.values() if e is not None}
        spilled = set(self.state.gradients._on_nvme.values())
        assert extents.used_bytes == sum(extent.nbytes for extent in published | spilled)


def trainings() -> Callable[..., Iterator[Callable[..., Training]]]:
    """A module's fixture: ``make = trainings()``; what it makes is closed with the test."""

    @pytest.fixture
    def make(tmp_path: Path) -> Iterator[Callable[..., Training]]:
        with ExitStack() as stack:
            yield lambda **options: Training(stack, tmp_path, **options)

    return make
