"""Components: any range in and out, snapshots, and what an error leaves."""

import errno
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import AioError
from aio.errors import let_go
from swap.plan.layout import PIECE, pack
from swap.storage.components import as_bytes, as_tensor
from tests.support.examples import examples
from tests.support.interrupts import interrupt, sampled
from tests.support.tiers import (
    TieredRig,
    add_to_both,
    assert_same,
    fill_both,
    placement_of,
    random_values,
    same_bits,
    specs_of,
    step_both,
)

SIZES = (3 * PIECE + 5, 100, 0, 1, 2 * PIECE)


class Rig(TieredRig):
    def __init__(self, stack: ExitStack, folder: Path, dtype: torch.dtype, **homes: Any) -> None:
        specs = specs_of(SIZES, dtype)
        arena_bytes = 8 * PIECE * 4
        placement = placement_of(pack(specs, 2 * PIECE), arena_bytes=arena_bytes, **homes)
        super().__init__(stack, folder, placement)
        self.components = self.state.components


@contextmanager
def rig_in(folder: Path, *, dtype: torch.dtype = torch.float32, **homes: Any) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack, folder, dtype, **homes)


@settings(max_examples=examples(40), deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    on_host=st.sets(st.integers(0, 4)),
    data=st.data(),
)
def test_ranges_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    on_host: set[int],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("swap")
    with rig_in(folder, dtype=dtype, state_on_nvme=lambda unit: unit not in on_host) as rig:
        for spec in rig.plain.specs:
            for name, expected in rig.plain.components[spec.index].items():
                expected.copy_(random_values(spec.index, spec.numel).to(expected.dtype))
                rig.components.write(spec.index, name, 0, expected)
        for number in range(6):
            parameter = data.draw(st.integers(0, len(SIZES) - 1))
            name = data.draw(st.sampled_from(rig.state.component_names(parameter)))
            expected = rig.plain.components[parameter][name]
            start = data.draw(st.integers(0, SIZES[parameter]))
            stop = data.draw(st.integers(start, SIZES[parameter]))
            values = random_values(number, stop - start).to(expected.dtype)
            expected[start:stop] = values
            rig.components.write(parameter, name, start, values)
        assert_same(rig.state, rig.plain)


