"""Buffers after the block: as plain PyTorch leaves them, whatever a program put in their place."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.values.buffers.conversion import BufferConversion
from tests.support.scripts import Script
from tests.support.training import same_bits

_READ_ONLY = """
import sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
import infinity

nvme, path = map(Path, sys.argv[1:])
np.arange(8, dtype=np.float32).tofile(path)
table = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))


def model_with(table):
    model = nn.Linear(2, 2)
    model.register_buffer("table", table)
    return model


"""
_UNCHANGED = """
model = model_with(table)
with infinity.offload(model, nvme, compute_dtype=torch.bfloat16):
    assert model.table.dtype == torch.bfloat16
assert model.table is table
"""
_CHANGED = """
model = model_with(table)
with infinity.offload(model, nvme, compute_dtype=torch.bfloat16):
    model.table.add_(1)
assert model.table.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
assert model.table.dtype == torch.float32
assert table.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
"""
_LOADED = """
with infinity.offload(model_with(torch.full((8,), 5.0)), nvme) as offloaded:
    offloaded.save(path.parent / "saved")
for dtype in (None, torch.bfloat16):
    model = model_with(table)
    with infinity.offload(model, nvme, weights=path.parent / "saved", compute_dtype=dtype):
        pass
    assert model.table.tolist() == [5] * 8
