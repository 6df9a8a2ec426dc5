"""Byte ranges of a space of known size, handed out and taken back. Pure: no memory, no I/O.

Invariants: free ranges never touch one another (neighbours are joined when they come back), free
and allocated ranges together cover the space, and every boundary is a multiple of the alignment.

What is allocated is kept in one table, and each call changes it in one step. The free ranges are an
index of the gaps in it. A call that is cut short by an interrupt has therefore happened or not, and
the index that it may have left half changed is made anew by the next one.
"""

import bisect
from collections.abc import Collection, Sequence

from aio.errors import check_int


class RangeAllocator:
    """Best fit over a sorted list of free ranges.

    Space for `n` bytes is taken in whole multiples of `alignment`. Not thread-safe.
    """

    def __init__(self, nbytes: int, *, alignment: int = 4096) -> None:
        """`nbytes` that do not fill a multiple of `alignment` at the end are never handed out."""
        alignment, nbytes = check_int("alignment", alignment), check_int("nbytes", nbytes)
        if alignment < 1:
            raise ValueError(f"alignment={alignment} is not a positive number of bytes")
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} is negative")
        self.alignment = alignment
        self.apart_bytes = 0
        """Of what is handed out elsewhere in place of ranges: it counts as if it were of these."""
        self._nbytes = 0
        self._allocated: dict[int, int] = {}  # offset -> bytes, rounded up
        self._is_indexed = False  # whether what follows agrees with the table
        self._free_bytes = 0
        self._by_size: list[tuple[int, int]] = []  # (bytes, offset) of the free ranges, sorted
        self._size_at: dict[int, int] = {}  # offset -> bytes of a free range
        self._start_of_end: dict[int, int] = {}  # end -> offset of a free range
        self.grow(nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the space, in bytes, rounded down to the alignment."""
        return self._nbytes

    @property
    def free_bytes(self) -> int:
        self._index()
        return self._free_bytes - self.apart_bytes

    @property
    def used_bytes(self) -> int:
        return self._nbytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The most that one allocate() can get now."""
        self._index()
        largest = self._by_size[-1][0] if self._by_size else 0
        return min(largest, self.free_bytes)

    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each."""
        self._index()
        return list(self._size_at.items())

    def rounded(self, nbytes: int) -> int:
        """What a range of `nbytes` takes from the space."""
        return -(-check_int("nbytes", nbytes) // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a range of at least `nbytes`, or None when no free range is large enough.

        Of those that are, the smallest is taken, and of equal ones that with the lowest offset.
        Raises ValueError unless nbytes > 0. An interrupt on the way back leaves a range that
        nobody knows of, see `release_others`.
        """
        wanted = self.rounded(nbytes)
        if wanted <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes: ask for one or more")
        self._index()
        position = bisect.bisect_left(self._by_size, (wanted, 0))
        if position == len(self._by_size):
            return None
        size, offset = self._by_size[position]
        self._is_indexed = False
        self._allocated[offset] = wanted  # from here on it is taken
        self._remove_free(offset, size)
        if size > wanted:
            self._insert_free(offset + wanted, size - wanted)
        self._free_bytes -= wanted
        self._is_indexed = True
        return offset

    def split(self, offset: int, sizes: Sequence[int]) -> list[int]:
        """Makes one range several, side by side, each to be released by itself; their offsets.

        ValueError unless a range of as many bytes as `sizes` take in whole is allocated there.
        """
        offset = check_int("offset", offset)
        parts, end = {}, offset
        for nbytes in sizes:
            if nbytes <= 0:
                raise ValueError(f"cannot split off {nbytes} bytes: ask for one or more")
            parts[end] = self.rounded(nbytes)
            end += parts[end]
        size = self._allocated.get(offset)
        if size is None or size != end - offset:
            known = "nothing is allocated" if size is None else f"{size} bytes are allocated"
            raise ValueError(f"cannot split {end - offset} bytes at offset {offset}: {known} there")
        self._allocated.update(parts)  # in one step, see above
        return list(parts)

    def release(self, offset: int, *sizes: int) -> None:
        """Takes a range back, or several that are side by side, from `offset` on.

        ValueError, before anything is taken back, unless allocate() or split() gave a range of so
        many bytes there, and once. An interrupt may leave the last ones of several allocated.
        """
        if not sizes:
            raise ValueError(
                f"cannot release nothing at offset {offset}: give the size of the range"
            )
        offset = check_int("offset", offset)
        ends, end = {}, offset
        for nbytes in sizes:
            size = self._allocated.get(end)
            if size is None or size != self.rounded(nbytes):
                known = "not allocated" if size is None else f"allocated with {size} bytes"
                raise ValueError(f"cannot release {nbytes} bytes at offset {end}: it is {known}")
            ends[end] = end = end + size
        self._index()
        self._is_indexed = False
        for start in ends:
            del self._allocated[start]  # from here on it is free
        self._free_bytes += end - offset
        self._join_free(offset, end - offset)
        self._is_indexed = True

    def release_others(self, known: Collection[int]) -> None:
        """Takes back every range whose offset is not among the `known` ones."""
        self._is_indexed = False
        for offset in self._allocated.keys() - set(known):
            del self._allocated[offset]

    def grow(self, nbytes: int) -> None:
        """Adds `nbytes` at the end, in whole multiples of the alignment."""
        nbytes = check_int("nbytes", nbytes)
        if nbytes < 0:
            raise ValueError(f"cannot grow by {nbytes} bytes")
        added = nbytes // self.alignment * self.alignment
        if added:
            self._index()
            self._is_indexed = False
            self._nbytes += added  # from here on it is there
            self._free_bytes += added
            self._join_free(self._nbytes - added, added)
            self._is_indexed = True

    def _index(self) -> None:
        """Finds the free ranges between the allocated ones, unless they are known."""
        if self._is_indexed:
            return
        self._free_bytes = 0
        self._by_size, self._size_at, self._start_of_end = [], {}, {}
        end = 0
        for offset, size in [*sorted(self._allocated.items()), (self._nbytes, 0)]:
            if offset > end:
                self._free_bytes += offset - end
                self._insert_free(end, offset - end)
            end = offset + size
        self._is_indexed = True

    def _join_free(self, offset: int, size: int) -> None:
        """Makes a range free, as one with the free ranges it touches."""
        end = offset + size
        if offset in self._start_of_end:
            offset = self._start_of_end[offset]
            self._remove_free(offset, self._size_at[offset])
        if end in self._size_at:
            after = self._size_at[end]
            self._remove_free(end, after)
            end += after
        self._insert_free(offset, end - offset)

    def _insert_free(self, offset: int, size: int) -> None:
        bisect.insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._start_of_end[offset + size] = offset

    def _remove_free(self, offset: int, size: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._start_of_end[offset + size]
