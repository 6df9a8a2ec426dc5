"""What was written to swap files is compared with what is read, in whatever parts."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import AioError, Slab
from aio.errors import let_go
from swap.interruptions.undo import Undo
from swap.storage.checksums import BLOCK, CorruptSwapError
from swap.storage.extents import Extent, ExtentStore
from swap.storage.opening import open_extents
from tests.support.examples import examples

BLOCKS = 6


@pytest.fixture(scope="module")
def extents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExtentStore]:
    with Undo() as undo:
        yield open_extents(undo, [tmp_path_factory.mktemp("nvme")], None, verify=True)[1]


def file_of(extents: ExtentStore) -> Path:
    return extents.folders[0] / "state.swap"


def flip(extents: ExtentStore, extent: Extent, at: int) -> None:
    """One bit of a byte of an extent, on the disk."""
    with file_of(extents).open("r+b") as file:
        file.seek(extent.offset + at)
        byte = file.read(1)[0]
        file.seek(extent.offset + at)
        file.write(bytes([byte ^ 8]))
        file.flush()
        os.fsync(file.fileno())


def filled(extents: ExtentStore, seed: int = 0) -> tuple[Extent, np.ndarray]:
    data = np.random.default_rng(seed).integers(0, 256, BLOCKS * BLOCK, np.uint8)
    extent = extents.allocate(data.size)
    extents.write(extent, 0, data).result()
    return extent, data


def read(extents: ExtentStore, extent: Extent, start: int, stop: int) -> np.ndarray:
    out = np.empty(stop - start, np.uint8)
    operation = extents.read(extent, start, out, urgent=True)
    operation.result()
    assert operation.done()
    return out


@settings(max_examples=examples(60), deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, BLOCKS * BLOCK), st.integers(0, 3 * BLOCK)), max_size=6)
)
def test_parts_are_written_and_read_at_any_place(
    extents: ExtentStore, parts: list[tuple[int, int]]
) -> None:
    extent, data = filled(extents)
    for number, (start, size) in enumerate(parts):
        stop = min(start + size, data.size)
        data[start:stop] = number
        extents.write(extent, start, data[start:stop]).result()
        assert read(extents, extent, start, stop).tobytes() == data[start:stop].tobytes()
    assert read(extents, extent, 0, data.size).tobytes() == data.tobytes()
    extents.release(extent)


@settings(max_examples=examples(60), deadline=None)
@given(
    start=st.integers(0, BLOCKS * BLOCK - 1),
    size=st.integers(1, 3 * BLOCK),
    at=st.integers(0, BLOCKS * BLOCK - 1),
)
def test_a_flipped_bit_is_found_by_who_reads_its_block_and_by_nobody_else(
    extents: ExtentStore, start: int, size: int, at: int
) -> None:
    extent, data = filled(extents)
    flip(extents, extent, at)
    stop = min(start + size, data.size)
    block = at // BLOCK * BLOCK
    if start < block + BLOCK and block < stop:
        with pytest.raises(CorruptSwapError, match="nothing has them any more") as caught:
            read(extents, extent, start, stop)
        assert caught.value.offset == extent.offset + block
        assert caught.value.nbytes == BLOCK
        assert caught.value.filename == str(file_of(extents))
        assert isinstance(caught.value, AioError)
    else:
        assert read(extents, extent, start, stop).tobytes() == data[start:stop].tobytes()
    out = np.empty(data.size, np.uint8)
    extents.read(extent, 0, out, urgent=True, as_is=True).result()
    assert np.count_nonzero(out != data) == 1
    extents.release(extent)


def test_an_error_of_damage_that_is_kept_keeps_no_memory_of_reads(extents: ExtentStore) -> None:
    """Or who waits for that memory waits for whoever keeps the error, who may be the same."""
    extent, _ = filled(extents)
    flip(extents, extent, BLOCK + 5)
    kept = []
    with Slab(BLOCKS * BLOCK) as slab:
        for start in (0, 7):  # whole blocks, and parts of some
            with pytest.raises(CorruptSwapError) as caught:
                extents.read(extent, start, slab.allocate(3 * BLOCK), urgent=True).result()
            kept.append(let_go(caught.value))
            del caught
            assert slab.used_bytes == 0
    extents.release(extent)


def test_a_block_that_is_written_again_is_whole_again(extents: ExtentStore) -> None:
    extent, data = filled(extents)
    flip(extents, extent, 2 * BLOCK + 5)
    extents.write(extent, 2 * BLOCK, data[2 * BLOCK : 3 * BLOCK]).result()
    assert read(extents, extent, 0, data.size).tobytes() == data.tobytes()
    extents.release(extent)


def test_an_extent_of_several_pieces_is_verified_as_any_other(extents: ExtentStore) -> None:
    one, other = extents.allocate(2 * BLOCK), extents.allocate(BLOCK)
    both = Extent(one.directory, one.offset, 3 * BLOCK, (one, other))
    data = np.arange(3 * BLOCK, dtype=np.uint32).astype(np.uint8)
    extents.write(both, 0, data).result()
    assert read(extents, both, 100, 3 * BLOCK - 7).tobytes() == data[100:-7].tobytes()
    flip(extents, other, 0)
    with pytest.raises(CorruptSwapError):
        read(extents, both, 0, 3 * BLOCK)
    assert read(extents, both, 0, 2 * BLOCK).tobytes() == data[: 2 * BLOCK].tobytes()
    extents.release(both)


def test_sums_can_be_told_of_the_same_bytes_elsewhere(extents: ExtentStore) -> None:
    extent, data = filled(extents)
    twin, _ = filled(extents, seed=1)
    extents.transfers.note_sums(twin, extents.transfers.sums(extent))
    with pytest.raises(CorruptSwapError):
        read(extents, twin, 0, data.size)
    extents.release_all([extent, twin])


def test_nothing_is_claimed_of_what_was_never_written(extents: ExtentStore) -> None:
    extent = extents.allocate(BLOCK)
    extents.transfers.note_sums(extent, [np.zeros(1, np.uint32)])
    read(extents, extent, 3, BLOCK)
    extents.release(extent)


def test_without_verifying_there_are_no_sums(tmp_path: Path) -> None:
    with Undo() as undo:
        extents = open_extents(undo, [tmp_path], None)[1]
        extent, data = filled(extents)
        flip(extents, extent, 0)
        assert read(extents, extent, 0, data.size).tobytes() != data.tobytes()
        assert extents.transfers.checksum_bytes == 0
        assert extents.transfers.sums(extent) == []


def test_range_that_is_made_zeros_again_is_verified_as_such(extents: ExtentStore) -> None:
    extent, _ = filled(extents)
    if not extents.transfers.zero(extent):
        pytest.skip("needs a file system that makes zeros of ranges, such as ext4 or xfs")
    try:
        assert not read(extents, extent, 0, BLOCKS * BLOCK).any()
        flip(extents, extent, 3 * BLOCK + 7)
        with pytest.raises(CorruptSwapError):
            read(extents, extent, 0, BLOCKS * BLOCK)
    finally:
        extents.release(extent)
