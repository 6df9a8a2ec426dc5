"""Every system brings back what it saved, and says how long it took."""

import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aio import Engine
from checkpoint.bench.conditions.scratch import Place
from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.conditions.workload import CheckError, State, TensorSpec, Workload
from checkpoint.bench.systems.fastpersist import DeepSpeed
from checkpoint.bench.systems.fio import Fio, bytes_and_seconds
from checkpoint.bench.systems.peers import Dcp, Safetensors, TorchSave, Zarr
from checkpoint.bench.systems.raw import Raw, part_bytes
from checkpoint.bench.systems.system import Infinity, InfinityAsync, System, make_durable, stripes

RAM = Path("/dev/shm")  # syncs cost nothing there
SMALL = Setting(backend="posix", queue_depth=4, block_bytes=1 << 16, staging_bytes=1 << 20)
WORKLOAD = Workload(
    "small",
    (
        TensorSpec("layers.0.weight", torch.float32, (64, 129)),
        TensorSpec("layers.0.bias", torch.bfloat16, (7,)),
        TensorSpec("layers.0", torch.float8_e5m2, (3, 5)),
        TensorSpec("step", torch.int64, ()),
        TensorSpec("mask", torch.bool, (33,)),
        TensorSpec("large", torch.float16, (3, 1 << 18)),
    ),
)
PEERS: list[Callable[[], System]] = [
    lambda: Infinity(SMALL, verify=True, live=True),
    lambda: Infinity(SMALL, verify=False, live=False),
    TorchSave,
    Safetensors,
    Dcp,
    Zarr,
]


@pytest.fixture
def state() -> State:
    return State(WORKLOAD)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as top:
        folders = (Path(top, "a"), Path(top, "b"))
        for folder in folders:
            folder.mkdir()
        yield Place(folders)


@pytest.mark.parametrize("make", PEERS, ids=["live", "new", "torch", "safetensors", "dcp", "zarr"])
def test_system_brings_back_what_it_saved(
    make: Callable[[], System], state: State, place: Place
) -> None:
    system = make()
    saved = system.save(state, place)
    assert saved.nbytes == state.nbytes
    assert 0 < saved.returned_seconds <= saved.durable_seconds
    if system.loads_live:
        state.clear()
    loaded = system.load(state, place)
    assert loaded.nbytes == state.nbytes
    assert loaded.seconds > 0
    assert loaded.tensors is not None
    state.check(loaded.tensors)
    for name, tensor in loaded.tensors.items():
        assert (tensor.dtype, tensor.shape) == (
            state.tensors[name].dtype,
            state.tensors[name].shape,
        )
        assert (tensor is state.tensors[name]) == system.loads_live


def test_infinity_uses_every_directory_given_and_no_stripes_for_one(
    state: State, place: Place
) -> None:
    Infinity(SMALL, verify=True, live=True).save(state, place)
    for folder in place.folders:
        assert list(folder.rglob("*.safetensors"))
    assert stripes(Place(place.folders[:1])) is None


def test_infinity_async_returns_before_it_is_durable(state: State, place: Place) -> None:
    system = InfinityAsync(SMALL, verify=True, live=False)
    saved = system.save(state, place)
    assert 0 < saved.returned_seconds < saved.durable_seconds
    tensors = system.load(state, place).tensors
    assert tensors is not None
    state.check(tensors)


@pytest.mark.parametrize("num_directories", [1, 2])
def test_raw_writes_every_share_and_reads_it_back(
    state: State, place: Place, num_directories: int
) -> None:
    place = Place(place.folders[:num_directories])
    raw = Raw(SMALL)
    part = state.nbytes // num_directories // 4096 * 4096
    assert part_bytes(state.nbytes, num_directories) == part
    saved = raw.save(state, place)
    assert saved.nbytes == part * num_directories
    assert saved.returned_seconds < saved.durable_seconds
    assert [(folder / "raw").stat().st_size for folder in place.folders] == [part] * num_directories
    loaded = raw.load(state, place)
    assert (loaded.nbytes, loaded.tensors) == (part * num_directories, None)


