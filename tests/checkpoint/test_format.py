"""docs/FORMAT.md against the program, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import checkpoint
from tests.checkpoint.trees import assert_same

DOCUMENT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
EXAMPLE = {"step": 7, "model": {"w": torch.tensor([1.0, -2.0, 0.5])}, "lr": (0.1, None)}


def manifest_of_the_document() -> bytes:
    (text,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    return str(text).encode()


def data_file_of_the_document() -> bytes:
    """Undoes the hexadecimal dump."""
    (dump,) = re.findall(r"```text\n(00000000 .*?)```", DOCUMENT, re.DOTALL)
    data = bytearray()
    last = b""
    for line in dump.splitlines():
        if line == "*":
            continue
        offset, *columns = line.split("|")[0].split()
        while len(data) < int(offset, 16):
            data += last
        last = bytes.fromhex("".join(columns))
        data += last
    return bytes(data)


def test_a_save_makes_the_bytes_of_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint.saving.api.new_uuid", lambda target: "00c0ffee")
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    checkpoint.save(EXAMPLE, tmp_path / "step")
    data = (tmp_path / "step" / "00c0ffee" / "r0-0.safetensors").read_bytes()
    assert data == data_file_of_the_document()
    assert (tmp_path / "step" / "manifest.json").read_bytes() == manifest_of_the_document()


def test_the_bytes_of_the_document_load(tmp_path: Path) -> None:
    (tmp_path / "00c0ffee").mkdir()
    (tmp_path / "00c0ffee" / "r0-0.safetensors").write_bytes(data_file_of_the_document())
    (tmp_path / "manifest.json").write_bytes(manifest_of_the_document())
    assert_same(EXAMPLE, checkpoint.load(tmp_path))
    assert checkpoint.verify(tmp_path).ok


def test_the_document_names_every_tag_and_limit_of_the_program() -> None:
    from checkpoint.format import manifest, records, tree
    from checkpoint.format.scalars import scalar_tags

    for tag in [*scalar_tags(), *tree.DATA_TAGS, *tree._DECODERS]:
        assert f'"{tag}"' in DOCUMENT, tag
    for limit in (manifest.MAX_JSON_VALUES, records.MAX_DIMENSIONS, tree.MAX_DEPTH):
        assert f"{limit:,}" in DOCUMENT, limit
    assert f"{manifest.MAX_MANIFEST_BYTES >> 20} MiB" in DOCUMENT