assert table.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
"""

_PUT: dict[str, Callable[[], torch.Tensor]] = {
    "whole numbers": lambda: torch.arange(4),
    "more exact": lambda: torch.arange(4).double() / 3,
    "complex": lambda: torch.arange(4.0) + 1j,
    "conjugated": lambda: (torch.arange(4.0) + 1j).conj(),
    "sparse": lambda: torch.arange(4.0).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(4, device="meta"),
}
_CAME: dict[str, Callable[[], torch.Tensor]] = {
    "floats": lambda: torch.arange(4.0) / 3,
    "whole numbers": lambda: torch.zeros(4, dtype=torch.int64),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": _PUT["quantized"],
}


def _model(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("first", buffer)
    model.register_buffer("last", torch.arange(3.0) / 3)
    return model


@pytest.mark.parametrize("does", [_UNCHANGED, _CHANGED, _LOADED], ids=["kept", "changed", "loaded"])
def test_buffer_over_a_file_that_is_read_only_is_not_written(
    does: str, nvme: Path, tmp_path: Path
) -> None:
    script = Script(_READ_ONLY + does, nvme, tmp_path / "table", ends_interpreter=True)
    _, errors = script.end()
    assert script.returncode == 0, errors


def test_graph_from_before_the_block_has_the_buffers_that_it_saved(nvme: Path) -> None:
    model = _model(torch.arange(4.0) / 3)
    leaf = torch.ones(4, requires_grad=True)
    loss = (leaf * model.get_buffer("first")).sum()
    with infinity.offload(model, nvme, compute_dtype=torch.bfloat16):
        pass
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, model.get_buffer("first"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("came", _CAME)
@pytest.mark.parametrize("name", _PUT)
def test_tensor_put_in_the_place_of_a_buffer_stays_of_its_kind(
    nvme: Path, name: str, came: str, dtype: torch.dtype | None
) -> None:
    model = _model(_CAME[came]())
    last, put = model.get_buffer("last"), _PUT[name]()
    with infinity.offload(model, nvme, compute_dtype=dtype):
        model.first = put
    assert model.get_buffer("first") is put
    assert model.get_buffer("last") is last


def test_interrupt_as_a_block_ends_leaves_a_later_one_the_buffers_that_they_share(
    nvme: Path,
) -> None:
    shared = nn.BatchNorm1d(2, affine=False)
    before = shared.running_mean
    first, last = ExitStack(), ExitStack()
    for blocks in (first, last):
        model = nn.Sequential(nn.Linear(2, 2), shared)
        blocks.enter_context(infinity.offload(model, nvme, compute_dtype=torch.bfloat16))
    inside = shared.running_mean
    assert inside is not None
    inside.add_(1)

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not BufferConversion.__exit__.__code__:
            return watch if event == "call" else None
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return watch

    sys.settrace(watch)
    with pytest.raises(KeyboardInterrupt):
        first.close()
    assert shared.running_mean is inside
    last.close()
    assert shared.running_mean is before
    assert torch.equal(before, torch.ones(2))


@pytest.mark.parametrize("saved_in", [None, torch.bfloat16])
def test_buffers_beside_weights_of_the_compute_dtype_load_under_another(
    nvme: Path, tmp_path: Path, saved_in: torch.dtype | None
) -> None:
    here = torch.bfloat16 if saved_in is None else None
    for dtype in (saved_in, here):
        model = _model(torch.arange(4.0) if dtype is saved_in else torch.zeros(4))
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        with infinity.offload(model, nvme, compute_dtype=dtype) as offloaded:
            if dtype is saved_in:
                offloaded.save(tmp_path / "saved")
                offloaded.snapshot("saved")
                continue
            for take in (
                lambda: offloaded.load(tmp_path / "saved"),
                lambda: offloaded.restore("saved"),
            ):
                model.get_buffer("first").zero_()
                take()
                assert model.get_buffer("first").dtype == (here or torch.float32)
                assert model.get_buffer("first").tolist() == [0, 1, 2, 3]
            offloaded.drop_snapshot("saved")


@pytest.mark.parametrize("name", ["expanded", "of inference", "given gradients"])
def test_buffer_that_torch_does_not_write_to_is_loaded_or_refused_before_anything_is(
    nvme: Path, tmp_path: Path, name: str
) -> None:
    with infinity.offload(_model(torch.ones(4)), nvme, compute_dtype=torch.bfloat16) as offloaded:
        offloaded.save(tmp_path / "saved")
    with torch.inference_mode(name == "of inference"):
        buffer = torch.zeros(4, requires_grad=name == "given gradients")
    model = _model(torch.zeros(1).expand(4) if name == "expanded" else buffer)
    with infinity.offload(model, nvme) as offloaded:
        if name == "expanded":
            with pytest.raises(ValueError, match=r"first .*, which is left as it was"):
                offloaded.load(tmp_path / "saved")
            offloaded.save(tmp_path / "still")  # nothing is mixed
        else:
            offloaded.load(tmp_path / "saved")
            assert model.get_buffer("first").tolist() == [1, 1, 1, 1]


def _two_with(table: torch.Tensor) -> tuple[nn.Module, nn.Module, nn.Module]:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (first, last):
        module.register_buffer("table", table)
    return nn.Sequential(first, last), first, last


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_copy_put_in_the_place_of_a_shared_buffer_is_not_changed_with_it(
    nvme: Path, when: str, dtype: torch.dtype | None
) -> None:
    table = torch.arange(4.0) / 3
    model, first, last = _two_with(table)
    came = table.clone()
    with infinity.offload(model, nvme, compute_dtype=dtype):
        first.table = first.get_buffer("table").clone()
        if when == "inside":
            last.get_buffer("table").mul_(2)
    if when == "after":
        last.get_buffer("table").mul_(2)
    assert last.get_buffer("table") is table
    assert torch.equal(first.get_buffer("table"), came)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buffers_that_changed_places_are_the_tensors_that_they_were(
    nvme: Path, dtype: torch.dtype | None
) -> None:
    one, other = torch.arange(4.0) / 3, torch.arange(4.0) / 7
    model, first, last = _two_with(one)
    last.table = other
    came = one.clone()
    with infinity.offload(model, nvme, compute_dtype=dtype):
        first.table, last.table = last.get_buffer("table"), first.get_buffer("table")
        first.get_buffer("table")[0] = 1
    assert first.get_buffer("table") is other
    assert last.get_buffer("table") is one
    assert torch.equal(one, came)
    assert torch.equal(other, torch.tensor([1, *(torch.arange(4.0) / 7)[1:]]))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensor_put_in_several_places_is_one_after_the_block(
    nvme: Path, dtype: torch.dtype | None
) -> None:
    model, first, last = _two_with(torch.zeros(4))
    with infinity.offload(model, nvme, compute_dtype=dtype):
        first.table = last.table = torch.ones_like(first.get_buffer("table"))
    assert first.get_buffer("table") is last.get_buffer("table")
    assert first.get_buffer("table").dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_other_name_of_a_shared_buffer_put_in_its_place_shares_it_after_the_block(
    dtype: torch.dtype | None, nvme: Path
) -> None:
    model, first, second = _two_with(torch.full((4,), 1 / 3))
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=dtype):
        first.table = first.get_buffer("table").detach()
    second.get_buffer("table").fill_(2)
    assert first.get_buffer("table").tolist() == [2.0] * 4


def test_view_that_differs_in_the_stride_of_one_element_alone_shares_the_buffer_after_the_block(
    nvme: Path,
) -> None:
    model, first, second = _two_with(torch.zeros(2, 3))
    second.table = first.get_buffer("table")[::2]
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=torch.bfloat16):
        second.table = second.get_buffer("table").view(1, 3)
    first.get_buffer("table").fill_(2)
    assert second.get_buffer("table").tolist() == [[2.0] * 3]


def test_buffer_that_is_resized_inside_has_its_new_size_after_the_block(nvme: Path) -> None:
    model = _model(torch.ones(4))
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=torch.bfloat16):
        model.get_buffer("first").resize_(6).zero_()
    assert model.get_buffer("first").tolist() == [0.0] * 6


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_two_tensors_over_the_same_elements_are_those_that_they_were(
    dtype: torch.dtype | None, nvme: Path, tmp_path: Path
) -> None:
    model, first, second = _two_with(torch.full((4,), 1 / 3))
    table = second.get_buffer("table")
    second.table = alias = table.detach()
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "saved")
    weights = None if dtype else tmp_path / "saved"
    with infinity.offload(model, nvme, compute_dtype=dtype, weights=weights):
        first.get_buffer("table")[0] = 1
    assert first.get_buffer("table") is table
    assert second.get_buffer("table") is alias
    assert torch.equal(alias, table)
    assert torch.equal(alias, torch.tensor([1, *[1 / 3] * 3]))


def test_copy_that_was_changed_in_part_has_the_bits_that_came_elsewhere(nvme: Path) -> None:
    model, first, _ = _two_with(torch.full((4,), 1 / 3))
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=torch.bfloat16):
        first.table = first.get_buffer("table").clone()
        first.get_buffer("table")[0] = 1
    assert torch.equal(first.get_buffer("table"), torch.tensor([1, *[1 / 3] * 3]))


def test_buffer_put_where_one_on_meta_was_is_real_in_all_places(nvme: Path, tmp_path: Path) -> None:
    stored, *_ = _two_with(torch.ones(4))
    with infinity.offload(stored, nvme, host_memory="64MiB") as offloaded:
        offloaded.export(tmp_path / "weights")
    model, first, second = _two_with(torch.ones(4))
    second.table = second.get_buffer("table").to("meta")
    with infinity.offload(model, nvme, host_memory="64MiB", weights=tmp_path / "weights"):
        first.table = second.get_buffer("table")
        second.get_buffer("table").add_(1)
    assert first.get_buffer("table").tolist() == [2.0] * 4


@pytest.mark.parametrize("is_changed_behind", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16, None),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("kept", [torch.float32, torch.float64])
def test_copy_put_under_blocks_has_the_bits_of_the_buffer_where_the_first_ends_first(
    kept: torch.dtype, dtypes: Sequence[torch.dtype | None], is_changed_behind: bool, nvme: Path
) -> None:
    shared = nn.Module()
    shared.register_buffer("mean", torch.full((4,), 1 / 3, dtype=kept))
    blocks = []
    for dtype in dtypes:
        model = nn.Sequential(nn.Linear(2, 2), shared)
        blocks.append(ExitStack())
        blocks[-1].enter_context(infinity.offload(model, nvme, compute_dtype=dtype))
    shared.mean = shared.get_buffer("mean").clone()
    shared.get_buffer("mean")[0] = 1
    for block in blocks[:-1]:
        block.close()
    if is_changed_behind:
        shared.get_buffer("mean")[1] = 2
    blocks[-1].close()
    behind = 2 if is_changed_behind else 1 / 3
    expected = torch.tensor([1, behind, 1 / 3, 1 / 3], dtype=kept)
    assert same_bits(shared.get_buffer("mean"), expected)
