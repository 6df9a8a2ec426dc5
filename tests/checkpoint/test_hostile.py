"""Manifests made to mislead, with a checksum that fits: refused in bounded time and memory."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpoint
from checkpoint.format.checksum import CRC_BLOCK_BYTES
from tests.support.examples import examples

FOLDER = Path(__file__).parent / "hostile"
Document = dict[str, Any]


def sign(body: bytes) -> bytes:
    """A manifest of this body: the first line with the checksum put before it."""
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def write(path: Path, document: Document) -> None:
    document = {key: value for key, value in document.items() if key != "sha256"}
    path.write_bytes(sign(json.dumps(document)[1:].encode()))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = torch.arange(3000.0)
    state = {
        "big": torch.arange(CRC_BLOCK_BYTES // 8 + 100),
        "model": {"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "shared": [base[:100], base[200:300], base[250:260]],
        "turned": torch.ones(5, 6).t(),
        "array": np.arange(7),
        "scalars": [1, 2.5, None, b"x", 1j, (1,), {2}, torch.float32, np.float32(1)],
    }
    folder = tmp_path_factory.mktemp("original")
    stripes = [folder / "ssd0", folder / "ssd1"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save(state, folder / "step", stripes)
    return folder / "step"


@pytest.fixture(scope="module")
def document(original: Path) -> Document:
    parsed: Document = json.loads((original / "manifest.json").read_bytes())
    return parsed


def refused(original: Path, document: Document) -> checkpoint.CorruptCheckpointError:
    path = original.parent / "hostile"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    write(path / "manifest.json", document)
    with pytest.raises(checkpoint.CorruptCheckpointError) as caught:
        checkpoint.load(path)
    assert not checkpoint.verify(path)
    assert len(str(caught.value)) < 2000
    return caught.value


def test_an_unchanged_manifest_written_again_loads(original: Path, document: Document) -> None:
    path = original.parent / "again"
    path.mkdir()
    write(path / "manifest.json", document)
    assert checkpoint.verify(path).ok


def _set(*keys: str | int) -> Callable[[Document, Any], None]:
    def change(document: Document, value: Any) -> None:
        target: Any = document
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return change


CHUNK = ("tensors", 0, "chunks", 0)
CHANGES: list[tuple[str, Callable[[Document, Any], None], Any]] = [
    ("version", _set("version"), 2),
    ("version", _set("version"), True),
    ("format", _set("format"), "zip"),
    ("uuid", _set("uuid"), "../../.."),
    ("root", _set("roots", 0), "relative"),
    ("root", _set("roots", 0), "/tmp/../etc"),
    ("root", _set("files", 0, "root"), 7),
    ("path of a data file", _set("files", 0, "path"), "/etc/passwd"),
    ("path of a data file", _set("files", 0, "path"), "../step.00000000/r0-0.safetensors"),
    ("path of a data file", _set("files", 0, "path"), "x\0y/r0-0.safetensors"),
    ("path of a data file", _set("files", 0, "path"), "r0-0.safetensors"),
    ("path of a data file", _set("files", 0, "root"), None),
    ("multiple of 4096", _set("files", 0, "nbytes"), 12345678),
    ("header", _set("files", 0, "header_nbytes"), 0),
    ("header", _set("files", 0, "header_nbytes"), 1 << 40),
    ("eight hexadecimal", _set("files", 0, "header_crc32c"), "xyz"),
    ("between 0 and", _set("files", 0, "nbytes"), -4096),
    ("between 0 and", _set("files", 0, "nbytes"), 1 << 64),
    ("should be an integer", _set("files", 0, "nbytes"), 4096.0),
    ("without 'nbytes'", lambda d, _: d["files"][0].pop("nbytes"), None),
    ("unknown key", _set("files", 0, "extra"), 1),
    ("there twice", lambda d, _: d["files"].append(d["files"][0]), None),
    ("there twice", lambda d, _: d["tensors"].append(d["tensors"][0]), None),
    ("no dtype", _set("tensors", 0, "dtype"), "float99"),
    ("no dtype", _set("tensors", 0, "dtype"), "save"),
    ("2\\^63", _set("tensors", 0, "shape"), [1 << 62, 0, 1 << 62]),
    ("more than 64", _set("tensors", 0, "shape"), [1] * 65),
    ("dimensions", _set("tensors", 0, "shape"), [1] * 60),
    ("beyond its tensor", _set("tensors", 0, "shape"), [4]),
    ("do not add up", _set("tensors", 0, "shape"), [1 << 40]),
    ("do not add up", lambda d, _: d["tensors"][0]["chunks"].pop(), None),
    (
        "do not add up",
        lambda d, _: d["tensors"][0]["chunks"].append(d["tensors"][0]["chunks"][0]),
        None,
    ),
    ("chunks overlap", lambda d, _: d["tensors"][0]["chunks"][1].update(start=[1]), None),
    ("in one file", lambda d, _: d["tensors"][0]["chunks"][1].update(file=0), None),
    ("file 9 is not in", _set(*CHUNK, "file"), 9),
    ("misaligned", _set(*CHUNK, "offset"), 4097),
    ("misaligned", _set(*CHUNK, "offset"), 0),
    ("beyond the file", _set(*CHUNK, "offset"), 1 << 50),
    ("cannot have that size", _set(*CHUNK, "nbytes"), 8),
    ("checksums for a chunk", _set(*CHUNK, "crc32c"), []),
    ("without the other", lambda d, _: d["tensors"][0]["chunks"][0].pop("start"), None),
    ("strides", _set("tensors", 0, "strides"), [2]),
    ("strides", _set("tensors", 0, "strides"), [0]),
    ("as many strides", _set("tensors", 0, "strides"), []),
    ("storage 5 of", _set("tensors", 0, "storage"), [5, 0]),
    ("not lie in its storage", _set("tensors", 0, "storage"), [0, 1 << 40]),
    ("index and an offset", _set("tensors", 0, "storage"), [0]),
    ("for 800 bytes of tensors", _set("storages", 0), 1 << 50),
    ("no such tensor", _set("tree"), {"tensor": 99}),
    ("no such tensor", _set("tree"), {"tensor": True}),
    ("no such tensor", _set("tree"), {"tensor": -1}),
    ("knows", _set("tree"), {"tensor": 0, "code": "import os"}),
    ("knows", _set("tree"), {"__reduce__": ["os.system", "true"]}),
    ("knows", _set("tree"), {}),
    ("knows", _set("tree"), {"tuple": 5}),
    ("knows", _set("tree"), {"dict": [1]}),
    ("knows", _set("tree"), {"items": [[1]]}),
    ("unknown tag", _set("tree"), {"items": [[{"list": []}, 1]]}),
    ("should be", _set("tree"), {"items": [[[1], 1]]}),
    ("there twice", _set("tree"), {"items": [[1, 1], [1, 2]]}),
    ("there twice", _set("tree"), {"items": [["a" * 5000, 1], ["a" * 5000, 2]]}),
    ("not a device", _set("tree"), {"tensor": 0, "device": 1 << 70}),
    ("not a device", _set("tree"), {"tensor": 0, "device": 0}),
    ("not a device", _set("tree"), {"tensor": 0, "device": "a device"}),
    ("an element twice", _set("tree"), {"set": [1, 1]}),
    ("base64", _set("tree"), {"bytes": "?"}),
    ("nan, inf", _set("tree"), {"float": "1"}),
    ("no dtype", _set("tree"), {"dtype": "nn"}),
    ("device", _set("tree"), {"device": "a device"}),
    ("64 bits", _set("tree"), {"size": [1 << 70]}),
    ("numpy dtype", _set("tree"), {"numpy": ["O", "00"]}),
    ("numpy dtype", _set("tree"), {"numpy": ["V99999999999999", "00"]}),
    ("numpy scalar", _set("tree"), {"numpy": ["<f8", "00"]}),
    ("array of", _set("tree"), {"array": 0, "dtype": "<f4"}),
    ("plain bytes", _set("tree"), {"array": 0, "dtype": "|O"}),
    (
        "beyond tensor",
        _set("tree"),
        {"view": [0, 0], "dtype": "uint8", "shape": [1 << 40], "strides": [1]},
    ),
    (
        "beyond tensor",
        _set("tree"),
        {"view": [0, 3], "dtype": "int32", "shape": [2], "strides": [1]},
    ),
    (
        "list of sizes",
        _set("tree"),
        {"view": [0, -8], "dtype": "int64", "shape": [2], "strides": [1]},
    ),
    (
        "2\\^63 elements",
        _set("tree"),
        {"view": [0, 0], "dtype": "int64", "shape": [1 << 31] * 5, "strides": [0] * 5},
    ),
    (
        "2\\^63 elements",
        _set("tree"),
        {"view": [0, 0], "dtype": "int64", "shape": [1 << 62, 0, 4], "strides": [0] * 3},
    ),
    ("gradient", _set("tree"), {"tensor": 0, "requires_grad": True}),
    ("true or false", _set("tree"), {"tensor": 0, "parameter": 1}),
    ("a tensor where none", _set("tree"), {"ordereddict": [], "metadata": {"tensor": 0}}),
    ("the key 'a' is there twice", _set("tree"), {"counter": [["a", 1], ["a", 2]]}),
    ("a tensor where none", _set("tree"), {"counter": [["a", {"tensor": 0}]]}),
]


@pytest.mark.parametrize(
    ("match", "change", "value"), CHANGES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CHANGES)]
)
def test_a_contradiction_is_refused_and_named(
    original: Path,
    document: Document,
    match: str,
    change: Callable[[Document, Any], None],
    value: Any,
) -> None:
    changed = copy.deepcopy(document)
    change(changed, value)
    error = refused(original, changed)
    assert re.search(match, str(error)), str(error)
    assert "manifest.json" in str(error)


def test_a_view_of_a_strided_tensor_must_be_that_tensor(original: Path, document: Document) -> None:
    changed = copy.deepcopy(document)
    (turned,) = (k for k, tensor in enumerate(changed["tensors"]) if tensor["name"] == "turned")
    changed["tree"] = {"view": [turned, 0], "dtype": "float32", "shape": [1], "strides": [1]}
    assert "beyond tensor 'turned'" in str(refused(original, changed))


def test_a_million_dimensions_of_nesting_are_refused(original: Path) -> None:
    path = original.parent / "deep"
    path.mkdir()
    body = b'"format":"infinity-checkpoint","version":1,"tree":' + b"[" * 1_000_000
    (path / "manifest.json").write_bytes(sign(body))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(path)


def test_a_tree_deeper_than_any_save_makes_is_refused(original: Path, document: Document) -> None:
    changed = copy.deepcopy(document)
    for _ in range(200):
        changed["tree"] = [changed["tree"]]
    assert "deeper than 128" in str(refused(original, changed))


def _peak_kibibytes() -> int:
    """The most that this process has held in memory."""
    (line,) = re.findall(
        r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return int(line)


@pytest.mark.parametrize("value", [b"[],", b"0,", b'"",', b"{},"])
def test_a_manifest_of_endless_values_is_refused_unparsed(original: Path, value: bytes) -> None:
    path = original.parent / "endless"
    path.mkdir(exist_ok=True)
    body = b'"format":"infinity-checkpoint","version":1,"tree":[' + value * 20_000_000 + b"0]}"
    (path / "manifest.json").write_bytes(sign(body))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is held now
    before = _peak_kibibytes()
    with pytest.raises(checkpoint.CorruptCheckpointError, match="values has more than"):
        checkpoint.load(path)
    assert _peak_kibibytes() - before < 500_000, "parsing it would take gigabytes"
    (path / "manifest.json").unlink()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_the_hostile_folder_is_refused(file: Path, tmp_path: Path) -> None:
    """Bodies of manifests; the first line, with the checksum, is put before them here."""
    (tmp_path / "manifest.json").write_bytes(sign(file.read_bytes()))
    with pytest.raises(checkpoint.CorruptCheckpointError) as caught:
        checkpoint.load(tmp_path)
    # Everything but a missing file is seen in the manifest, before any other file is looked at.
    only_missing = file.stem == "missing_data_file"
    assert ("the data file is missing" in str(caught.value)) == only_missing


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(node, dict | list):
        return [path]
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return [path] + [place for key, item in items for place in _places(item, (*path, key))]


values = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 4096, 1 << 31, 1 << 62, 1 << 63, 1 << 70, 0.5]),
    st.sampled_from(["", "..", "/", "a" * 50, "00000000", "float32", [], {}, [[]], [1], ["a"]]),
    st.sampled_from([{"tensor": 0}, {"view": [0, 0]}, {"dict": {}}, {"tuple": []}, {"set": [[]]}]),
)


@settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_value_anywhere_loads_or_is_refused(
    data: st.DataObject, original: Path, document: Document
) -> None:
    """Never another exception, never a crash."""
    changed = copy.deepcopy(document)
    places = [place for place in _places(changed) if place]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places))
        target: Any = changed
        try:
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = copy.deepcopy(data.draw(values))
        except (KeyError, IndexError, TypeError):
            continue
    path = original.parent / "fuzz"
    path.mkdir(exist_ok=True)
    write(path / "manifest.json", changed)
    with contextlib.suppress(checkpoint.CorruptCheckpointError):
        checkpoint.load(path)
