"""A folder of safetensors shards and an index, in which one export takes the place of another.

The index counts, and comes by one rename, when all that it names is durable. Shards have names with
an id first, which no index has named before. When the index that names those is in place, they get
their own names as well, by hard links, what they replace goes, and a second index names them so.
A single file counts by itself, before the index: it is replaced by one rename.

Invariants: whenever the process is killed or the power cut, each index names shards of one export
alone, and all of them, where the file system has hard links. Of what was there before, only files
go that have the name of a new one, that the index of an earlier export lists, or that have an
interim or a temporary name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aio import sync_directory
from checkpoint.directory.files.attributes import Attributes, attributes_at, shared_attributes
from checkpoint.directory.generations import write_durably
from checkpoint.directory.locate import open_regular_file

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 256 << 20
"""Of an index that is looked at; no model has names of this length."""
_OURS = {"made_by": "infinity-offload"}
"""In the metadata of our indexes: what they name may be replaced by what a later export makes."""
_PASSING = "passing"
"""In the metadata of an index: files that there may be beside those that it names, until the next
index says otherwise."""
_INTERIM = re.compile(r"model-export-[0-9a-f]{8}(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
_NAME = re.compile(rf"{_INTERIM.pattern}|model(-[0-9]{{5,}}-of-[0-9]{{5,}})?\.safetensors")
_TEMPORARY = re.compile(rf"({_NAME.pattern}|{re.escape(INDEX_NAME)})\.tmp")
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Of a file system without hard links."""


def shard_names(count: int) -> list[str]:
    """What the shards of an export are called."""
    if count == 1:
        return [WHOLE_NAME]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


class ShardFolder:
    """The folder of an export that has its lock: `temporaries` are to be written and synced, then
    `publish` makes them count.

    Raises, on making, OSError, IsADirectoryError and FileExistsError as `write_safetensors` says.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.names = shard_names(count)
        _check_replaceable([path / name for name in [*self.names, INDEX_NAME]])
        made = _made_before(path)
        _check_whole(path, {*self.names, *made})
        self._stale = sorted(made - set(self.names))
        self.discard()
        self.replaced = _replaced(path, self.names, made)
        """What each of `temporaries` takes the attributes of."""
        mark = f"model-export-{secrets.token_hex(4)}"
        self._interim = [name.replace("model", mark, 1) for name in self.names]
        self.temporaries = [path / f"{name}.tmp" for name in self._interim]

    def publish(self, shard_of: Mapping[str, int], total_bytes: int) -> list[Path]:
        """Gives the files, the index last. `shard_of` says in which shard each tensor is.

        Raises OSError. Then the folder is what it was, or what it is to be but for files that
        `passing` lists.
        """
        for temporary, name in zip(self.temporaries, self._interim, strict=True):
            temporary.replace(self.path / name)
        sync_directory(self.path)
        passing = {_PASSING: [*self._stale, *self.names]}
        self._put_index(shard_of, self._interim, {"total_size": total_bytes, **_OURS, **passing})
        for interim, name in zip(self._interim, self.names, strict=True):
            self._link(self.path / interim, self.path / name)
        for name in self._stale:
            (self.path / name).unlink(missing_ok=True)
        sync_directory(self.path)
        last: dict[str, Any] = {"total_size": total_bytes, **_OURS}
        if not shard_of:  # else the index would not say whose the file is
            last[_PASSING] = self.names
        self._put_index(shard_of, self.names, last)
        self.discard()
        sync_directory(self.path)
        return [self.path / name for name in [*self.names, INDEX_NAME]]

    def _put_index(
        self, shard_of: Mapping[str, int], files: Sequence[str], metadata: Mapping[str, Any]
    ) -> None:
        weight_map = {name: files[shard] for name, shard in shard_of.items()}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
        temporary = self.path / f"{INDEX_NAME}.tmp"
        replaced = attributes_at(self.path / INDEX_NAME)
        write_durably(temporary, (index + "\n").encode(), replaced)
        temporary.replace(self.path / INDEX_NAME)
        sync_directory(self.path)

    def _link(self, interim: Path, final: Path) -> None:
        """Gives a shard its own name too, or instead where there are no hard links: until the next
        index is there, readers miss it then.
        """
        linked = final.with_name(f"{final.name}.tmp")
        try:
            linked.hardlink_to(interim)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            linked = interim
        linked.replace(final)

    def discard(self) -> None:
        """Removes what exports that did not finish have left, but for what the index names."""
        named = _named_by_index(self.path)
        for file in self.path.iterdir():
            is_interim = _INTERIM.fullmatch(file.name) and file.name not in named
            if is_interim or _TEMPORARY.fullmatch(file.name):
                file.unlink(missing_ok=True)


def _replaced(folder: Path, names: Sequence[str], made: Iterable[str]) -> list[Attributes | None]:
    """Of the file of each name; where there is none, what those have in common that are `made`
    before, which are replaced together.
    """
    found = {name: attributes_at(folder / name) for name in {*names, *made}}
    shared = shared_attributes([one for one in found.values() if one is not None])
    return [found[name] or shared for name in names]


def _check_replaceable(files: Sequence[Path]) -> None:
    for file in files:
        if file.is_dir() and not file.is_symlink():
            what = "is where an export puts a file; remove it, or export to another folder"
            raise IsADirectoryError(errno.EISDIR, what, str(file))


def _check_whole(folder: Path, names: Iterable[str]) -> None:
    """Raises FileExistsError for what readers would take and we did not make."""
    whole = folder / WHOLE_NAME
    if WHOLE_NAME not in names and os.path.lexists(whole):
        what = "would be loaded instead of the shards; remove it, or export to another folder"
        raise FileExistsError(errno.EEXIST, what, str(whole))


def _made_before(folder: Path) -> set[str]:
    """Names of the files that the index of an earlier export to a folder says were made."""
    index = _read_index(folder)
    try:
        if not _OURS.items() <= index["metadata"].items():
            return set()
        names = [*index["weight_map"].values(), *index["metadata"].get(_PASSING, ())]
    except (LookupError, TypeError, AttributeError):
        return set()  # somebody else made it
    return {name for name in names if isinstance(name, str) and _NAME.fullmatch(name)}


def _named_by_index(folder: Path) -> set[str]:
    """Names of the shards that readers look for, whoever made the index."""
    try:
        names = list(_read_index(folder)["weight_map"].values())
    except (LookupError, TypeError, AttributeError):
        return set()
    return {name for name in names if isinstance(name, str)}


def _read_index(folder: Path) -> Any:
    """None where there is none. Raises OSError for one that cannot be read."""
    try:
        with open_regular_file(folder / INDEX_NAME) as (file, _):
            return json.loads(file.read(_MAX_INDEX_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return None  # a pipe is no file of ours
