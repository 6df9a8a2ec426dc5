"""Gradients against plain tensors: wherever they are kept, and whatever becomes of their writes."""

import errno
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import AioError, Operation, Slab
from swap.gradients.spill import SpillWriter
from swap.gradients.store import GradientStore
from swap.plan.layout import PIECE, Layout, pack
from swap.storage.drives.directory import SwapDirectory
from swap.storage.extents import ExtentStore
from swap.timeline import Timeline
from tests.support.examples import examples
from tests.support.late_engine import Faults, Kind, LateEngine
from tests.support.tiers import Plain, placement_of, random_values, same_bits, specs_of

SIZES = (3 * PIECE + 5, 100, 0, 1, 2 * PIECE, 5 * PIECE, PIECE + 1)
CHUNK_BYTES = 4 * PIECE
Make = Callable[..., "Rig"]


class Rig:
    """A gradient store over a late engine, and its plain twin."""

    def __init__(self, folder: Path, *, seed: int = 0, eager: float = 0.3, **options: object):
        self.faults = Faults()
        self.engine = LateEngine(3, seed=seed, faults=self.faults, eager=eager)
        self.directory = SwapDirectory(folder, self.engine)  # type: ignore[arg-type]
        self.extents = ExtentStore([self.directory], self.engine)  # type: ignore[arg-type]
        specs = specs_of(SIZES, options.pop("dtype", torch.float32))  # type: ignore[arg-type]
        self.layout: Layout = pack(specs, 2 * PIECE)
        placement = placement_of(self.layout, arena_bytes=0, **options)  # type: ignore[arg-type]
        home = Slab(max(placement.gradient_host_bytes, 1))
        self.spill = Slab(4 * CHUNK_BYTES)
        self.store = GradientStore(placement, home, self.spill, self.extents, Timeline())
        self.plain = Plain(specs)

    def add(self, parameter: int, seed: int) -> None:
        gradient = random_values(seed, SIZES[parameter])
        self.store.add(parameter, gradient)
        self.plain.add_gradient(parameter, gradient)

    def check(self, parameter: int) -> None:
        assert same_bits(self.store.read(parameter), self.plain.gradients[parameter])

    def check_all(self) -> None:
        assert self.store.present == self.plain.gradients.keys()
        assert self.store.norm() == self.plain.norm()
        for parameter in self.plain.gradients:
            self.check(parameter)

    def act(self, action: str, parameter: int, seed: int) -> None:
        """One step of a script; what has no gradient is not read."""
        if action == "add":
            self.add(parameter, seed)
        elif action == "clear":
            self._forget(parameter)
        elif action == "capture":
            assert self.store.capture() == self.plain.gradients.keys()
            self.plain.gradients.clear()
        elif action == "read" and parameter in self.plain.gradients:
            self.check(parameter)
        elif action == "release":
            self.store.flush()
            for subgroup in self.layout.subgroups_of(parameter):
                for segment in self.layout.subgroups[subgroup].segments:
                    self._forget(segment.parameter)
                self.store.release(subgroup)

    def _forget(self, parameter: int) -> None:
        self.store.clear(parameter)
        self.plain.gradients.pop(parameter, None)

    def staged(self, subgroup: int) -> torch.Tensor:
        out = torch.empty(self.layout.subgroups[subgroup].numel)
        for operation in self.store.stage(subgroup, out):
            operation.result()
        return out

    def close(self) -> None:
        self.directory.close()
        self.engine.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make_rig(**options: object) -> Rig:
        rigs.append(Rig(tmp_path, **options))  # type: ignore[arg-type]
        return rigs[-1]

    # Nothing is in flight behind the back of a late engine, so there is nothing to wait for.
    with patch("swap.gradients.spill._RELEASE_SECONDS", 0.0):
        yield make_rig
    for rig in rigs:
        rig.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    script=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add", "clear", "capture", "read", "release"]),
            st.integers(0, len(SIZES) - 1),
        ),
        max_size=25,
    ),
    spilled=st.sets(st.integers(0, 20)),
)
def test_store_holds_what_plain_tensors_would(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    dtype: torch.dtype,
    script: list[tuple[str, int]],
    spilled: set[int],
) -> None:
    folder = tmp_path_factory.mktemp("swap")
    rig = Rig(folder, seed=seed, dtype=dtype, gradient_on_nvme=spilled.__contains__)
    with closing(rig), patch("swap.gradients.spill._RELEASE_SECONDS", 0.0):
        for number, (action, parameter) in enumerate(script):
            rig.act(action, parameter, number)
        rig.check_all()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch._neg_view,
    "strided": lambda x: torch.stack([x, -x], dim=1)[:, 0],
    "expanded": lambda x: x[:1].expand(x.numel()),
    "misaligned": lambda x: torch.cat([torch.zeros(3), x])[3:],
    "double": torch.Tensor.double,
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("on_nvme", [False, True])
def test_gradient_of_any_form_is_stored_by_its_values(make: Make, name: str, on_nvme: bool) -> None:
    rig = make(gradient_on_nvme=lambda group: on_nvme)
    for parameter, numel in enumerate(SIZES):
        gradient = VIEWS[name](random_values(parameter, numel))
        for _ in range(1 + parameter % 2):
            rig.store.add(parameter, gradient)
            rig.plain.add_gradient(parameter, torch.empty(numel).copy_(gradient))
    rig.check_all()


