"""CRC-32C in C against google-crc32c, in every form the processor and the callers take it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio._native import ffi, lib
from aio.checksum import (
    block_crcs,
    copy_ranges,
    copy_with_crc,
    copy_with_unit_crcs,
    crc32c,
    join_crcs,
)

DATA = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)


WAYS = {
    "tables": lib.AIO_CRC32C_TABLES,
    "instruction": lib.AIO_CRC32C_INSTRUCTION,
    "folding": lib.AIO_CRC32C_FOLDING,
}


@pytest.fixture(params=list(WAYS))
def _code(request: pytest.FixtureRequest) -> Iterator[None]:
    lib.aio_crc32c_at_most(WAYS[request.param])
    yield
    lib.aio_crc32c_at_most(lib.AIO_CRC32C_FOLDING)


def test_the_known_answer_of_the_polynomial() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.usefixtures("_code")
def test_every_length_and_alignment_agrees_with_another_implementation() -> None:
    # Around the ends of the lanes that the sum is cut into (3 x 256, 3 x 4096), and of folds (256
    # bytes at a time, from 2048 on).
    lengths = [*range(70), *range(760, 780), *range(2040, 2060), *range(12280, 12300), 100_001]
    for offset in (0, 1, 3, 7):
        for length in lengths:
            data = DATA[offset : offset + length]
            assert crc32c(data) == google_crc32c.value(data.tobytes()), (offset, length)


@pytest.mark.usefixtures("_code")
def test_a_sum_can_be_continued_anywhere() -> None:
    whole = crc32c(DATA)
    for cut in (0, 1, 7, 4096, 123_457, len(DATA)):
        assert crc32c(DATA[cut:], crc32c(DATA[:cut])) == whole


def test_the_name_of_the_code_follows_the_switch() -> None:
    names = []
    for way in WAYS.values():
        lib.aio_crc32c_at_most(way)
        names.append(ffi.string(lib.aio_crc32c_isa()))
    assert names[0] == b"tables"
    assert set(names[1:]) <= {b"tables", b"sse4.2", b"armv8-crc", b"vpclmulqdq"}
    lib.aio_crc32c_at_most(lib.AIO_CRC32C_FOLDING)


@pytest.mark.usefixtures("_code")
def test_copies_agree_at_every_place_and_length() -> None:
    # On a cache line what is copied goes past the caches; beside one, through them.
    target = np.zeros(len(DATA) + 128, np.uint8)
    line = -target.ctypes.data % 64
    for place in (line, line + 1, line + 32):
        for nbytes in (1, 2047, 2048, 2049, 4096, 65_535, 65_536, 100_001, 131_072 + 77):
            expected = DATA[5 : 5 + nbytes]
            address = target.ctypes.data + place
            for way in (copy_with_crc, None):
                target[:] = 7
                if way is None:
                    copy_ranges([DATA.ctypes.data + 5], [address], [nbytes])
                else:
                    sums = way([DATA.ctypes.data + 5], [address], [nbytes], [crc32c(b"before")])
                    assert sums == [google_crc32c.value(b"before" + expected.tobytes())]
                assert np.array_equal(target[place : place + nbytes], expected)
                assert (target[:place] == 7).all()
                assert (target[place + nbytes :] == 7).all()


pieces = st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 50_000)), max_size=6)


@settings(deadline=None)
@given(pieces)
def test_copies_are_copies_and_sums_are_continued(ranges: list[tuple[int, int]]) -> None:
    base = DATA.ctypes.data
    target = np.full(sum(nbytes for _, nbytes in ranges) + 1, 7, np.uint8)
    places = [0, *np.cumsum([nbytes for _, nbytes in ranges]).tolist()]
    sources = [base + first for first, _ in ranges]
    targets = [target.ctypes.data + place for place in places[:-1]]
    sizes = [nbytes for _, nbytes in ranges]
    before = [crc32c(bytes([k])) for k in range(len(ranges))]
    after = copy_with_crc(sources, targets, sizes, before)
    expected = b"".join(DATA[first : first + nbytes].tobytes() for first, nbytes in ranges)
    assert target.tobytes() == expected + b"\7"
    for k, (first, nbytes) in enumerate(ranges):
        assert after[k] == crc32c(bytes([k]) + DATA[first : first + nbytes].tobytes())
    target[:] = 7
    copy_ranges(sources, targets, sizes)
    assert target.tobytes() == expected + b"\7"


def test_nowhere_as_target_only_sums_and_nothing_as_source_writes_zeros() -> None:
    target = np.full(10, 7, np.uint8)
    sums = copy_with_crc([DATA.ctypes.data, 0], [0, target.ctypes.data], [100, 9], [0, 5])
    assert sums == [crc32c(DATA[:100]), 5]
    assert target.tolist() == [0] * 9 + [7]


def test_several_threads_sum_at_once() -> None:
    big = np.tile(DATA, 320)
    expected = crc32c(big)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(crc32c(big))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * 4096, 100_001])
def test_blocks_are_summed_each_by_itself(nbytes: int) -> None:
    data = DATA[3 : 3 + nbytes]
    expected = [crc32c(data[first : first + 4096]) for first in range(0, nbytes, 4096)]
    assert block_crcs(data, 4096).tolist() == expected


@pytest.mark.parametrize("code", list(WAYS))
@given(data=st.data())
def test_ranges_are_copied_and_summed_in_units_as_their_bytes_are(
    code: str, data: st.DataObject
) -> None:
    lib.aio_crc32c_at_most(WAYS[code])
    nbytes = data.draw(st.integers(1, 40_000))
    unit = data.draw(st.sampled_from([1, 7, 512, 4096, 65_536]))
    cuts = sorted(data.draw(st.sets(st.integers(0, nbytes), max_size=4)) | {0, nbytes})
    out = np.zeros(nbytes, np.uint8)
    found: dict[int, int] = {}
    for low, high in itertools.pairwise(cuts):
        (sums,) = copy_with_unit_crcs(
            [DATA.ctypes.data + low],
            [out.ctypes.data + low],
            [high - low],
            [low % unit],
            [unit],
            [found.get(low // unit, 0) if low % unit else 0],
        )
        found.update(enumerate(sums.tolist(), low // unit))
    assert np.array_equal(out, DATA[:nbytes])
    expected = [crc32c(DATA[low : min(low + unit, nbytes)]) for low in range(0, nbytes, unit)]
    assert found == dict(enumerate(expected))
    last = (nbytes - 1) % unit + 1
    assert join_crcs(np.array(expected, np.uint32), unit, last) == crc32c(DATA[:nbytes])
    lib.aio_crc32c_at_most(lib.AIO_CRC32C_FOLDING)


def test_sums_of_units_of_several_ranges_come_range_by_range() -> None:
    address = DATA.ctypes.data
    sums = copy_with_unit_crcs([address, address], [0, 0], [5000, 300], [0, 3], [4096, 512], [0, 9])
    assert [each.tolist() for each in sums] == [
        [crc32c(DATA[:4096]), crc32c(DATA[4096:5000])],
        [crc32c(DATA[:300], 9)],
    ]
