"""CRC-32C in C against google-crc32c, in every form the processor and the callers take it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint._native import ffi, lib
from checkpoint.checksum import copy_ranges, copy_with_crc, crc32c

DATA = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)


@pytest.fixture(params=["instruction", "tables"])
def _code(request: pytest.FixtureRequest) -> Iterator[None]:
    lib.ckpt_crc32c_force_tables(request.param == "tables")
    yield
    lib.ckpt_crc32c_force_tables(0)


def test_the_known_answer_of_the_polynomial() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.usefixtures("_code")
def test_every_length_and_alignment_agrees_with_another_implementation() -> None:
    # Lengths around the ends of the lanes that the sum is cut into: 3 x 256 and 3 x 4096.
    lengths = [*range(70), *range(760, 780), *range(12280, 12300), 100_001]
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
    names = set()
    for forced in (0, 1):
        lib.ckpt_crc32c_force_tables(forced)
        names.add(ffi.string(lib.ckpt_crc32c_isa()))
    lib.ckpt_crc32c_force_tables(0)
    assert b"tables" in names
    assert names <= {b"tables", b"sse4.2", b"armv8-crc"}


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