def test_components_start_as_zeros_without_an_extent(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        extents = rig.state.extents
        assert extents is not None
        used = extents.used_bytes
        out = torch.ones(SIZES[0])
        rig.components.read(0, "exp_avg", 0, out)
        assert not out.any()
        assert extents.used_bytes == used
        rig.components.write(0, "exp_avg", PIECE, torch.ones(5))
        rig.components.read(0, "exp_avg", 0, out)
        assert out.nonzero().view(-1).tolist() == list(range(PIECE, PIECE + 5))


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_zero_empties_a_component_wherever_it_is(tmp_path: Path, home: str) -> None:
    with rig_in(tmp_path, state_on_nvme=lambda _: home == "nvme") as rig:
        fill_both(rig.state, rig.plain)
        for spec in rig.plain.specs:
            add_to_both(rig.state, rig.plain, spec.index, seed=spec.index)
        step_both(rig.state, rig.plain, range(len(SIZES)))
        rig.state.flush()
        for name in ("exp_avg", "exp_avg_sq"):
            rig.components.zero(name)
            for components in rig.plain.components:
                components[name].zero_()
        assert_same(rig.state, rig.plain)


def test_threads_may_write_different_elements_at_once(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        values = random_values(1, SIZES[0])
        cuts = [0, 10, PIECE - 1, PIECE + 1, 2 * PIECE, 3 * PIECE + 1, SIZES[0]]

        def write(first: int, last: int) -> None:
            rig.components.write(0, "exp_avg", first, values[first:last])

        threads = [threading.Thread(target=write, args=(a, b)) for a, b in itertools.pairwise(cuts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        out = torch.empty_like(values)
        rig.components.read(0, "exp_avg", 0, out)
        assert same_bits(out, values)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_error_is_raised_when_nothing_uses_the_callers_memory_any_more(
    tmp_path: Path, kind: Any
) -> None:
    with rig_in(tmp_path) as rig:
        fill_both(rig.state, rig.plain)
        rig.engine.eager = 0.0
        rig.faults.arm(kind, errno.EIO)
        values = torch.zeros(SIZES[0])
        transfer = rig.components.read if kind == "read" else rig.components.write
        with pytest.raises(AioError) as caught:
            transfer(0, "weight", 0, values)
        assert caught.value.errno == errno.EIO
        assert rig.engine.num_in_flight == 0


@pytest.mark.parametrize("num_interrupts", [1, 3])
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_transfer_that_an_interrupt_kept_from_being_noted_has_ended(
    tmp_path: Path,
    kind: str,
    is_aligned: bool,
    num_interrupts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig_in(tmp_path) as rig:
        fill_both(rig.state, rig.plain)
        extents, engine = rig.state.extents, rig.engine
        assert extents is not None
        engine.eager = 0.0
        submit, drain, left = getattr(extents, kind), engine.drain, [None] * num_interrupts

        def cut(*arguments: Any, **options: Any) -> None:
            submit(*arguments, **options)
            left.pop()
            raise KeyboardInterrupt

        def cut_drain() -> None:
            if left:
                left.pop()
                raise KeyboardInterrupt
            drain()

        monkeypatch.setattr(extents, kind, cut)
        monkeypatch.setattr(engine, "drain", cut_drain)
        values = torch.zeros(SIZES[0] + 1)[0 if is_aligned else 1 :][: SIZES[0]]
        transfer = rig.components.read if kind == "read" else rig.components.write
        with pytest.raises(KeyboardInterrupt):
            transfer(0, "weight", 0, values)
        assert engine.num_in_flight == 0
        assert not left


def test_component_that_an_interrupt_came_into_as_it_was_made_leaves_no_extent_to_nobody(
    tmp_path: Path,
) -> None:
    with rig_in(tmp_path) as rig:
        extents = rig.state.extents
        assert extents is not None
        used = extents.used_bytes
        values = random_values(0, SIZES[0])

        def write() -> None:
            rig.components.write(0, "exp_avg", 0, values)

        total = interrupt(write, None).seen
        for number in sampled(total, 40):
            for action in (lambda: rig.components.zero("exp_avg"), write):
                interrupt(action, number)
            rig.components.zero("exp_avg")
            assert extents.used_bytes == used


@pytest.mark.parametrize("kind", ["write", "allocate", "zero"])
def test_component_that_could_not_be_made_is_all_zeros_still(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_in(tmp_path) as rig:
        extents = rig.state.extents
        assert extents is not None
        if kind == "write":
            monkeypatch.setattr(
                extents.transfers, "zero", lambda _: False
            )  # as where the file system cannot
        if kind == "allocate":
            for volume in extents._volumes:
                while volume.ranges.allocate(1) is not None:
                    continue
        used = extents.used_bytes
        with monkeypatch.context() as patched:
            if kind == "zero":
                patched.setattr("aio.File.zero", _no_room)
            else:
                rig.faults.arm(kind, errno.ENOSPC, times=100)
            with pytest.raises(AioError):
                rig.components.write(0, "exp_avg", 0, torch.ones(SIZES[0]))
        assert extents.used_bytes == used
        rig.faults.disarm()
        rig.components.write(0, "exp_avg", 7, torch.ones(1))
        out = torch.empty(SIZES[0])
        rig.components.read(0, "exp_avg", 0, out)
        assert out.nonzero().tolist() == [[7]]


def test_an_error_that_is_kept_does_not_keep_what_was_to_be_filled(tmp_path: Path) -> None:
    """A tensor of each parameter that cannot be read would not fit into memory."""
    with rig_in(tmp_path) as rig:
        rig.components.write(0, "exp_avg", 0, torch.ones(SIZES[0]))
        rig.faults.arm("read", errno.EIO, times=100)
        out = torch.empty(SIZES[0])
        memory = weakref.ref(out)
        with pytest.raises(AioError) as caught:
            rig.components.read(0, "exp_avg", 0, out)
        let_go(caught.value)
        del out
        assert memory() is None


def test_bytes_of_nothing_are_nothing() -> None:
    assert as_tensor(np.empty(0, np.uint8), torch.float32).shape == (0,)
    assert as_bytes(torch.empty(0)).nbytes == 0


def test_new_extent_in_a_used_range_is_all_zeros_without_a_write(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        rig.components.write(0, "exp_avg", 0, torch.ones(SIZES[0]))
        rig.components.zero("exp_avg")
        before = len(rig.engine.log)
        rig.components.write(0, "exp_avg", 7, torch.full((1,), 2.0))
        out = torch.empty(SIZES[0])
        rig.components.read(0, "exp_avg", 0, out)
        assert out.nonzero().tolist() == [[7]]
        assert out[7] == 2
        written = sum(size for kind, _, size in rig.engine.log[before:] if kind == "write")
        assert written < SIZES[0] * 4


def _no_room(*_: object) -> None:
    raise AioError("cannot zero", errno=errno.ENOSPC)
