"""Safetensors files of a model's weights: which of a folder count, and what is in them.

A folder is read as ``from_pretrained`` of Hugging Face reads it: ``model.safetensors`` alone, or
else the shards that ``model.safetensors.index.json`` names. Nothing below the folder counts, nor
any other file beside these; a folder with several files and no index is refused, because any choice
between them could be the wrong one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aio import open_regular_file, read_regular_file
from checkpoint.format.elements import BY_CODE
from infinity.values.initial.file_windows import (
    FileWindows,
    Identity,
    StoredRange,
    changed,
    identity_of,
)

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8


class WeightFolder:
    """The tensors of ``path``, a file or a folder, by the names that they are stored under.

    Raises ``FileNotFoundError`` for a file that is not there, ``ValueError`` for a folder of which
    it cannot be said what is in it, and for files that are none.
    """

    def __init__(self, path: Path, *, explicit: str | None = None) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        self._headers: dict[Path, _Header] = {}
        self._identities: dict[Path, Identity] = {}
        self._opened: tuple[Path, Any] | None = None
        for file in files_of(path, explicit=explicit):
            for name in self._open(file).keys():  # noqa: SIM118  not a mapping
                if name in self._files:
                    raise ValueError(
                        f"{name} is both in {self._files[name].name} and in {file.name} of {path}; "
                        "remove it from one of them"
                    )
                self._files[name] = file
        self.close()

    @property
    def names(self) -> Mapping[str, Path]:
        """The file of each tensor."""
        return self._files

    def on_meta(self, name: str) -> torch.Tensor:
        """Shape and dtype of a tensor."""
        part = self._open(self._files[name]).get_slice(name)
        dtype = BY_CODE.get(part.get_dtype())
        if dtype is None:
            raise ValueError(
                f"{name} of {self._files[name]} has dtype {part.get_dtype()}, which no parameter "
                "takes; dequantise the weights first"
            )
        return torch.empty(part.get_shape(), dtype=dtype, device="meta")

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own: a mapped file that another program shortens would end the
        process (SIGBUS).

        Raises ``ValueError`` for a file that is another than the one that was looked at.
        """
        meta, file = self.on_meta(name), self._files[name]
        header = self._header(file)
        found = header.of(name)
        self._check_kind(found, meta, name)
        memory = torch.empty(found.nbytes, dtype=torch.uint8, device="cpu")
        with open_regular_file(file) as (opened, _):
            opened.seek(found.offset)
            reader: Any = opened
            done = reader.readinto(memory.numpy())
            now = identity_of(os.fstat(opened.fileno()))
        if (done, now) != (found.nbytes, header.identity):
            raise changed(file)
        return memory.view(meta.dtype).view(found.shape)

    def place(self, name: str) -> tuple[Path, int]:
        """The file of a tensor, and where its bytes begin there."""
        file = self._files[name]
        return file, self._header(file).of(name).offset

    def stored(self, name: str, windows: FileWindows) -> StoredRange:
        """A tensor that is read in pieces, through ``windows``.

        Raises ``ValueError`` for a file that is another than the one that was looked at.
        """
        meta, file = self.on_meta(name), self._files[name]
        header = self._header(file)
        found = header.of(name)
        self._check_kind(found, meta, name)
        return StoredRange(windows, file, header.identity, found.offset, meta.dtype, found.shape)

    def _check_kind(self, found: _Entry, meta: torch.Tensor, name: str) -> None:
        if (found.dtype, found.shape, found.nbytes) != (meta.dtype, meta.shape, meta.nbytes):
            raise changed(self._files[name], f", by its {name}")

    def _header(self, file: Path) -> _Header:
        if file not in self._headers:
            self._headers[file] = _header_of(file)
            if self._identities.get(file) != self._headers[file].identity:
                raise changed(file)
        return self._headers[file]

    def check_unchanged(self) -> None:
        """Raises ``ValueError`` for a file that was written to since it was looked at. One whose
        place another has taken, or that is gone, was read as it was.
        """
        for file, before in self._identities.items():
            with suppress(FileNotFoundError):
                now = identity_of(file.stat())
                if now != before and now[:2] == before[:2]:
                    raise changed(file)

    def close(self) -> None:
        """No file stays open; the next read opens its own again."""
        self._opened = None

    def _open(self, file: Path) -> Any:
        if self._opened is None or self._opened[0] != file:
            self._look_at(file)
            try:
                self._opened = file, _opened(file)
            except SafetensorError as error:
                raise ValueError(f"{file} is no safetensors file: {error}") from error
            self._look_at(file)
        return self._opened[1]

    def _look_at(self, file: Path) -> None:
        now = identity_of(file.stat())
        if self._identities.setdefault(file, now) != now:
            self._opened = None
            raise changed(file)


