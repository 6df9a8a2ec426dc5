"""The manifest as bytes: JSON behind a first line with the SHA-256 of all that follows it.

`decode_manifest` trusts nothing: size, checksum, JSON, types and ranges of every field are checked
here, what fields say about each other in `checkpoint.format.rules`. Limits bound time and memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Final, TypeVar

from checkpoint.collector import paused_collector
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.bulk.fields import as_crc, as_size, as_text, check_keys
from checkpoint.format.bulk.tensors import decode_tensors
from checkpoint.format.records import (
    ChunkRecord,
    FileRecord,
    Manifest,
    Shape,
    TensorRecord,
)
from checkpoint.format.rules import validate

MANIFEST_NAME = "manifest.json"
FORMAT = "infinity-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_JSON_VALUES: Final = 16_000_000

_T = TypeVar("_T")

_FIRST_LINE = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n')
_FIRST_LINE_BYTES = len('{"sha256":"') + 64 + len('",\n')


def encode_manifest(manifest: Manifest, tree_text: str | None = None) -> bytes:
    """The file's bytes. `tree_text` is `encode_node(manifest.tree)`, where it is known already.

    Raises ValueError if readers would not accept the manifest.
    """
    try:
        validate(manifest)
    except CorruptCheckpointError as error:
        raise ValueError(f"this checkpoint would not load: {error}") from error
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "uuid": manifest.uuid,
        "world_size": manifest.world_size,
        **({"saved": manifest.saved} if manifest.saved else {}),
        "roots": manifest.roots,
        "files": [_file_node(file) for file in manifest.files],
        "storages": manifest.storages,
    }
    lines = [f"{json.dumps(key)}:{encode_node(value)}" for key, value in fields.items()]
    lines.append(f'"tensors":[{",".join(map(_tensor_text, manifest.tensors))}]')
    lines.append(f'"tree":{encode_node(manifest.tree) if tree_text is None else tree_text}')
    body = (",\n".join(lines) + "}\n").encode("ascii")
    raw = b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body
    check_limits(raw)
    return raw


def encode_node(node: Any) -> str:
    """JSON text in ASCII, without spaces."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def check_limits(raw: bytes) -> None:
    """Raises ValueError for a manifest too large to be read back within bounds."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"a manifest of {len(raw)} bytes is larger than the {MAX_MANIFEST_BYTES} that readers "
            "accept; put long lists, texts and bytes into arrays or tensors"
        )
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > MAX_JSON_VALUES:
        raise ValueError(
            f"a manifest of {values} values has more than the {MAX_JSON_VALUES} that "
            "readers accept; put long lists, texts and bytes into arrays or tensors"
        )


def _file_node(file: FileRecord) -> dict[str, Any]:
    return {
        "root": file.root,
        "path": file.path,
        "nbytes": file.nbytes,
        "header_nbytes": file.header_nbytes,
        "header_crc32c": f"{file.header_crc32c:08x}",
    }


def _tensor_text(tensor: TensorRecord) -> str:
    """JSON text; there may be a hundred thousand of them, so it is put together by hand."""
    chunks = ",".join([_chunk_text(chunk, tensor) for chunk in tensor.chunks])
    text = (
        f'{{"name":{encode_basestring_ascii(tensor.name)},"dtype":"{tensor.dtype}",'
        f'"shape":{_list_text(tensor.shape)},"chunks":[{chunks}]'
    )
    if tensor.strides is not None:
        text += f',"strides":{_list_text(tensor.strides)}'
    if tensor.storage is not None:
        text += f',"storage":{_list_text(tensor.storage)}'
    return text + "}"


def _chunk_text(chunk: ChunkRecord, tensor: TensorRecord) -> str:
    box = ""
    if chunk.shape != tensor.shape:
        box = f'"start":{_list_text(chunk.start)},"shape":{_list_text(chunk.shape)},'
    crcs = ",".join([f'"{crc.to_bytes(4).hex()}"' for crc in chunk.crc32c])
    grains = f',"grains":[{chunk.grain_nbytes},"{chunk.grains.hex()}"]' if chunk.grains else ""
    return (
        f'{{"file":{chunk.file},"offset":{chunk.offset},"nbytes":{chunk.nbytes},'
        f'{box}"crc32c":[{crcs}]{grains}}}'
    )


@lru_cache(maxsize=1 << 10)  # there are few different ones
def _list_text(sizes: Shape) -> str:
    return f"[{','.join(map(str, sizes))}]"


@paused_collector()
def decode_manifest(raw: bytes, path: Path | None = None) -> Manifest:
    """Decodes and checks the bytes of a manifest; `path` is for error messages."""
    try:
        manifest = _decode(raw)
        validate(manifest)
    except CorruptCheckpointError as error:
        raise _of_manifest(error, path) from error
    except ValueError as error:
        raise CorruptCheckpointError(str(error), path=path) from error
    except RecursionError as error:
        raise CorruptCheckpointError("the JSON is nested too deep", path=path) from error
    return manifest


def _of_manifest(error: CorruptCheckpointError, path: Path | None) -> CorruptCheckpointError:
    """It is the manifest that is at fault for what it says of a data file."""
    if error.path is None:
        return error.in_file(path)
    moved = CorruptCheckpointError(str(error), path=path)
    moved.tensor, moved.offset, moved.nbytes = error.tensor, error.offset, error.nbytes
    return moved


def _decode(raw: bytes) -> Manifest:
    check_limits(raw)
    match = _FIRST_LINE.match(raw)
    if match is None:
        raise ValueError("does not begin as the manifest of a checkpoint does")
    body = memoryview(raw)[_FIRST_LINE_BYTES:]
    found = hashlib.sha256(body).hexdigest()
    if found != match[1].decode():
        raise ValueError(f"its SHA-256 is {found}, it says {match[1].decode()}")
    return _manifest(_parse(raw))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    if document.get("format") != FORMAT:
        raise ValueError(f"format is not {FORMAT!r}")
    if document.get("version") != VERSION or type(document["version"]) is not int:
        raise ValueError(
            f"version {str(document.get('version'))[:20]} of the format; this library reads "
            f"version {VERSION}"
        )
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object holds a key twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_MANIFEST_KEYS = {"sha256", "format", "version", "uuid", "world_size", "roots"} | {
    "files",
    "storages",
    "tensors",
    "tree",
}


def _manifest(node: dict[str, Any]) -> Manifest:
    check_keys(node, _MANIFEST_KEYS, {"saved"}, "manifest")
    return Manifest(
        uuid=as_text(node["uuid"]),
        world_size=_integer(node, "world_size", low=1),
        roots=tuple(_items(node, "roots", as_text)),
        files=tuple(_items(node, "files", _file)),
        storages=tuple(_items(node, "storages", as_size)),
        tensors=decode_tensors(node["tensors"]),
        tree=node["tree"],
        saved=_integer(node, "saved") if "saved" in node else 0,
    )


_FILE_KEYS = {"root", "path", "nbytes", "header_nbytes", "header_crc32c"}


def _file(node: Any) -> FileRecord:
    check_keys(node, _FILE_KEYS, set(), "file")
    return FileRecord(
        root=None if node["root"] is None else _integer(node, "root"),
        path=as_text(node["path"]),
        nbytes=_integer(node, "nbytes"),
        header_nbytes=_integer(node, "header_nbytes"),
        header_crc32c=as_crc(node["header_crc32c"]),
    )


def _items(node: dict[str, Any], key: str, convert: Callable[[Any], _T]) -> list[_T]:
    if not isinstance(node[key], list):
        raise ValueError(f"{key!r} is not a list")
    return [convert(item) for item in node[key]]


def _integer(node: dict[str, Any], key: str, low: int = 0) -> int:
    value = as_size(node[key])
    if value < low:
        raise ValueError(f"{key!r} is {value}, less than {low}")
    return value