@pytest.mark.parametrize("seed", range(4))
def test_gradient_added_after_clearing_survives_the_write_of_the_one_before(
    make: Make, seed: int
) -> None:
    rig = make(seed=seed, eager=0.0)
    rig.add(3, seed=1)
    rig.act("clear", 3, seed=0)
    rig.add(3, seed=2)
    rig.engine.carry_out_all()
    rig.check_all()


@pytest.mark.parametrize("after", range(2))
def test_gradient_added_after_an_interrupt_survives_the_writes_of_the_one_before(
    make: Make, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(eager=0.0)
    submit, left = rig.extents.write, iter(range(after))

    def cut(*arguments: Any) -> Operation:
        operation = submit(*arguments)
        if next(left, None) is None:
            raise KeyboardInterrupt
        return operation

    with monkeypatch.context() as patched:
        patched.setattr(rig.extents, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            rig.store.add(5, random_values(1, SIZES[5]))
    assert rig.engine.num_in_flight == 0
    rig.act("clear", 5, seed=0)
    rig.add(5, seed=2)
    rig.store.flush()
    rig.engine.carry_out_all()
    rig.check_all()


@pytest.mark.parametrize("seed", range(20))
def test_small_spill_slab_is_enough_whatever_order_writes_end_in(make: Make, seed: int) -> None:
    rig = make(seed=seed, eager=0.5)
    for parameter in range(len(SIZES)):
        rig.add(parameter, seed=parameter)
    rig.check_all()


@pytest.mark.parametrize("after", range(12))
def test_spill_that_failed_is_raised_and_written_by_the_next_who_needs_it(
    make: Make, after: int
) -> None:
    rig = make(seed=after)
    rig.faults.arm("write", errno.EIO, after=after)
    raised, told = [], ""
    for parameter in range(len(SIZES)):
        try:
            rig.store.add(parameter, random_values(parameter, SIZES[parameter]))
        except AioError as error:
            raised.append(error)
            told = f"gradient of {rig.layout.specs[parameter].name} was lost: .*optimizer.zero_grad"
            assert parameter not in rig.store.present
            rig.store.add(parameter, random_values(parameter, SIZES[parameter]))
        rig.plain.add_gradient(parameter, random_values(parameter, SIZES[parameter]))
    if not raised:
        told = r"spilled gradients.*flush.*zero_grad"
        with pytest.raises(AioError) as caught:
            rig.store.flush()
        raised.append(caught.value)
    assert re.search(told, str(raised[0]))
    assert [error.errno for error in raised] == [errno.EIO]
    assert raised[0].filename == str(rig.directory.path / "state.swap")
    rig.store.flush()
    rig.check_all()


def test_gradient_that_is_read_before_its_spill_is_written_says_what_it_waits_for(
    make: Make,
) -> None:
    rig = make(eager=0.0)
    rig.faults.arm("write", errno.EIO)
    rig.add(3, seed=1)
    with pytest.raises(AioError, match=r"spilled gradients.*flush.*zero_grad"):
        rig.store.read(3)
    assert same_bits(rig.store.read(3), rig.plain.gradients[3])


def test_staging_a_subgroup_whose_spill_failed_raises_until_it_is_written(make: Make) -> None:
    rig = make(eager=0.0)
    rig.faults.arm("write", errno.ENOSPC, times=2)
    rig.add(3, seed=1)
    (subgroup,) = rig.layout.subgroups_of(3)
    rig.store.capture()
    for _ in range(2):
        with pytest.raises(AioError):
            rig.staged(subgroup)
    segment = rig.layout.segments_of[3][0]
    values = rig.staged(subgroup)[segment.offset : segment.offset + segment.length]
    assert same_bits(values, rig.plain.gradients[3])


def test_writes_that_failed_together_are_one_error_whichever_is_waited_for(make: Make) -> None:
    rig = make(eager=0.0)
    subgroups = sorted({s for p in (1, 6) for s in rig.layout.subgroups_of(p)})
    assert len(subgroups) > 1
    chunks = sum(len(rig.layout.segments_of[p]) for p in (1, 6))
    rig.faults.arm("write", errno.ENOSPC, times=chunks)
    for parameter in (1, 6):
        rig.add(parameter, seed=parameter)
    assert rig.faults.raised == chunks
    with pytest.raises(AioError):
        rig.staged(subgroups[0])
    for subgroup in subgroups:
        rig.staged(subgroup)
    rig.check_all()


@pytest.mark.parametrize("given_up", [None, 6])
def test_writes_that_fail_of_gradients_that_were_given_up_are_told_to_nobody(
    make: Make, given_up: int | None
) -> None:
    rig = make(eager=0.0)
    rig.faults.arm("write", errno.ENOSPC, times=10)
    rig.store.add(6, random_values(6, SIZES[6]))
    rig.store.clear(given_up)
    rig.faults.disarm()
    rig.store.flush()
    assert rig.spill.used_bytes == 0
    rig.add(6, seed=7)
    rig.check_all()


def test_a_flush_beside_does_not_write_what_is_cleared_over_what_comes_after(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the gradient before has failed, and another thread is about to repeat it."""
    rig = make(eager=0.0)
    rig.faults.arm("write", errno.EIO)
    rig.store.add(3, random_values(1, SIZES[3]))
    write_again, is_late = SpillWriter._write_again, threading.Event()
    may_go_on = threading.Event()

    def write_late(*arguments: Any) -> bool:
        is_late.set()
        assert may_go_on.wait(10)
        return write_again(*arguments)

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as other:
        patched.setattr(SpillWriter, "_write_again", write_late)
        flushing = other.submit(rig.store.flush)
        assert is_late.wait(10)
        rig.store.clear()
        rig.add(3, seed=2)
        rig.engine.carry_out_all()
        may_go_on.set()
        flushing.exception()  # it may be told of the write that has failed
    rig.engine.carry_out_all()
    rig.check_all()


def test_disk_that_stays_broken_is_an_error_not_a_wait(make: Make) -> None:
    rig = make(eager=0.0)
    rig.faults.arm("write", errno.EIO, times=1000)
    rig.add(2, seed=0)
    with pytest.raises(AioError) as caught:
        rig.add(5, seed=1)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(("kind", "after"), [("read", 0), ("read", 2), ("write", 0)])
def test_accumulation_that_fails_leaves_no_gradient(make: Make, kind: Kind, after: int) -> None:
    rig = make(eager=0.0)
    rig.add(5, seed=1)
    rig.store.flush()
    rig.faults.arm(kind, errno.EIO, after=after)
    with pytest.raises(AioError):
        rig.add(5, seed=2)
    assert 5 not in rig.store.present
    rig.add(5, seed=3)
    rig.plain.gradients = {5: random_values(3, SIZES[5])}
    rig.check_all()


def test_extents_are_taken_at_the_start_and_kept(make: Make) -> None:
    rig = make()
    expected = sum(4 * group.numel for group in rig.layout.subgroups)
    assert rig.extents.used_bytes == expected
    for parameter in range(len(SIZES)):
        rig.add(parameter, seed=parameter)
    rig.store.flush()
    for group in rig.layout.subgroups:
        rig.store.release(group.index)
        assert rig.store.stage(group.index, torch.empty(group.numel)) == []
    assert rig.extents.used_bytes == expected
    assert rig.spill.used_bytes == 0


def test_subgroups_can_be_staged_while_others_get_gradients(make: Make) -> None:
    rig = make()
    for parameter in range(4):
        rig.add(parameter, seed=parameter)
    staged = sorted({s for parameter in range(4) for s in rig.layout.subgroups_of(parameter)})
    rig.store.capture()
    captured, rig.plain.gradients = rig.plain.gradients, {}
    seen: dict[int, torch.Tensor] = {}

    def stage() -> None:
        for subgroup in staged:
            seen[subgroup] = rig.staged(subgroup)
            rig.store.release(subgroup)

    thread = threading.Thread(target=stage)
    thread.start()
    for round_ in range(5):
        for parameter in (4, 5):
            rig.add(parameter, seed=10 * round_ + parameter)
    thread.join()
    rig.check_all()
    for parameter, expected in captured.items():
        for segment in rig.layout.segments_of[parameter]:
            stop = segment.offset + segment.length
            values = seen[segment.subgroup][segment.offset : stop]
            assert same_bits(values, expected[segment.start : segment.start + segment.length])
