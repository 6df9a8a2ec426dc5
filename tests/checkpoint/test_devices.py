"""Saves and loads of tensors on a device, which is simulated: it does everything as late as it may.

What is not waited for is not there; what is not ordered is read too early, or too late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from aio import Slab
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.interop.export import write_safetensors
from checkpoint.transfer.cuda import CudaCopier
from tests.support.memory import folder_in_memory
from tests.support.simulated_copier import SimulatedDevice

tmp_path = folder_in_memory()
MIB = 1 << 20
LARGE = 40 * MIB // 4
"""Elements of a tensor that takes several buffers."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    device.install(monkeypatch)
    yield device
    assert device.registered == {}, "memory that is still known to the device"


def _save_now(state: Any, path: Path, stripes: list[Path] | None) -> Callable[[], object]:
    checkpoint.save(state, path, stripes)
    return lambda: None


def _save_copied(state: Any, path: Path, stripes: list[Path] | None) -> Callable[[], object]:
    return checkpoint.save_async(state, path, stripes).result


def _save_in_waves(state: Any, path: Path, stripes: list[Path] | None) -> Callable[[], object]:
    pending = checkpoint.save_async(state, path, stripes, staging_bytes=33 * MIB)
    assert pending.wait_staged(60)
    return pending.result


def _save_guarded(state: Any, path: Path, stripes: list[Path] | None) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(state["large"])]
    guard = torch.optim.SGD(parameters, lr=0.0)
    pending = checkpoint.save_async(state, path, stripes, guard=guard)
    guard.step()  # waits until all was read
    return pending.result


WAYS = [_save_now, _save_copied, _save_in_waves, _save_guarded]


