"""Many tensors of a manifest at once: the same records and the same errors as one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format import rules
from checkpoint.format.bulk import tensors
from checkpoint.format.bulk.columns import chunk_columns, unclear_tensors
from checkpoint.format.records import ChunkRecord, FileRecord, Manifest
from checkpoint.format.rules import validate
from checkpoint.plan.state_plan import plan_state
from checkpoint.tensors.sources import plain_memory, source_of, tensor_source
from tests.support.examples import examples

UUID = "0a1b2c3d"
Node = dict[str, Any]
ODD = [
    True,
    -1,
    1.0,
    "1",
    None,
    [],
    {},
    1 << 63,
    "float31",
    "DEADBEEF",
    "dead bee",
    [0, -1],
    [True],
]


def node(number: int) -> Node:
    chunk = {"file": 0, "offset": 4096 * (number + 1), "nbytes": 8, "crc32c": ["0000dead"]}
    return {"name": f"t{number}", "dtype": "int16", "shape": [2, 2], "chunks": [chunk]}


def outcome(decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except (ValueError, CorruptCheckpointError) as error:
        return type(error), str(error)


@st.composite
def odd_nodes(draw: st.DrawFn) -> list[Any]:
    """Nodes of which a few have one field that is perhaps not what it has to be."""
    nodes: list[Any] = [node(number) for number in range(draw(st.integers(0, 5)))]
    for chosen in draw(st.lists(st.sampled_from(nodes), max_size=2)) if nodes else []:
        chunks = chosen.get("chunks")
        is_usual = isinstance(chunks, list) and chunks and isinstance(chunks[0], dict)
        holder = chunks[0] if draw(st.booleans()) and is_usual else chosen
        key = draw(st.sampled_from([*holder, "start", "shape", "strides", "storage", "more"]))
        if draw(st.integers(0, 5)) == 0:
            holder.pop(key, None)
        elif key == "crc32c":
            holder[key] = [draw(st.sampled_from(ODD))]
        else:
            holder[key] = draw(st.sampled_from(ODD))
    return nodes


@settings(max_examples=examples(150), deadline=None)
@given(nodes=odd_nodes())
def test_nodes_decoded_together_give_what_they_give_one_by_one(nodes: list[Any]) -> None:
    one_by_one = outcome(lambda: tuple(tensors._tensor(each) for each in copy.deepcopy(nodes)))
    assert outcome(lambda: tensors.decode_tensors(nodes)) == one_by_one


def test_nodes_of_every_kind_keep_their_order() -> None:
    strided = node(1) | {"strides": [1, 2]}
    cut = copy.deepcopy(node(2))
    cut["chunks"] = [chunk | {"start": [0, 0], "shape": [2, 2]} for chunk in cut["chunks"]]
    found = tensors.decode_tensors([node(0), strided, cut, node(3)])
    assert [record.name for record in found] == ["t0", "t1", "t2", "t3"]
    assert found[1].strides == (1, 2)
    assert found[0].chunks == (ChunkRecord(0, 4096, 8, (0, 0), (2, 2), (0xDEAD,)),)


def manifest_of(count: int) -> Manifest:
    files = (FileRecord(None, f"{UUID}/r0-0.safetensors", 4096 * (count + 1), 4096, 0),)
    records = tensors.decode_tensors([node(number) for number in range(count)])
    return Manifest(UUID, 1, (), files, (), records, {})


numbers = st.sampled_from([0, 1, 7, 8, 4095, 4096, 8192, 12288, 1 << 40, (1 << 63) - 1])


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_what_columns_clear_is_sound_by_the_rules(data: st.DataObject) -> None:
    manifest = manifest_of(3)
    wrong = data.draw(st.integers(0, 2))
    record = manifest.tensors[wrong]
    field = data.draw(st.sampled_from(["file", "offset", "nbytes", "start", "shape", "crc32c"]))
    value: Any = data.draw(numbers)
    if field in ("start", "shape"):
        value = data.draw(st.lists(numbers, max_size=3).map(tuple))
    elif field == "crc32c":
        value = (0,) * data.draw(st.integers(0, 2))
    chunk = record.chunks[0]._replace(**{field: value})
    changed = [*manifest.tensors]
    changed[wrong] = record.with_chunks([chunk])
    manifest = replace(manifest, tensors=tuple(changed))
    cleared = {0, 1, 2} - set(
        unclear_tensors(manifest.files, manifest.tensors, chunk_columns(manifest.tensors))
    )
    for index in cleared:
        rules._check_tensor(manifest, manifest.tensors[index])


def test_a_sound_manifest_is_cleared_by_columns_alone() -> None:
    manifest = manifest_of(4)
    columns = chunk_columns(manifest.tensors)
    assert unclear_tensors(manifest.files, manifest.tensors, columns) == []
    validate(manifest)


@pytest.mark.parametrize(
    ("offset", "what"), [(8192, "overlaps another extent"), (16384, "leaves a gap before it")]
)
def test_extents_out_of_place_are_named_by_their_tensor(offset: int, what: str) -> None:
    manifest = manifest_of(3)
    last = manifest.tensors[2]
    moved = last.with_chunks([last.chunks[0]._replace(offset=offset)])
    file = replace(manifest.files[0], nbytes=20480)
    manifest = replace(manifest, files=(file,), tensors=(*manifest.tensors[:2], moved))
    with pytest.raises(CorruptCheckpointError, match=what) as caught:
        validate(manifest)
    assert (caught.value.tensor, caught.value.offset) == ("t2", offset)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4),
        torch.ones(3, 4)[1:],
        torch.ones(3, 4).t(),
        torch.ones(0, 4),
        torch.ones(()),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch._efficientzerotensor(3),
    ],
)
def test_tensors_as_most_are_have_the_source_that_any_has(tensor: torch.Tensor) -> None:
    one, other = source_of(tensor), tensor_source(tensor)
    assert one[:3] == other[:3]
    assert (one.read is None) == (other.read is None)
    assert (one.held is None) == (other.held is None)
    if plain_memory(tensor) is not None:
        assert one.address == tensor.data_ptr()


def test_memory_that_was_freed_is_not_that_of_a_tensor_as_most_are() -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(8)
    assert plain_memory(tensor) is None
    with pytest.raises(TypeError, match=r"state\['freed'\].*has been freed"):
        plan_state({"freed": tensor})