def test_raw_alone_takes_the_share_it_would_have_among_others(state: State, place: Place) -> None:
    alone = Place(place.folders[:1])
    assert Raw(SMALL, num_shares=4).save(state, alone).nbytes == part_bytes(state.nbytes, 4)


def test_raw_reading_other_bytes_than_were_written_is_an_error(state: State, place: Place) -> None:
    raw = Raw(SMALL)
    raw.save(state, place)
    with (place.folders[1] / "raw").open("r+b") as file:
        file.seek(100_000)
        file.write(b"x" * 10)
    with (place.folders[0] / "raw").open("r+b") as file:
        file.seek(100_000)
        file.write(b"x" * 10)
    with pytest.raises(CheckError, match="raw reads"):
        raw.load(state, place)


def test_raw_uses_every_lane_of_the_engine(
    state: State, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[int | None] = []
    submit = Engine.submit

    def noting(self: Engine, requests: Any, *, lane: int | None = None) -> Any:
        lanes.append(lane)
        return submit(self, requests, lane=lane)

    monkeypatch.setattr(Engine, "submit", noting)
    monkeypatch.setattr("checkpoint.bench.systems.raw._REQUEST_BYTES", 1 << 16)
    setting = Setting(backend="posix", queue_depth=2, block_bytes=1 << 16, lanes=4)
    Raw(setting).save(state, place)
    assert set(lanes) == {0, 1, 2, 3}


def test_fio_is_run_with_the_setting_of_the_engine(place: Place) -> None:
    setting = Setting(backend="posix", queue_depth=8, block_bytes=1 << 16, lanes=4)
    command = Fio(setting).command("write", 64 << 20, place)
    # Two jobs for each of two directories, and for each of those as many calls as are in flight.
    assert {"--ioengine=psync", "--numjobs=16", "--iodepth=1", "--direct=1"} <= set(command)
    assert f"--size={(64 << 20) // 2 // 16}" in command
    assert [word for word in command if word.startswith("--filename")] == [
        f"--filename={folder / 'fio'}" for folder in place.folders
    ]


def test_fio_time_is_that_of_the_slowest_job() -> None:
    jobs = [{"write": {"io_bytes": 100, "runtime": ms}} for ms in (200, 1500)]
    output = f"fio: a note\n{json.dumps({'jobs': jobs})}"
    assert bytes_and_seconds("write", output) == (200, 1.5)


@pytest.mark.skipif(Fio.unavailable_reason() is not None, reason="fio is not installed")
def test_fio_writes_and_reads_every_byte(state: State, place: Place) -> None:
    fio = Fio(SMALL)
    nbytes = fio.save(state, place).nbytes
    assert state.nbytes * 0.8 <= nbytes <= state.nbytes
    assert fio.load(state, place).nbytes == nbytes


@pytest.mark.skipif(Fio.unavailable_reason() is not None, reason="fio is not installed")
def test_fio_that_fails_says_why(state: State) -> None:
    with pytest.raises(RuntimeError, match="fio ended with"):
        Fio(SMALL).save(state, Place((Path("/proc"),)))


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_deepspeed_brings_back_what_it_saved(place: Place) -> None:
    reason = DeepSpeed.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    # torch's old format, which it writes, cannot be read back with float8 in it.
    specs = tuple(spec for spec in WORKLOAD.tensors if spec.dtype != torch.float8_e5m2)
    state = State(Workload("without float8", specs))
    system = DeepSpeed()
    system.save(state, place)
    tensors = system.load(state, place).tensors
    assert tensors is not None
    state.check(tensors)


def test_make_durable_syncs_every_file_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "top"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"x")
    synced: list[Path] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").resolve()))
    make_durable(folder)
    assert synced == [folder / "deep" / "file", folder / "deep", folder, tmp_path]


def test_pattern_of_raw_io_is_not_compressible() -> None:
    from checkpoint.bench.systems.raw import _pattern

    assert len(np.unique(_pattern(1 << 16))) == 256
