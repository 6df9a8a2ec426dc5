"""How much memory and how many processors there are to take: the limits of this process's own
control group and of those above it, in both versions.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aio.process.cgroups import memory_limits, num_processors
from checkpoint.saving import api as saving
from tests.support import cgroup

MIB = 1 << 20
REASON = cgroup.unavailable_reason()


def _process(folder: Path, groups: str, mounts: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def _group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_limits_of_version_2_count_in_every_group_up_to_the_mount(tmp_path: Path) -> None:
    mount = tmp_path / "unified"
    _group(mount, memory_current=0)
    _group(mount / "job", memory_max=8 * MIB, memory_current=3 * MIB)
    (mount / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {MIB}\nactive_file 0\n")
    _group(mount / "job" / "rank", memory_max="max", memory_high=4 * MIB, memory_current=MIB)
    process = _process(
        tmp_path / "self", "0::/job/rank\n", f"41 31 0:38 / {mount} rw - cgroup2 cgroup2 rw\n"
    )
    found = memory_limits(process)
    assert [(limit.limit_bytes, limit.left_bytes) for limit in found] == [
        (4 * MIB, 3 * MIB),
        (8 * MIB, 6 * MIB),
    ]


def test_limits_of_version_1_are_those_of_the_memory_controller(tmp_path: Path) -> None:
    mount = tmp_path / "with blank"
    _group(mount, memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=99 * MIB)
    _group(mount / "a", memory_limit_in_bytes=2 * MIB, memory_usage_in_bytes=3 * MIB)
    text = str(mount).replace(" ", r"\040")
    process = _process(
        tmp_path / "self",
        "4:memory:/a\n1:cpu:/elsewhere\n0::/\n",
        f"35 31 0:32 / {text} rw shared:1 - cgroup cgroup rw,memory\n"
        f"32 31 0:29 / {tmp_path} rw - cgroup cgroup rw,cpu\n",
    )
    assert [(limit.limit_bytes, limit.left_bytes) for limit in memory_limits(process)] == [
        (2 * MIB, 0)
    ]


def test_a_group_that_a_container_sees_as_its_root_counts(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    _group(mount, memory_limit_in_bytes=5 * MIB, memory_usage_in_bytes=MIB)
    for own in ("/docker/abc", "/"):
        process = _process(
            tmp_path / f"self{len(own)}",
            f"4:memory:{own}\n",
            f"35 31 0:32 /docker/abc {mount} rw - cgroup cgroup rw,memory\n",
        )
        assert [limit.left_bytes for limit in memory_limits(process)] == [4 * MIB]


def test_a_process_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "none") == []


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_memory_to_take_is_less_than_the_limit_of_the_own_group() -> None:
    program = "from checkpoint.transfer.memory import available_bytes, machine_bytes as m; " + (
        "print(available_bytes(), m())"
    )
    run = cgroup.run_limited([sys.executable, "-c", program], 700 * MIB)
    assert run.returncode == 0, run.stderr
    available, machine = map(int, run.stdout.split())
    assert 0 < available < machine == 700 * MIB


def _among_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))


def test_the_least_quota_of_version_2_up_to_the_mount_counts_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _among_32(monkeypatch)
    mount = tmp_path / "unified"
    _group(mount / "job", cpu_max="650000 100000")
    _group(mount / "job" / "rank", cpu_max="max 100000")
    line = f"41 31 0:38 / {mount} rw - cgroup2 cgroup2 rw\n"
    process = _process(tmp_path / "self", "0::/job/rank\n", line)
    assert num_processors(process) == 7
    _group(mount / "job" / "rank", cpu_max="50000 100000")
    assert num_processors(process) == 1
    _group(mount / "job" / "rank", cpu_max="6400000 100000")
    assert num_processors(process) == 7


def test_names_of_mounts_and_groups_may_be_any_bytes(tmp_path: Path) -> None:
    others = (b"one\xff", "two\N{NEXT LINE}\N{IDEOGRAPHIC SPACE}".encode())
    mount = tmp_path / "with blank\N{LATIN SMALL LETTER E WITH ACUTE}"
    group = os.fsdecode(b"job\xff")
    _group(mount / group, memory_max=8 * MIB, memory_current=0)
    process = _process(tmp_path / "self", "", "")
    line = b"43 31 0:38 / %s rw - %s x rw\n"
    mounts = [(b"/media/" + name, b"tmpfs") for name in others]
    mounts.append((os.fsencode(mount).replace(b" ", rb"\040"), b"cgroup2"))
    (process / "mountinfo").write_bytes(b"".join(line % mount for mount in mounts))
    (process / "cgroup").write_bytes(b"0::/" + os.fsencode(group) + b"\n")
    assert [limit.limit_bytes for limit in memory_limits(process)] == [8 * MIB]


def test_quotas_of_version_1_are_those_of_the_cpu_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _among_32(monkeypatch)
    mount = tmp_path / "cpu,cpuacct"
    _group(mount, cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    _group(mount / "a", cpu_cfs_quota_us=300000, cpu_cfs_period_us=100000)
    _group(mount / "a" / "b", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    _group(mount / "other", cpu_cfs_quota_us=1000, cpu_cfs_period_us=100000)
    process = _process(
        tmp_path / "self",
        "4:memory:/other\n1:cpu,cpuacct:/a/b\n0::/\n",
        f"35 31 0:32 / {mount} rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n",
    )
    assert num_processors(process) == 3


def test_processors_without_groups_are_those_of_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _among_32(monkeypatch)
    assert num_processors(tmp_path / "none") == 32


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_slab_larger_than_the_memory_of_its_group_is_not_locked() -> None:
    program = (
        "from aio import AioError, Slab\n"
        "try:\n    Slab(512 << 20, lock='required')\n"
        "except AioError as error:\n    print(error.strerror)\n"
    )
    run = cgroup.run_limited([sys.executable, "-c", program], 256 * MIB)
    assert (run.returncode, run.stdout) == (0, "Cannot allocate memory\n"), run


@pytest.mark.skipif(cgroup.no_quota_reason() is not None, reason="no cpu cgroup can be made")
def test_background_threads_of_a_limited_group_are_as_many_as_its_quota_has_time_for() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor leaves nothing for a quota to take")
    program = (
        "from swap.processors import num_threads, stay_in_background as s; "
        "s(); print(num_threads(None))"
    )
    assert cgroup.run_with_quota([sys.executable, "-c", program], 60_000, 100_000) == "1\n"


def test_ranks_of_one_machine_copy_within_their_parts_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "available_bytes", lambda: 64 << 30)
    layout = SimpleNamespace(nbytes=40 << 30)
    plan: Any = SimpleNamespace(fillers=[SimpleNamespace(plan=SimpleNamespace(layout=layout))])
    assert saving._budget(plan, None, 1) == 32 << 30
    assert saving._budget(plan, None, 8) == 4 << 30
    monkeypatch.setattr(saving, "available_bytes", lambda: 80 * MIB)
    assert saving._budget(plan, None, 1) == 40 * MIB
    assert saving._budget(plan, None, 4) == 16 * MIB