@pytest.mark.parametrize("num_stripes", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_save_has_what_was_computed_when_it_was_called(
    tmp_path: Path, device: SimulatedDevice, way: Callable[..., Any], num_stripes: int
) -> None:
    large = device.tensor(torch.zeros(LARGE))
    small = device.tensor(torch.zeros(1000, 4))
    host = torch.arange(10.0)
    stripes = [tmp_path / f"ssd{k}" for k in range(num_stripes)]
    for stripe in stripes:
        stripe.mkdir()
    device.set(large, 1.0)
    device.set(small, 1.0)
    device.set(large, 2.0)
    device.set(small, 3.0)
    state = {"large": large, "rows": small[100:900], "host": host, "turned": small.t()}
    finish = way(state, tmp_path / "run", stripes or None)
    device.set(large, 7.0)  # from here on the program may change them
    device.set(small, 7.0)
    device.run_until(device.event())
    finish()
    loaded = checkpoint.load(tmp_path / "run")
    assert bool((loaded["large"] == 2).all())
    assert bool((loaded["rows"] == 3).all())
    assert bool((loaded["turned"] == 3).all())
    assert loaded["turned"].shape == (4, 1000)
    assert bool((loaded["host"] == host).all())
    assert device.num_copies > 3


def test_guarded_save_copies_small_tensors_of_a_device_at_the_call(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    large, average = device.tensor(torch.zeros(LARGE)), device.tensor(torch.zeros(5))
    guard = torch.optim.SGD([torch.nn.Parameter(large)], lr=0.0)
    device.set(average, 1.0)
    state = {"large": large, "average": average}
    pending = checkpoint.save_async(state, tmp_path / "run", guard=guard)
    device.set(average, 2.0)  # a forward pass, before the step that waits
    device.run_until(device.event())
    pending.result()
    assert checkpoint.load(tmp_path / "run")["average"].tolist() == [1.0] * 5


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.arange(5000).to(torch.bfloat16),
    "conjugated": lambda: torch.randn(70, 30, dtype=torch.complex64).t().conj(),
    "negated": lambda: torch.randn(300, dtype=torch.complex64).conj().imag,
    "every second": lambda: torch.arange(3 * MIB)[::2],
    "one": lambda: torch.tensor(3.0),
    "none": lambda: torch.empty(0, 3),
    "expanded": lambda: torch.arange(7.0).expand(1000, 7),
}


@pytest.mark.parametrize("name", VALUES)
def test_tensors_of_any_kind_on_a_device_come_back(
    tmp_path: Path, device: SimulatedDevice, name: str
) -> None:
    value = device.tensor(VALUES[name]())
    checkpoint.save({"x": value}, tmp_path / "run")
    loaded = checkpoint.load(tmp_path / "run")["x"]
    assert loaded.dtype == value.dtype
    assert torch.equal(loaded, value)


def test_bytes_of_a_source_are_asked_for_when_the_device_has_finished(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    """Such a source may read from the device itself."""
    values = torch.zeros(1000)
    memory = values.numpy()

    class OnDevice:
        dtype, shape = torch.float32, (1000,)

        def read(self, start: int, out: memoryview) -> None:
            out[:] = memory.data.cast("B")[start : start + len(out)]

    device.launch(lambda: memory.fill(5.0))
    checkpoint.save({"x": OnDevice()}, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run")["x"].tolist() == [5.0] * 1000


@pytest.mark.parametrize("way", WAYS)
def test_failing_device_fails_the_save_and_is_told_to_forget_the_memory(
    tmp_path: Path, device: SimulatedDevice, way: Callable[..., Any]
) -> None:
    large = device.tensor(torch.ones(LARGE))
    checkpoint.save({"large": large}, tmp_path / "run")
    device.num_copies, device.fails_at = 0, 3
    with pytest.raises(RuntimeError, match="the device failed"):
        way({"large": large}, tmp_path / "run", None)()
    assert device.registered == {}
    device.fails_at = -1
    assert bool((checkpoint.load(tmp_path / "run")["large"] == 1).all())


@pytest.mark.parametrize("num_buffers", [1, 2, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_into_a_device_brings_all_behind_what_it_computes_there(
    tmp_path: Path, device: SimulatedDevice, num_buffers: int, dtype: torch.dtype
) -> None:
    values = {name: torch.randn(MIB // 8) for name in "abcdef"}
    checkpoint.save({**values, "host": torch.arange(10)}, tmp_path / "run")
    live = {name: device.tensor(torch.empty(MIB // 8, dtype=dtype)) for name in values}
    if dtype == torch.float32:
        for tensor in live.values():
            device.set(tensor, -1.0)
    # One buffer takes all of a file that is small.
    staging = 8 * MIB if num_buffers == 1 else num_buffers * 8 * ALIGNMENT
    into = {**live, "host": torch.zeros(10, dtype=torch.int64)}
    checkpoint.load(
        tmp_path / "run",
        into=into,
        staging_bytes=staging,
        dtype=None if dtype == torch.float32 else dtype,
    )
    device.run_until(device.event())
    for name, tensor in live.items():
        assert torch.equal(tensor, values[name].to(dtype)), name
    assert into["host"].tolist() == list(range(10))
    assert device.num_copies >= len(values)
    assert device.num_left == 0


def test_failing_device_fails_the_load_and_is_told_to_forget_the_memory(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    checkpoint.save({"x": torch.ones(LARGE)}, tmp_path / "run")
    live = device.tensor(torch.zeros(LARGE))
    device.fails_at = 3
    with pytest.raises(RuntimeError, match="the device failed"):
        checkpoint.load(tmp_path / "run", into={"x": live}, staging_bytes=8 * MIB)
    assert device.registered == {}
    checkpoint.load(tmp_path / "run", into={"x": live})
    assert bool((live == 1).all())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_export_and_dcp_have_what_was_computed_when_they_were_called(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    value = device.tensor(torch.zeros(LARGE))
    device.set(value, 2.0)
    file, *_ = write_safetensors({"x": value}, tmp_path / "export")
    assert bool((load_file(file)["x"] == 2).all())
    device.set(value, 3.0)
    dcp_save(
        {"x": value},
        storage_writer=checkpoint.dcp.StorageWriter(tmp_path / "dcp"),
    )
    assert bool((checkpoint.load(tmp_path / "dcp")["x"] == 3).all())
    read = device.tensor(torch.zeros(LARGE))
    device.set(read, -1.0)
    dcp_load(
        {"x": read},
        storage_reader=checkpoint.dcp.StorageReader(tmp_path / "dcp"),
    )
    device.run_until(device.event())
    assert bool((read == 3).all())


def _cuda_knowing(ranges: dict[int, int], code: int = 0) -> Any:
    """The runtime of CUDA, as far as memory is registered with it: it answers with `code`."""

    def register(address: int, nbytes: int, flags: int) -> int:
        ranges[address] = nbytes
        return code

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=ranges.pop)


def test_buffers_in_a_row_are_registered_as_one_and_mapped_until_they_are_unregistered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranges: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _cuda_knowing(ranges))
    slab = Slab(8 * ALIGNMENT)
    first, second, hole, third = (slab.allocate(2 * ALIGNMENT) for _ in range(4))
    copier = CudaCopier({}, follows=False)
    copier.register([third, first, second])
    assert ranges == {
        first.ctypes.data: 4 * ALIGNMENT,
        third.ctypes.data: 2 * ALIGNMENT,
    }
    del first, second, third
    assert slab.used_bytes == 8 * ALIGNMENT
    copier.close()
    assert ranges == {}
    assert slab.used_bytes == hole.nbytes
    copier.close()


def test_memory_that_cuda_does_not_register_is_copied_all_the_same_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranges: dict[int, int] = {}
    forgotten: list[bool] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _cuda_knowing(ranges, code=2))
    monkeypatch.setattr("checkpoint.transfer.cuda._forget_error", lambda: forgotten.append(True))
    copier = CudaCopier({}, follows=False)
    copier.register([Slab(ALIGNMENT).allocate(ALIGNMENT)])
    (record,) = caplog.records
    assert "does not register 4096 bytes" in record.getMessage()
    assert forgotten == [True]
    copier.close()
    assert len(ranges) == 1  # what was refused is not given back


def test_nothing_is_asked_of_cuda_where_the_process_has_computed_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked of CUDA")

    for name in ("Stream", "Event", "current_stream", "cudart", "set_stream", "device_count"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    checkpoint.save({"x": torch.ones(5)}, tmp_path / "run")
    checkpoint.save_async({"x": torch.ones(5)}, tmp_path / "run").result()
    checkpoint.load(tmp_path / "run", into={"x": torch.zeros(5)})
