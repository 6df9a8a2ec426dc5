"""The layout of one data file: a safetensors file made of 4096-byte blocks. Pure, no I/O.

The header is padded with spaces to a multiple of 4096, every tensor begins at one, and what is left
between them is covered by U8 tensors of zeros, so that direct I/O can write the file front to back.

Worked example, one float32 tensor `w` of 1500 elements: the header's length and text fill bytes
0..4095; `w` is bytes 4096..10095, data_offsets [0, 6000]; `__pad__r0-0.0` is bytes 10096..12287,
data_offsets [6000, 8192].
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from checkpoint.format.names import METADATA_KEY, PAD_PREFIX

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""Stock safetensors refuses longer headers."""

DCP_KEY = "DCP_SHARDING_INFO"
_SAVED_OFFSETS = "saved_offsets"


class Entry(NamedTuple):
    """One tensor as a data file shows it: safetensors' code and shape, its place in the whole."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class DataFileLayout:
    """`offsets` are where each entry begins in the file; `nbytes` the whole file's length."""

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def align_up(value: int) -> int:
    """The next multiple of ALIGNMENT: 0 gives 0, 1 gives 4096, 4096 gives 4096."""
    return -(-value // ALIGNMENT) * ALIGNMENT


def plan_data_file(
    entries: Sequence[Entry], *, label: str, metadata: Mapping[str, str]
) -> DataFileLayout:
    """Places the entries one after the other and encodes the header.

    `label` makes the names of gaps unique among the files of a checkpoint. Raises ValueError if the
    header would be longer than safetensors allows.
    """
    rows, offsets, cursor, pads = [], [], 0, list[str]()
    for name, code, shape, _, nbytes in entries:
        end = cursor + nbytes
        rows.append(_row(name, code, shape, cursor, end))
        offsets.append(cursor)
        cursor = align_up(end)
        if cursor != end:
            pads.append(f"{PAD_PREFIX}{label}.{len(pads)}")
            rows.append(_row(pads[-1], "U8", (cursor - end,), end, cursor))
    header = _encode_header(rows, _with_sharding(metadata, entries, pads), ALIGNMENT)
    before = len(header)
    return DataFileLayout(header, tuple([before + offset for offset in offsets]), before + cursor)


def plan_packed_file(entries: Sequence[Entry], *, metadata: Mapping[str, str]) -> DataFileLayout:
    """A plain safetensors file: the entries one after the other, without gaps.

    The first one begins at a page. Given by item size, the largest first, each begins at a multiple
    of its own.

    Raises ValueError if the header would be longer than safetensors allows.
    """
    rows, offsets, cursor = [], [], 0
    for entry in entries:
        rows.append(_row(entry.name, entry.code, entry.shape, cursor, cursor + entry.nbytes))
        offsets.append(cursor)
        cursor += entry.nbytes
    header = _encode_header(rows, dict(metadata), ALIGNMENT)
    return DataFileLayout(
        header, tuple(len(header) + offset for offset in offsets), len(header) + cursor
    )


def _row(name: str, code: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    kind = _kind(code, shape)
    return f'{encode_basestring_ascii(name)}:{{{kind},"data_offsets":[{begin},{end}]}}'


@lru_cache(maxsize=1 << 10)  # there are few different ones
def _kind(code: str, shape: tuple[int, ...]) -> str:
    return f'"dtype":"{code}","shape":[{",".join(map(str, shape))}]'


def _with_sharding(
    metadata: Mapping[str, str], entries: Sequence[Entry], pads: Sequence[str]
) -> dict[str, str]:
    """Adds what torch's HuggingFaceStorageReader merges row ranges by, if there are any."""
    result = {"format": "pt", **metadata}
    if any(any(entry.start) for entry in entries):
        info = {entry.name: {_SAVED_OFFSETS: list(entry.start)} for entry in entries}
        info.update((pad, {_SAVED_OFFSETS: [0]}) for pad in pads)
        result[DCP_KEY] = json.dumps(info, separators=(",", ":"))
    return result


def _encode_header(rows: list[str], metadata: dict[str, str], alignment: int) -> bytes:
    first = f"{json.dumps(METADATA_KEY)}:{json.dumps(metadata, separators=(',', ':'))}"
    text = ("{" + ",".join([first, *rows]) + "}").encode("ascii")
    padded = -(-(8 + len(text)) // alignment) * alignment - 8
    if padded > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of a data file would take {padded} bytes for {len(rows)} entries, more "
            f"than the {MAX_HEADER_BYTES} that safetensors allows; save with more stripe_dirs or "
            "put small tensors together"
        )
    return struct.pack("<Q", padded) + text.ljust(padded)
