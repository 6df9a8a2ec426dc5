"""Extents against a model of who owns which bytes, over one or more directories."""

import errno
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import AioError, File
from swap.storage import extents as module
from swap.storage.drives.directory import SwapDirectory
from swap.storage.extents import Extent, ExtentStore
from swap.storage.volumes import ALIGNMENT
from tests.support.examples import examples
from tests.support.late_engine import Faults, LateEngine

MIB = 1 << 20


class Rig:
    """A store over ``num`` directories and a late engine."""

    def __init__(
        self, stack: ExitStack, root: Path, *, num: int = 1, shares: Sequence[float] | None = None
    ) -> None:
        self.faults = Faults()
        self.engine = LateEngine(3 * num, faults=self.faults)
        stack.callback(self.engine.close)
        engine: Any = self.engine
        self.directories = []
        for number in range(num):
            folder = root / str(number)
            folder.mkdir(exist_ok=True)
            self.directories.append(SwapDirectory(folder, engine))
        self.store = ExtentStore(self.directories, engine, shares=shares)
        for directory in reversed(self.directories):
            stack.callback(directory.close)

    def write(self, extent: Extent, fill: int, start: int = 0, nbytes: int | None = None) -> None:
        nbytes = extent.nbytes - start if nbytes is None else nbytes
        self.store.write(extent, start, np.full(nbytes, fill, np.uint8)).result()

    def holds(self, extent: Extent, fill: int, start: int = 0, nbytes: int | None = None) -> bool:
        out = np.empty(extent.nbytes - start if nbytes is None else nbytes, np.uint8)
        self.store.read(extent, start, out, urgent=True).result()
        return bool((out == fill).all())

    def file_bytes(self) -> list[int]:
        return [directory.file.size() for directory in self.directories]


@contextmanager
def rig_over(root: Path, **options: Any) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack, root, **options)


