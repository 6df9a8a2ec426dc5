"""The rig: real file systems on limited devices, and nothing left of them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import byte_limit
import loop_ssd
import numpy as np
import pytest
import ssd_rig

from aio import AioError, Engine
from tests.support.rig import ssd_fixture, unavailable_reason

PROGRAM = Path(ssd_rig.__file__)
SMALL = ssd_rig.Spec(size_bytes=16 << 20, limit_bytes=300 << 20)

ssds = ssd_fixture(2)


@pytest.fixture
def rig_possible() -> None:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"no rig of SSDs: {reason}")


def traces(name: str) -> list[str]:
    """Whatever a rig of this name has left anywhere."""
    places = [ssd_rig.IMAGES / name, ssd_rig.MOUNTS / name]
    found = [str(path) for path in places if path.exists()]
    found += loop_ssd.loop_devices(ssd_rig.IMAGES / name)
    found += [str(mount.path) for mount in byte_limit.mounts() if name in mount.path.parts]
    limits = byte_limit.find_byte_limits(ssd_rig.CGROUP_PREFIX + name)
    return found + [str(limit.path) for limit in limits]


def counted_bytes(rig: ssd_rig.Rig) -> dict[str, int]:
    """By device, what the cgroup has seen written."""
    if rig.limit.hierarchy.version == 2:
        lines = [line.split() for line in (rig.limit.path / "io.stat").read_text().splitlines()]
        written = {line[0]: dict(item.split("=") for item in line[1:]) for line in lines}
        return {device: int(values["wbytes"]) for device, values in written.items()}
    text = (rig.limit.path / "blkio.throttle.io_service_bytes").read_text()
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[2]) for line in lines if line[1:2] == ["Write"]}


@contextlib.contextmanager
def libaio() -> Iterator[Engine]:
    try:
        engine = Engine("libaio", queue_depth=8, block_bytes=1 << 16)
    except AioError as error:
        pytest.skip(f"no kernel AIO: {error}")
    with engine:
        yield engine


def test_ssds_take_direct_io_through_kernel_aio_counted_in_the_cgroup(ssds: ssd_rig.Rig) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)
    before = counted_bytes(ssds)
    for ssd in ssds.ssds:
        with ssds.joined(), libaio() as engine:
            with engine.open(ssd.directory / "data", "x", size=data.nbytes) as file:
                assert file.direct
                engine.write(file, 0, data).result()
                back = np.zeros_like(data)
                engine.read(file, 0, back).result()
            assert (back == data).all()
        written = counted_bytes(ssds)[ssd.number] - before.get(ssd.number, 0)
        assert written >= data.nbytes


def test_ssds_have_devices_of_their_own_each_with_the_limit(ssds: ssd_rig.Rig) -> None:
    assert len({ssd.directory.stat().st_dev for ssd in ssds.ssds}) == 2
    for ssd in ssds.ssds:
        for name, line in byte_limit.limit_lines(
            ssds.limit.hierarchy.version, ssd.number, ssds.limit_bytes
        ):
            held = (ssds.limit.path / name).read_text().splitlines()
            assert any(set(line.split()) <= set(one.split()) for one in held), (name, held)


def test_joined_moves_the_process_in_and_back(ssds: ssd_rig.Rig) -> None:
    def inside() -> bool:
        return str(os.getpid()) in ssds.limit.procs.read_text().split()

    assert not inside()
    with ssds.joined():
        assert inside()
    assert not inside()


def test_command_runs_in_the_cgroup_with_every_directory_filled_in(ssds: ssd_rig.Rig) -> None:
    script = 'cat /proc/self/cgroup; printf "%s\\n" "$@"'
    command = ssds.command(["sh", "-c", script, "sh", "--dir={}"])
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *groups, first, second = said.splitlines()
    assert any(group.endswith(ssds.limit.path.name) for group in groups)
    assert [first, second] == [f"--dir={directory}" for directory in ssds.directories]


@pytest.mark.usefixtures("rig_possible")
def test_rig_leaves_nothing_behind_also_after_an_exception() -> None:
    names = []

    def fail_in_the_middle() -> None:
        with ssd_rig.ssd_rig(2, SMALL) as rig:
            names.append(rig.name)
            (rig.directories[0] / "file").write_bytes(b"x")
            assert len(traces(rig.name)) == 7
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_the_middle()
    assert traces(names[0]) == []


@pytest.mark.usefixtures("rig_possible")
def test_rig_with_a_directory_in_use_is_detached_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.ExitStack() as stack:
        with ssd_rig.ssd_rig(1, SMALL) as rig:
            file = stack.enter_context((rig.directories[0] / "file").open("wb"))
            file.write(b"still open")
        assert "in use" in caplog.text or "busy" in caplog.text
        assert not (ssd_rig.IMAGES / rig.name).exists()
    assert traces(rig.name) == []


@pytest.mark.usefixtures("rig_possible")
def test_reclaim_takes_down_what_a_killed_process_left_and_no_rig_in_use() -> None:
    script = (
        "import ssd_rig, signal\n"
        f"with ssd_rig.ssd_rig(1, ssd_rig.Spec(size_bytes={SMALL.size_bytes})) as rig:\n"
        "    print(rig.name, flush=True)\n"
        "    signal.pause()"
    )
    command = [sys.executable, "-c", script]
    with ssd_rig.ssd_rig(1, SMALL) as mine:
        child = subprocess.Popen(command, cwd=PROGRAM.parent, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child, child.stdout:
            name = child.stdout.readline().strip()
            assert ssd_rig.reclaim() == []
            child.kill()
        assert len(traces(name)) == 5
        assert ssd_rig.reclaim() == [name]
        assert traces(name) == []
        assert len(traces(mine.name)) == 5


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("rig_possible")
def test_program_brings_up_runs_lists_and_takes_down() -> None:
    name = f"test{os.getpid()}"
    sizes = ["--size", "16MiB", "--limit", "50MiB", "--name", name]
    try:
        up = run_program("up", "2", *sizes)
        assert up.returncode == 0, up.stderr
        assert up.stdout.count("52428800 bytes/s") == 2
        assert up.stdout in run_program("list").stdout
        again = run_program("up", "1", *sizes)
        assert (again.returncode, again.stdout) == (1, "")
        assert "is up already" in again.stderr
        ran = run_program("run", "--name", name, "--", "sh", "-c", 'echo "$@"; exit 7', "sh", "{}")
        assert ran.returncode == 7
        assert ran.stdout.split() == [str(ssd_rig.MOUNTS / name / f"ssd{k}") for k in range(2)]
    finally:
        assert run_program("down", "--name", name).returncode == 0
    assert traces(name) == []
    assert "not up" in run_program("run", "--name", name, "--", "true").stderr


@pytest.mark.usefixtures("rig_possible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_program_interrupted_ends_the_command_and_leaves_nothing(number: signal.Signals) -> None:
    options = ["run", "--count", "1", "--size", "16MiB", "--"]
    shell = ["sh", "-c", "echo {}; exec sleep 600"]
    child = subprocess.Popen(
        [sys.executable, str(PROGRAM), *options, *shell], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        directory = Path(child.stdout.readline().strip())
        child.send_signal(number)
    assert child.returncode == 128 + number
    assert traces(directory.parent.name) == []


def test_rig_without_root_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = ssd_rig.unavailable_reason()
    assert reason is not None
    assert "needs root" in reason


@pytest.mark.root
def test_rig_without_its_programs_names_the_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "losetup" else real(name))
    reason = ssd_rig.unavailable_reason()
    assert reason is not None
    assert "needs losetup" in reason


@pytest.mark.usefixtures("rig_possible")
def test_rig_without_a_cgroup_that_limits_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(byte_limit, "_MOUNTINFO", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text("1 2 0:3 / / rw - ext4 /dev/x rw\n")
    assert ssd_rig.unavailable_reason() == (
        "needs a cgroup that limits devices: no cgroup hierarchy is mounted"
    )


@pytest.mark.usefixtures("rig_possible")
@pytest.mark.parametrize(
    ("count", "size_bytes", "limit_bytes", "message"),
    [
        (0, 16 << 20, 1 << 20, "count=0"),
        (33, 16 << 20, 1 << 20, "count=33"),
        (1, 1 << 20, 1 << 20, "size_bytes=1048576"),
        (1, 16 << 20, 1000, "limit_bytes=1000"),
    ],
)
def test_rig_of_numbers_that_cannot_work_is_refused_by_name(
    count: int, size_bytes: int, limit_bytes: int, message: str
) -> None:
    def make() -> None:
        spec = ssd_rig.Spec(size_bytes=size_bytes, limit_bytes=limit_bytes)
        with ssd_rig.ssd_rig(count, spec):
            pass

    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("rig_possible")
def test_rig_bigger_than_memory_is_refused_with_the_numbers() -> None:
    spec = ssd_rig.Spec(size_bytes=1 << 50)
    with pytest.raises(ssd_rig.RigError, match=str(2 << 50)), ssd_rig.ssd_rig(2, spec):
        pass


def test_hierarchy_of_version_2_is_found_and_its_io_controller_switched_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "group root"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu io memory\n")
    (root / "cgroup.subtree_control").write_text("cpu\n")
    mountinfo = tmp_path / "mountinfo"
    escaped = str(root).replace(" ", "\\040")
    mountinfo.write_text(f"31 23 0:26 / {escaped} rw,nosuid - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(byte_limit, "_MOUNTINFO", mountinfo)
    assert byte_limit.find_hierarchy() == byte_limit.Hierarchy(2, root, "")
    assert (root / "cgroup.subtree_control").read_text() == "+io"
    (root / "cgroup.controllers").write_text("cpu memory\n")
    with pytest.raises(OSError, match="no io controller"):
        byte_limit.find_hierarchy()


def test_limit_lines_are_those_of_the_kernel_s_version() -> None:
    assert byte_limit.limit_lines(1, "7:0", 100) == [
        ("blkio.throttle.read_bps_device", "7:0 100"),
        ("blkio.throttle.write_bps_device", "7:0 100"),
    ]
    assert byte_limit.limit_lines(2, "7:0", 100) == [("io.max", "7:0 rbps=100 wbps=100")]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("400MiB", 400 << 20), ("3 GiB", 3 << 30), ("1.5k", 1500), ("2GB", 2 * 10**9)],
)
def test_parse_size_reads_binary_and_decimal_units(text: str, nbytes: int) -> None:
    assert ssd_rig.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1TiBs", "1 2"])
def test_parse_size_of_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        ssd_rig.parse_size(text)