def files_of(path: Path, *, explicit: str | None = None) -> list[Path]:
    """The files that hold the weights at ``path``; ``explicit`` is what its config says of that."""
    if not path.exists():
        raise FileNotFoundError(f"weights={path} does not exist")
    if path.is_file():
        _check_not_pickled(path, path.suffix)
        return _shards(path) if path.name.endswith(".index.json") else [path]
    for name in [explicit] if explicit else [WHOLE, INDEX]:
        file = path / name
        if file.is_file():
            return _shards(file) if name.endswith(".index.json") else [file]
    if explicit:
        raise FileNotFoundError(f"weights={path} has no {explicit}, which its config names")
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise ValueError(
            f"weights={path} has {listed([file.name for file in files])} and no {INDEX} that says "
            "which of them belong together; pass one of the files, or write the index"
        )
    if not files:
        raise ValueError(f"weights={path} has no .safetensors file{_elsewhere(path)}")
    return files


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a safetensors file, by its header; ``dtype`` is None for one of another kind."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Header:
    path: Path
    identity: Identity
    entries: Mapping[str, _Entry]

    def of(self, name: str) -> _Entry:
        """Raises ``ValueError`` for a tensor that was there."""
        if name not in self.entries:
            raise changed(self.path, f", without {name}")
        return self.entries[name]


def _header_of(file: Path) -> _Header:
    """Raises ``ValueError`` for a safetensors file that is none any more."""
    with open_regular_file(file) as (opened, _):
        identity = identity_of(os.fstat(opened.fileno()))
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: _entry(entry, _LENGTH_BYTES + length) for name, entry in header.items()
            }
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            kind = type(error).__name__
            raise changed(file, f" ({kind}: {error})") from error
    return _Header(file, identity, entries)


def _entry(entry: Mapping[str, Any], first: int) -> _Entry:
    low, high = entry["data_offsets"]
    return _Entry(BY_CODE.get(entry["dtype"]), tuple(entry["shape"]), first + low, high - low)


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(read_regular_file(index))["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        raise ValueError(f"{index} is no index of safetensors files: {kind}: {error}") from error
    missing = [name for name, file in zip(names, files, strict=True) if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names {listed(missing)}, which is not there")
    return files


def _elsewhere(path: Path) -> str:
    """What to do about a folder that has something else."""
    below = sorted(path.rglob("*.safetensors"))
    if below:
        return f"; pass {below[0].parent} if those in it are meant"
    for file in sorted(path.iterdir()):
        _check_not_pickled(path, file.suffix)
    return ""


def _check_not_pickled(path: Path, suffix: str) -> None:
    """Raises ``ValueError`` with what converts pickled files, which can run any code."""
    if suffix not in _PICKLED:
        return
    if path.is_dir():
        what = f"model = AutoModel.from_pretrained({str(path)!r}, dtype='auto')"
        how = f"from transformers import AutoModel; {what}; model.save_pretrained('converted')"
        text = "; take the class of the model for AutoModel, or its head is left out"
    else:
        what = f"torch.load({str(path)!r}, map_location='cpu', weights_only=True)"
        how = (
            "import torch; from safetensors.torch import save_file; "
            f"save_file({{k: v.clone() for k, v in {what}.items()}}, 'model.safetensors')"
        )
        text = ""
    raise ValueError(
        f"weights={path} has pickled files alone, which are not read, as they can run any code. "
        f'Convert them once: python -c "{how}"{text}'
    )


_MOST_LISTED = 8
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype are values of the other, rounded at most. Codes of quantised
    weights are not, whatever floats they stand for.
    """
    return stored == wanted or any({stored, wanted} <= kind for kind in _CONVERTED)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


_CONVERTED = (
    {torch.float16, torch.bfloat16, torch.float32, torch.float64},
    {torch.complex32, torch.complex64, torch.complex128},
)


def _opened(file: Path) -> Any:
    """By safetensors, which takes paths in UTF-8 alone: one that is none is named by a number."""
    try:
        os.fspath(file).encode()
    except UnicodeEncodeError:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return safe_open(f"/proc/self/fd/{descriptor}", framework="pt")
        finally:
            os.close(descriptor)
    return safe_open(file, framework="pt")
