"""The parsers that read what lies on disks, each with what it may raise and a first input."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import checkpoint
from checkpoint.bench.conditions.workload import model_workload
from checkpoint.directory.owners import opened_directory, read_owner
from checkpoint.directory.stripe_list import listed_stripes
from checkpoint.errors import CorruptCheckpointError
from checkpoint.interop.packing import pack, unpack
from checkpoint.interop.shard_folder import ShardFolder
from infinity.snapshots.entries import listed, read_entry
from infinity.values.initial.weight_files import INDEX, WHOLE, WeightFolder
from swap.storage.drives import bandwidth
from swap.storage.drives.directory import FOLDER

_GOLDEN = Path(__file__).parents[2] / "tests" / "checkpoint" / "golden" / "nodes"
_UUID = "00c0ffee"
_DATA = f"{_UUID}/r0-0.safetensors"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Target:
    """``prepare`` gives, for a folder of its own, what is to be done with each input."""

    prepare: Callable[[Path], Callable[[bytes], object]]
    first: Callable[[], list[bytes]]
    allowed: tuple[type[Exception], ...] = field(default=())


def _golden(name: str) -> bytes:
    return gzip.decompress((_GOLDEN / f"{name}.gz").read_bytes())


def _body() -> bytes:
    return _golden("manifest.json").split(b"\n", 1)[1]


def _striped() -> bytes:
    """A manifest whose data files are on stripes, which are not there."""
    file = _GOLDEN.parent / "striped" / "step" / "manifest.json.gz"
    return gzip.decompress(file.read_bytes()).split(b"\n", 1)[1]


def signed(body: bytes) -> bytes:
    """A manifest of this body, whose checksum is right."""
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def _checkpoint_in(folder: Path) -> None:
    (folder / _UUID).mkdir()
    (folder / _DATA).write_bytes(_golden(_DATA))


def _load(folder: Path) -> None:
    """By all ways; a report is no exception, whatever is wrong."""
    checkpoint.verify(folder)
    checkpoint.load(folder)
    checkpoint.list_tensors(folder)


def _manifest(folder: Path) -> Callable[[bytes], object]:
    _checkpoint_in(folder)

    def attempt(given: bytes) -> None:
        (folder / "manifest.json").write_bytes(signed(given.removeprefix(b"{")))
        _load(folder)

    return attempt


def _tree(folder: Path) -> Callable[[bytes], object]:
    _checkpoint_in(folder)
    head = _body().partition(b'"tree":')[0]

    def attempt(given: bytes) -> None:
        (folder / "manifest.json").write_bytes(signed(head + b'"tree":' + given + b"}\n"))
        checkpoint.load(folder)

    return attempt


def _data_file(folder: Path) -> Callable[[bytes], object]:
    """As long as the manifest says: all else is refused at once."""
    _checkpoint_in(folder)
    (folder / "manifest.json").write_bytes(_golden("manifest.json"))
    whole = _golden(_DATA)

    def attempt(given: bytes) -> None:
        (folder / _DATA).write_bytes((given + whole[len(given) :])[: len(whole)])
        _load(folder)

    return attempt


def _stripes(folder: Path) -> Callable[[bytes], object]:
    def attempt(given: bytes) -> None:
        (folder / "stripes.json").write_bytes(given)
        for stripe in listed_stripes(folder, _UUID):
            stripe.is_away()

    return attempt


def _owner(folder: Path) -> Callable[[bytes], object]:
    def attempt(given: bytes) -> None:
        (folder / "owner.json").write_bytes(given)
        with opened_directory(folder) as directory:
            assert directory is not None
            owner = read_owner(directory)
        if owner is not None:
            owner.is_at(folder / "stripes.json")
            owner.encode()

    return attempt


def _weights(folder: Path) -> Callable[[bytes], object]:
    def attempt(given: bytes) -> None:
        (folder / WHOLE).write_bytes(given)
        weights = WeightFolder(folder)
        try:
            for name in weights.names:
                weights.on_meta(name)
                weights.read(name)
        finally:
            weights.close()

    return attempt


def _workload(folder: Path) -> Callable[[bytes], object]:
    def attempt(given: bytes) -> None:
        (folder / WHOLE).write_bytes(given)
        model_workload(folder)

    return attempt


def _index(folder: Path) -> Callable[[bytes], object]:
    shard = save({"a": torch.ones(2)})

    def attempt(given: bytes) -> None:
        (folder / "model-00001-of-00001.safetensors").write_bytes(shard)
        (folder / INDEX).write_bytes(given)
        with suppress(FileExistsError, IsADirectoryError):
            ShardFolder(folder, 2)
        WeightFolder(folder).close()

    return attempt


def _packed(_: Path) -> Callable[[bytes], object]:
    whole = pack({"a": torch.arange(10), "b": [1, torch.ones(3), "text"]}).numpy().tobytes()
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    data = whole[-(-(_LENGTH_BYTES + length) // 4096) * 4096 :]

    def attempt(given: bytes) -> None:
        head = signed(given.removeprefix(b"{"))
        start = len(head).to_bytes(_LENGTH_BYTES, "little") + head
        padding = bytes(-len(start) % 4096)
        unpack(torch.frombuffer(bytearray(start + padding + data), dtype=torch.uint8))

    return attempt


def _cut_off(_: Path) -> Callable[[bytes], object]:
    return lambda given: unpack(torch.frombuffer(bytearray(given or b"\0"), dtype=torch.uint8))


def _bandwidth(folder: Path) -> Callable[[bytes], object]:
    (folder / FOLDER).mkdir()

    def attempt(given: bytes) -> None:
        (folder / FOLDER / "bandwidth.json").write_bytes(given)
        bandwidth.kept(folder)

    return attempt


_TABLES = ("groups", "segments", "ranges")


def _snapshot(folder: Path) -> Callable[[bytes], object]:
    """The input is the tree of a snapshot as JSON, with tables as lists, dtypes as their names."""
    points = folder / "points"
    points.mkdir()

    def attempt(given: bytes) -> None:
        try:
            tree = json.loads(given)
            _put_tensors(tree)
            checkpoint.save(tree, points / "first")
        except (ValueError, TypeError, RecursionError):
            return  # nothing that anybody could have saved
        listed(points)
        contents = read_entry(points / "first").contents
        for name, numel in contents.parameters:
            for component in ("weight", "exp_avg"):
                if any(component in (c.name for c in g.components) for g in contents.groups):
                    list(contents.overlaps(name, component, 0, numel))

    return attempt


def _put_tensors(tree: Any) -> None:
    contents = tree.get("contents") if isinstance(tree, dict) else None
    if not isinstance(contents, dict):
        return
    for name in _TABLES:
        with suppress(ValueError, TypeError, RuntimeError, KeyError, OverflowError):
            contents[name] = torch.tensor(contents[name])
    for kind in contents.get("kinds") or ():
        for entry in kind if isinstance(kind, list) else ():
            if isinstance(entry, list) and len(entry) > 1 and entry[1] in ("float32", "bfloat16"):
                entry[1] = getattr(torch, entry[1])


_SNAPSHOT = {
    "point": {
        "format": 1,
        "name": "first",
        "number": 3,
        "model": "0" * 32,
        "time_ns": 1_700_000_000_000_000_000,
        "step": 7,
        "kept_bytes": 8192,
    },
    "contents": {
        "parameters": [["a", 512], ["b", 300]],
        "kinds": [[["weight", "bfloat16", False, 1], ["exp_avg", "float32", True, 1]]],
        "files": ["0123456789ab"],
        "groups": [[0, 1024, 0]],
        "segments": [[0, 0, 0, 512, 0], [1, 0, 0, 300, 512]],
        "ranges": [[0, 0, 0, 0, 4096], [0, 1, 0, 8192, 4096]],
    },
}
_TENSORS = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
_ERRORS = (CorruptCheckpointError,)
_OF_FILES = (ValueError, OSError)

TARGETS = {
    "manifest": Target(_manifest, lambda: [b"{" + _body(), b"{" + _striped()], _ERRORS),
    "tree": Target(_tree, lambda: [_body().partition(b'"tree":')[2][:-2]], _ERRORS),
    "data_file": Target(_data_file, lambda: [_golden(_DATA)[:4400]], _ERRORS),
    "stripes": Target(
        _stripes,
        lambda: [json.dumps([f"/nowhere/x.{_UUID}", {"inodes": [2]}]).encode()],
    ),
    "owner": Target(
        _owner,
        lambda: [json.dumps({"stripes": "/nowhere", "inode": 2, "changed": 3}).encode()],
    ),
    "weights": Target(_weights, lambda: [save(_TENSORS)], _OF_FILES),
    "workload": Target(_workload, lambda: [save(_TENSORS)], _OF_FILES),
    "index": Target(
        _index,
        lambda: [
            json.dumps(
                {
                    "metadata": {"total_size": 8, "made_by": "infinity-offload", "passing": ["x"]},
                    "weight_map": {"a": "model-00001-of-00001.safetensors"},
                }
            ).encode()
        ],
        _OF_FILES,
    ),
    "packed": Target(
        _packed,
        lambda: [b"{" + _packed_body()],
        _ERRORS,
    ),
    "cut_off": Target(_cut_off, lambda: [pack([1, 2.5]).numpy().tobytes()], _ERRORS),
    "bandwidth": Target(_bandwidth, lambda: [b'{"read": 1e9, "write": 2e9}'], _OF_FILES),
    "snapshot": Target(_snapshot, lambda: [json.dumps(_SNAPSHOT).encode()], _OF_FILES),
}


def _packed_body() -> bytes:
    whole = pack({"a": torch.arange(10), "b": [1, torch.ones(3), "text"]}).numpy().tobytes()
    length = int.from_bytes(whole[:_LENGTH_BYTES], "little")
    return whole[_LENGTH_BYTES : _LENGTH_BYTES + length].split(b"\n", 1)[1]


def place_of(name: str, folder: Path) -> Path:
    """A new folder for a target in another."""
    made = folder / f"{name}-{os.getpid()}"
    made.mkdir()
    return made
