"""Buffers that lie in one another's memory: what is written into one is in the others, inside the
block and after it.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.values.buffers import conversion
from infinity.values.buffers.sharing import convert_together

PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda whole: whole[1],
    "columns": lambda whole: whole[:, 1:3],
    "flat": lambda whole: whole.view(-1),
    "transposed": lambda whole: whole.t(),
    "expanded": lambda whole: whole[:1].expand(3, 4),
    "bytes": lambda whole: whole.view(torch.uint8),
}


class _Statistics(nn.Module):
    whole: torch.Tensor
    part: torch.Tensor

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor], is_first: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        whole = torch.arange(8.0).view(2, 4) / 3
        if is_first:
            self.register_buffer("part", part(whole))
        self.register_buffer("whole", whole)
        self.register_buffer("part", part(whole))

    def forward(self, x: torch.Tensor, written: str) -> torch.Tensor:
        with torch.no_grad():
            getattr(self, written).add_(1)
        y: torch.Tensor = self.layer(x)
        return y


def _trained(model: _Statistics, dtype: torch.dtype | None, nvme: Path, written: str) -> None:
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=dtype):
        for _ in range(3):
            model(torch.ones(2, 8), written)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_update_of_a_buffer_is_in_the_parts_of_it_after_the_block(
    name: str, is_first: bool, nvme: Path
) -> None:
    model = _Statistics(PARTS[name], is_first)
    whole, part = model.whole, model.part
    expected = (whole.bfloat16() + 1 + 1 + 1).float()
    _trained(model, torch.bfloat16, nvme, "whole")
    assert model.whole is whole
    assert model.part is part
    assert torch.equal(whole, expected)
    assert torch.equal(part, PARTS[name](expected))


@pytest.mark.parametrize("name", ["row", "columns", "flat", "transposed"])
def test_update_of_a_part_of_a_buffer_leaves_the_rest_its_bits(name: str, nvme: Path) -> None:
    model = _Statistics(PARTS[name], is_first=False)
    whole, part = model.whole, model.part
    expected = whole.clone()
    PARTS[name](expected).copy_(part.bfloat16() + 1 + 1 + 1)
    _trained(model, torch.bfloat16, nvme, "part")
    assert model.whole is whole
    assert torch.equal(whole, expected)
    assert torch.equal(model.part, PARTS[name](expected))


def test_parts_of_a_buffer_are_parts_of_it_inside(nvme: Path) -> None:
    model = _Statistics(PARTS["row"], is_first=True)
    options = {"host_memory": "64MiB", "compute_dtype": torch.bfloat16}
    with infinity.offload(model, nvme, **options):  # type: ignore[arg-type]
        model.whole.fill_(5)
        model.part.mul_(2)
        assert model.whole.tolist() == [[5.0] * 4, [10.0] * 4]
    assert model.whole.tolist() == [[5.0] * 4, [10.0] * 4]


def test_columns_of_a_tensor_keep_lying_in_it(nvme: Path) -> None:
    table = torch.zeros(4, 4)
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_buffer("cos", table[:, ::2])
    model.register_buffer("sin", table[:, 1::2])
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=torch.bfloat16):
        model.get_buffer("cos").add_(1)
        model.get_buffer("sin").add_(2)
    assert table.tolist() == [[1.0, 2.0, 1.0, 2.0]] * 4


class _Shared(nn.Module):
    """One buffer that two layers have, and a part of it that is in no file."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        shared = torch.full((2, 8), value)
        for layer in self.layers:
            layer.register_buffer("shared", shared)
        self.layers[1].register_buffer("part", shared[1], persistent=False)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_buffers_that_weights_are_loaded_into_keep_lying_in_one_another(
    kind: str, dtype: torch.dtype | None, nvme: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    with infinity.offload(_Shared(3), nvme, host_memory="64MiB") as offloaded:
        if kind == "export":
            offloaded.export(folder)
        else:
            offloaded.save(folder)
    model = _Shared(0)
    first, second = model.layers
    was = first.get_buffer("shared")
    with infinity.offload(model, nvme, host_memory="64MiB", weights=folder, compute_dtype=dtype):
        assert second.get_buffer("part").tolist() == [3.0] * 8
        first.get_buffer("shared").add_(1)
        second.get_buffer("shared").mul_(2)
        second.get_buffer("part").add_(1)
        assert first.get_buffer("shared").tolist() == [[8.0] * 8, [9.0] * 8]
    assert first.get_buffer("shared") is second.get_buffer("shared") is was
    assert was.tolist() == [[8.0] * 8, [9.0] * 8]
    assert second.get_buffer("part").tolist() == [9.0] * 8


def _on_meta_and_stored(
    made: Callable[[], nn.Sequential], kind: str, nvme: Path, folder: Path
) -> nn.Sequential:
    """A model without values, of which another one has left those that it has in ``folder``."""
    with infinity.offload(made(), nvme, host_memory="64MiB") as offloaded:
        if kind == "export":
            offloaded.export(folder)
        else:
            offloaded.save(folder)
    with torch.device("meta"):
        return made()


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_buffer_on_meta_in_two_places_is_one_tensor_inside(
    kind: str, nvme: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"

    def made() -> nn.Sequential:
        model, shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
        for layer in model:
            layer.register_buffer("shared", shared)
        return model

    model = _on_meta_and_stored(made, kind, nvme, folder)
    with infinity.offload(model, nvme, host_memory="64MiB", weights=folder):
        model[0].get_buffer("shared").add_(1)
        assert model[1].get_buffer("shared").tolist() == [[2.0] * 8] * 2


@pytest.mark.parametrize("is_whole_saved", [False, True])
def test_values_of_an_expanded_buffer_come_from_its_weights(
    is_whole_saved: bool, nvme: Path, tmp_path: Path
) -> None:
    def made(value: float) -> nn.Linear:
        layer, row = nn.Linear(8, 8), torch.full((1, 8), value)
        layer.register_buffer("row", row, persistent=is_whole_saved)
        layer.register_buffer("rows", row.expand(3, 8))
        return layer

    with infinity.offload(made(3), nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "weights")
    model = made(0)
    with infinity.offload(model, nvme, host_memory="64MiB", weights=tmp_path / "weights"):
        model.get_buffer("row").add_(1)
        assert model.get_buffer("rows").tolist() == [[4.0 if is_whole_saved else 3.0] * 8] * 3


@pytest.mark.parametrize("added", [0, 1])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_expanded_buffer_that_is_not_saved_has_the_values_of_what_it_lies_in(
    added: int, dtype: torch.dtype | None, nvme: Path, tmp_path: Path
) -> None:
    def made(value: float) -> nn.Linear:
        layer, row = nn.Linear(8, 8), torch.full((1, 8), value)
        layer.register_buffer("row", row)
        layer.register_buffer("rows", row.expand(3, 8), persistent=False)
        return layer

    with infinity.offload(made(3), nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "weights")
    model = made(0)
    with infinity.offload(
        model, nvme, host_memory="64MiB", weights=tmp_path / "weights", compute_dtype=dtype
    ):
        assert model.get_buffer("rows").tolist() == [[3.0] * 8] * 3
        model.get_buffer("row").add_(added)
        assert model.get_buffer("rows").tolist() == [[3.0 + added] * 8] * 3
    model.get_buffer("row").add_(1)
    assert model.get_buffer("rows").tolist() == [[4.0 + added] * 8] * 3


class _Computing(nn.Linear):
    """With a buffer that others may have, too, and that it can compute."""

    def __init__(self, shared: torch.Tensor, *, persistent: bool) -> None:
        super().__init__(8, 8)
        self.register_buffer("shared", shared, persistent=persistent)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "shared" in self._buffers:
            self.get_buffer("shared").fill_(1)


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_buffer_on_meta_that_one_module_saves_comes_from_the_weights(
    kind: str, saved: int, nvme: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"

    def made() -> nn.Sequential:
        shared = torch.full((8,), 3.0)
        return nn.Sequential(*(_Computing(shared, persistent=i == saved) for i in range(2)))

    model = _on_meta_and_stored(made, kind, nvme, folder)
    with infinity.offload(model, nvme, host_memory="64MiB", weights=folder):
        for layer in model:
            assert layer.get_buffer("shared").tolist() == [3.0] * 8


def _inference(value: float) -> torch.Tensor:
    with torch.inference_mode():
        return torch.full((4,), value)


@pytest.mark.parametrize(
    "make",
    [_inference, lambda value: torch.full((1,), value).expand(4)],
    ids=["inference", "expand"],
)
def test_buffer_that_cannot_be_written_stays_one_tensor_in_all_its_places(
    make: Callable[[float], torch.Tensor], nvme: Path, tmp_path: Path
) -> None:
    def made(value: float) -> nn.Sequential:
        model, shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), make(value)
        for layer in model:
            layer.register_buffer("shared", shared)
        return model

    with infinity.offload(made(3), nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "weights")
    model = made(0)
    with infinity.offload(model, nvme, host_memory="64MiB", weights=tmp_path / "weights"):
        pass
    assert model[0].get_buffer("shared") is model[1].get_buffer("shared")
    assert model[0].get_buffer("shared").tolist() == [3.0] * 4


@pytest.mark.parametrize("way", ["load", "restore"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("last", [None, slice(None), slice(2, 6)])
def test_load_into_buffers_that_were_apart_when_saved_leaves_what_load_state_dict_does(
    last: slice | None, dtype: torch.dtype | None, way: str, nvme: Path, tmp_path: Path
) -> None:
    apart, tied, loaded = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
    for model in (tied, loaded):
        table = torch.zeros(8)
        model[0].register_buffer("table", table)
        model[1].register_buffer("table", table if last is None else table[last])
    apart[0].register_buffer("table", torch.full((8,), 1.0))
    apart[1].register_buffer("table", torch.full_like(tied[1].get_buffer("table"), 2.0))
    tied.load_state_dict(apart.state_dict())
    with infinity.offload(apart, nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "saved")
        offloaded.snapshot("saved")
    with infinity.offload(loaded, nvme, host_memory="64MiB", compute_dtype=dtype) as offloaded:
        if way == "load":
            offloaded.load(tmp_path / "saved")
        else:
            offloaded.restore("saved")
        offloaded.drop_snapshot("saved")
        assert torch.equal(loaded[0].get_buffer("table").float(), tied[0].get_buffer("table"))
    assert torch.equal(loaded[0].get_buffer("table"), tied[0].get_buffer("table"))


@pytest.mark.parametrize("is_other_offloaded", [False, True])
def test_update_of_a_buffer_by_another_model_that_has_it_stays_after_the_block(
    is_other_offloaded: bool, nvme: Path
) -> None:
    mean = torch.full((4,), 1 / 3)
    reading, updating = nn.Linear(2, 2), nn.Linear(2, 2)
    for model in (reading, updating):
        model.register_buffer("mean", mean)
    with infinity.offload(reading, nvme, host_memory="64MiB", compute_dtype=torch.bfloat16):
        if is_other_offloaded:
            with infinity.offload(updating, nvme, host_memory="64MiB", compute_dtype=torch.float16):
                updating.get_buffer("mean")[0] = 7
        else:
            updating.get_buffer("mean")[0] = 7
    assert reading.get_buffer("mean") is mean
    assert torch.equal(mean, torch.tensor([7, *[1 / 3] * 3]))


def test_values_of_weights_stay_though_another_model_changed_the_buffer_meanwhile(
    nvme: Path, tmp_path: Path
) -> None:
    mean = torch.full((4,), 1 / 3)
    stored, model = nn.Linear(2, 2), nn.Linear(2, 2)
    stored.register_buffer("mean", torch.full((4,), 5.0))
    model.register_buffer("mean", mean)
    with infinity.offload(stored, nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "saved")
    with infinity.offload(model, nvme, host_memory="64MiB", weights=tmp_path / "saved"):
        mean[0] = 7
    assert model.get_buffer("mean") is mean
    assert mean.tolist() == [5.0] * 4


def test_statistics_of_a_pass_stay_though_another_model_changed_the_buffer_meanwhile(
    nvme: Path,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mean = model[1].get_buffer("running_mean")
    with infinity.offload(model, nvme, host_memory="64MiB", compute_dtype=torch.bfloat16):
        mean.fill_(9)
        model(torch.randn(8, 4, dtype=torch.bfloat16))
        inside = model[1].get_buffer("running_mean").clone()
    assert torch.equal(model[1].get_buffer("running_mean"), inside.float())


@pytest.mark.parametrize(
    ("dtypes", "order"),
    [
        ((torch.float16, torch.float32, torch.float32), (0, 1, 2)),
        ((torch.bfloat16, None, torch.float16), (0, 2, 1)),
        ((torch.bfloat16, None, torch.bfloat16), (0, 1, 2)),
    ],
)
def test_buffer_under_three_blocks_has_its_bits_in_whatever_order_they_end(
    dtypes: Sequence[torch.dtype | None], order: Sequence[int], nvme: Path
) -> None:
    shared = nn.BatchNorm1d(4, affine=False)
    mean = shared.get_buffer("running_mean").fill_(1 / 3)
    blocks = []
    for dtype in dtypes:
        model = nn.Sequential(nn.Linear(2, 2), shared)
        blocks.append(ExitStack())
        blocks[-1].enter_context(infinity.offload(model, nvme, compute_dtype=dtype))
    shared.get_buffer("running_mean")[0] = 1
    blocks[order[0]].close()
    assert shared.get_buffer("running_mean").dtype == dtypes[2]
    for place in order[1:]:
        blocks[place].close()
    assert shared.get_buffer("running_mean") is mean
    assert torch.equal(mean, torch.tensor([1, *[1 / 3] * 3]))


def test_block_that_ends_on_another_thread_as_one_begins_gives_both_their_buffers(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = nn.BatchNorm1d(4, affine=False)
    mean = shared.get_buffer("running_mean").fill_(1 / 3)
    first = ExitStack()
    model = nn.Sequential(nn.Linear(2, 2), shared)
    first.enter_context(infinity.offload(model, nvme, compute_dtype=torch.bfloat16))
    ends = threading.Thread(target=first.close)

    def convert(*given: Any) -> dict[int, torch.Tensor]:
        """When the buffers have been found."""
        ends.start()
        ends.join(0.5)
        return convert_together(*given)

    monkeypatch.setattr(conversion, "convert_together", convert)
    with infinity.offload(nn.Sequential(nn.Linear(2, 2), shared), nvme):
        ends.join()
    assert shared.get_buffer("running_mean") is mean
    assert torch.equal(mean, torch.full((4,), 1 / 3))