@settings(max_examples=examples(80), deadline=None)
@given(
    num=st.integers(1, 3),
    script=st.lists(
        st.tuples(
            st.sampled_from(["allocate", "allocate", "release"]),
            st.integers(1, 60_000),
        ),
        max_size=40,
    ),
)
def test_no_byte_has_two_owners_and_bytes_stay(
    tmp_path_factory: pytest.TempPathFactory, num: int, script: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("swap")
    owned: dict[Extent, int] = {}
    fills = itertools.cycle(range(256))
    with patch.object(module, "_GROWTH_BYTES", 64 * 1024), rig_over(root, num=num) as rig:
        for action, number in script:
            if action == "allocate":
                extent = rig.store.allocate(number)
                assert extent.nbytes == -(-number // ALIGNMENT) * ALIGNMENT
                assert extent.offset % ALIGNMENT == 0
                owned[extent] = next(fills)
                rig.write(extent, owned[extent])
            elif action == "release" and owned:
                extent = sorted(owned, key=repr)[number % len(owned)]
                del owned[extent]
                rig.store.release(extent)
            taken = sorted(owned, key=lambda e: (e.directory, e.offset))
            for one, other in itertools.pairwise(taken):
                apart = one.directory != other.directory
                assert apart or one.offset + one.nbytes <= other.offset
            assert rig.store.used_bytes == sum(extent.nbytes for extent in taken)
            assert rig.store.peak_bytes >= rig.store.used_bytes
        for extent, fill in owned.items():
            assert rig.holds(extent, fill)
            assert extent.offset + extent.nbytes <= rig.file_bytes()[extent.directory]
        for extent in owned:
            rig.store.release(extent)
        assert rig.store.used_bytes == 0
    assert list(root.glob("*/*")) == []


def test_parts_are_read_and_written_where_they_belong(tmp_path: Path) -> None:
    with rig_over(tmp_path) as rig:
        before, extent, behind = (rig.store.allocate(3 * ALIGNMENT) for _ in range(3))
        for each in (before, extent, behind):
            rig.write(each, 1)
        rig.write(extent, 2, start=100, nbytes=5000)
        assert rig.holds(extent, 1, start=0, nbytes=100)
        assert rig.holds(extent, 2, start=100, nbytes=5000)
        assert rig.holds(extent, 1, start=5100)
        assert rig.holds(before, 1)
        assert rig.holds(behind, 1)


def test_transfer_beyond_an_extent_is_our_own_mistake(tmp_path: Path) -> None:
    with rig_over(tmp_path) as rig:
        extent = rig.store.allocate(ALIGNMENT)
        with pytest.raises(AssertionError):
            rig.store.write(extent, 1, np.zeros(ALIGNMENT, np.uint8))
        with pytest.raises(AssertionError):
            rig.store.read(extent, 0, np.zeros(ALIGNMENT + 1, np.uint8), urgent=False)


def test_load_follows_the_shares(tmp_path: Path) -> None:
    with rig_over(tmp_path, num=3, shares=[1.0, 2.0, 5.0]) as rig:
        rig.store.reserve(16 * MIB)
        for _ in range(80):
            rig.store.allocate(10 * ALIGNMENT)
        used = [volume.used_bytes // (10 * ALIGNMENT) for volume in rig.store._volumes]
        assert used == [10, 20, 50]


def test_reserve_grows_files_by_shares_once(tmp_path: Path) -> None:
    with rig_over(tmp_path, num=2, shares=[1.0, 3.0]) as rig:
        rig.store.reserve(16 * MIB)
        assert rig.file_bytes() == [4 * MIB, 12 * MIB]
        rig.store.reserve(8 * MIB)
        for _ in range(4):
            rig.store.allocate(MIB)
        assert rig.file_bytes() == [4 * MIB, 12 * MIB]


def test_each_kind_of_transfer_has_a_lane_of_its_own_in_each_directory(tmp_path: Path) -> None:
    with rig_over(tmp_path, num=2) as rig:
        rig.store.reserve(MIB)
        extents = [rig.store.allocate(ALIGNMENT) for _ in range(2)]
        buffer = np.zeros(ALIGNMENT, np.uint8)
        lanes = []
        for extent in extents:
            rig.write(extent, 0)
            rig.store.read(extent, 0, buffer, urgent=True).result()
            rig.store.read(extent, 0, buffer, urgent=False).result()
            lanes += [lane for _, lane, _ in rig.engine.log[-3:]]
        assert sorted(lanes) == list(range(6))


def test_full_directory_leaves_the_load_to_the_others(tmp_path: Path) -> None:
    with rig_over(tmp_path, num=2) as rig:
        full = rig.directories[0].file
        failure = AioError("full", errno=errno.ENOSPC, filename=str(full.path))
        vars(full)["allocate"] = _raise(failure)
        extents = [rig.store.allocate(MIB) for _ in range(4)]
        assert {extent.directory for extent in extents} == {1}


def test_disk_with_less_room_than_a_growth_step_is_used_up(tmp_path: Path) -> None:
    """Growing in large steps must not make a disk full that is not."""
    with rig_over(tmp_path) as rig:
        file = rig.directories[0].file
        allocate = file.allocate

        def allocate_little(offset: int, nbytes: int) -> None:
            if offset + nbytes > 3 * MIB:
                raise AioError("full", errno=errno.ENOSPC, filename=str(file.path))
            allocate(offset, nbytes)

        vars(file)["allocate"] = allocate_little
        extents = [rig.store.allocate(MIB) for _ in range(3)]
        with pytest.raises(AioError) as caught:
            rig.store.allocate(MIB)
        assert caught.value.errno == errno.ENOSPC
        rig.store.release(extents[1])
        assert rig.store.allocate(MIB) == extents[1]


def test_reserving_goes_round_a_disk_with_little_room(tmp_path: Path) -> None:
    with rig_over(tmp_path, num=2) as rig:
        full = rig.directories[0].file
        failure = AioError("full", errno=errno.EDQUOT, filename=str(full.path))
        vars(full)["allocate"] = _raise(failure)
        rig.store.reserve(8 * MIB)
        assert sum(rig.file_bytes()) == 8 * MIB
        vars(rig.directories[1].file)["allocate"] = _raise(failure)
        with pytest.raises(
            AioError, match="full; the swap files take 16777216 bytes over 2"
        ) as one:
            rig.store.reserve(16 * MIB)
        assert (one.value.errno, one.value.filename) == (errno.EDQUOT, str(full.path))


@pytest.mark.parametrize("is_reserved", [True, False])
def test_what_does_not_fit_on_one_disk_goes_to_several(tmp_path: Path, is_reserved: bool) -> None:
    with rig_over(tmp_path, num=3, shares=[8.0, 1.0, 1.0]) as rig:
        for directory, room in zip(rig.directories, (2, 7, 6), strict=True):
            _full_beyond_alone(directory.file, room * MIB)
        if is_reserved:
            rig.store.reserve(15 * MIB)
            assert rig.file_bytes() == [2 * MIB, 7 * MIB, 6 * MIB]
        else:
            rig.store.allocate(15 * MIB)
            assert sum(rig.file_bytes()) == 15 * MIB


@pytest.mark.parametrize("is_reserved", [True, False])
def test_growth_that_fails_on_several_disks_takes_the_room_of_none(
    tmp_path: Path, is_reserved: bool
) -> None:
    with rig_over(tmp_path, num=2) as rig:
        for directory in rig.directories:
            _full_beyond_alone(directory.file, 5 * MIB)
        take = rig.store.reserve if is_reserved else rig.store.allocate
        with pytest.raises(AioError):
            take(11 * MIB)
        assert sum(rig.file_bytes()) == 0
        take(10 * MIB)


def test_failed_growth_changes_nothing(tmp_path: Path) -> None:
    with rig_over(tmp_path, num=2) as rig:
        kept = rig.store.allocate(MIB)
        rig.write(kept, 7)
        sizes, used = rig.file_bytes(), rig.store.used_bytes
        rig.faults.arm("allocate", errno.ENOSPC, times=100)
        with pytest.raises(AioError) as caught:
            rig.store.allocate(500 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename in [str(d.file.path) for d in rig.directories]
        assert (rig.file_bytes(), rig.store.used_bytes) == (sizes, used)
        rig.faults.disarm()
        rig.write(rig.store.allocate(MIB), 8)
        assert rig.holds(kept, 7)


def _raise(failure: BaseException) -> Any:
    def fail(*_: object) -> None:
        raise failure

    return fail


def _full_beyond(store: ExtentStore, nbytes: int) -> None:
    """From now on the disks have so much between them and no more."""
    files = [volume.file for volume in store._volumes]
    for file in files:
        vars(file)["allocate"] = partial(_allocate_within, nbytes, files, file, file.allocate)


def _full_beyond_alone(file: File, nbytes: int) -> None:
    vars(file)["allocate"] = partial(_allocate_within, nbytes, [file], file, file.allocate)


def _allocate_within(
    room: int, files: list[File], file: File, allocate: Any, offset: int, nbytes: int
) -> None:
    others = sum(other.size() for other in files if other is not file)
    if others + max(file.size(), offset + nbytes) > room:
        raise AioError("the disk is full", errno=errno.ENOSPC)
    allocate(offset, nbytes)


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 2), numbers=st.lists(st.integers(-10, 40), max_size=60))
def test_extents_that_come_and_go_find_room_as_long_as_there_are_bytes(
    tmp_path_factory: pytest.TempPathFactory, num: int, numbers: list[int]
) -> None:
    pages = 64
    with rig_over(tmp_path_factory.mktemp("swap"), num=num) as rig:
        rig.store.reserve(pages * ALIGNMENT)
        _full_beyond(rig.store, pages * ALIGNMENT)
        owned: list[tuple[Extent, int]] = []
        for fill, number in enumerate(numbers, 1):
            if number <= 0:
                if owned:
                    extent, _ = owned.pop(number % len(owned))
                    rig.store.release(extent)
            elif rig.store.used_bytes + number * ALIGNMENT <= pages * ALIGNMENT:
                owned.append((rig.store.allocate(number * ALIGNMENT), fill))
                rig.write(*owned[-1])
            else:
                with pytest.raises(AioError, match="the disk is full"):
                    rig.store.allocate(number * ALIGNMENT)
            assert rig.store.used_bytes == sum(extent.nbytes for extent, _ in owned)
        for extent, fill in owned:
            assert rig.holds(extent, fill)
        assert all(size <= pages * ALIGNMENT for size in rig.file_bytes())


def _extent_in_three_pieces(rig: Rig) -> Extent:
    extents = [rig.store.allocate(2 * ALIGNMENT) for _ in range(6)]
    _full_beyond(rig.store, rig.store._volumes[0].nbytes)
    if left := rig.store._volumes[0].ranges.free_bytes:
        rig.store.allocate(left)
    for extent in extents[::2]:
        rig.store.release(extent)
    extent = rig.store.allocate(6 * ALIGNMENT)
    assert len(extent.pieces) == 3
    return extent


def test_parts_of_an_extent_in_pieces_are_read_and_written_where_they_belong(
    tmp_path: Path,
) -> None:
    with rig_over(tmp_path) as rig:
        extent = _extent_in_three_pieces(rig)
        content = np.random.default_rng(0).integers(0, 256, extent.nbytes, np.uint8)
        assert rig.store.write(extent, 0, content).result() == len(content)
        for start, stop in ((0, 100), (8000, 8400), (8192, 16384), (5000, 20000), (16384, 24576)):
            content[start:stop] += 1
            rig.store.write(extent, start, content[start:stop]).result()
            out = np.empty(stop - start, np.uint8)
            assert rig.store.read(extent, start, out, urgent=False).result() == len(out)
            assert np.array_equal(out, content[start:stop])
        out = np.empty_like(content)
        rig.store.read(extent, 0, out, urgent=True).result()
        assert np.array_equal(out, content)


def test_error_in_one_piece_is_raised_when_all_have_ended_and_told_once(tmp_path: Path) -> None:
    with rig_over(tmp_path) as rig:
        extent = _extent_in_three_pieces(rig)
        told: list[Any] = []
        rig.faults.arm("write", errno.EIO, after=1)
        write = rig.store.write(extent, 0, np.zeros(extent.nbytes, np.uint8))
        write.add_done_callback(told.append)
        with pytest.raises(AioError):
            write.result()
        assert write.done()
        assert told == [write]


def _contexts(error: BaseException) -> Iterator[BaseException]:
    """What was being handled when an error was raised, and so on."""
    while error.__context__ is not None:
        error = error.__context__
        yield error


@pytest.mark.parametrize("refusal", [RuntimeError("no waiting here"), MemoryError()])
def test_space_of_transfers_that_nobody_waited_for_is_not_given_back(
    tmp_path: Path, refusal: Exception
) -> None:
    with rig_over(tmp_path) as rig:
        extent, refusals = rig.store.allocate(MIB), [refusal]
        drain = rig.engine.drain

        def refuse_once() -> None:
            for error in [refusals.pop()] if refusals else []:
                raise error
            drain()

        def write_and_fail() -> None:
            rig.store.write(extent, 0, np.full(MIB, 1, np.uint8))
            raise ValueError

        vars(rig.engine).update(drain=refuse_once, carry_out_some=lambda: None)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            rig.store.run_drained(write_and_fail)
        rig.store.release(extent)
        is_refused = isinstance(refusal, RuntimeError)
        assert (refusal in _contexts(caught.value)) == is_refused
        assert rig.engine.num_in_flight == rig.store.used_bytes // MIB == is_refused
        other = rig.store.allocate(MIB)
        rig.write(other, 2)
        assert rig.holds(other, 2)
        assert rig.store.used_bytes == MIB


def test_directory_where_a_write_failed_gets_new_extents_only_when_the_others_are_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rig_over(tmp_path, num=2) as rig:
        rig.store.reserve(8 * ALIGNMENT)
        assert {rig.store.allocate(ALIGNMENT).directory for _ in range(2)} == {0, 1}
        failed = str(rig.directories[1].file.path)
        rig.store.avoid(AioError("cannot write", errno=errno.EROFS, filename=failed))
        assert [rig.store.allocate(ALIGNMENT).directory for _ in range(6)] == [0] * 6
        here = rig.directories[0].file
        rig.faults.arm("allocate", errno.ENOSPC, times=1 << 20, matches=lambda r: r.file is here)
        last = [rig.store.allocate(ALIGNMENT).directory for _ in range(200)]
        assert (last, last[-1]) == (sorted(last), 1)
        rig.store.avoid(AioError("cannot write", errno=errno.EIO, filename=str(here.path)))
        assert len(caplog.records) == 1, "one is left to write to, whatever it does"
