"""The example over two machines: the command of docs/TUNING.md, in two network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import checkpoint
from tests.support.hosts import Host, NoHostsError, two_hosts

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as made:
            yield made
    except NoHostsError as error:
        pytest.skip(f"no two hosts: {error}")


def _torchrun(options: list[str], folder: Path, nvme: str) -> list[str]:
    (folder / nvme).mkdir(parents=True)
    arguments = {"steps": str(STEPS), "save-every": str(STEPS), "width": "64", "layers": "1"}
    arguments |= {"nvme": str(folder / nvme), "checkpoints": str(folder / "run")}
    arguments |= {"host-memory": "64MiB"}
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    program = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*program, str(ROOT / "examples" / "torchrun.py"), *words]


def _start(command: list[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with output.open("w") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)


def _start_host(
    host: Host, first: Host, number: int, folder: Path, output: Path
) -> subprocess.Popen[bytes]:
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two"]
    options += [f"--rdzv-endpoint={first.address}:29500", f"--local-addr={host.address}"]
    options += [f"--rdzv-conf=is_host={int(host is first)}"]
    command = host.command(_torchrun(options, folder, f"nvme-{number}"))
    return _start(command, output, GLOO_SOCKET_IFNAME=host.interface)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "run" / f"step-{STEPS}"
    loaded = {name: checkpoint.load(path, only=[name]) for name in checkpoint.list_tensors(path)}
    return {name: tensor for name, tree in loaded.items() for tensor in _tensors(tree)}


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.root
def test_ranks_on_two_hosts_have_the_bits_of_those_on_one(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    apart, together = tmp_path / "apart", tmp_path / "together"
    apart.mkdir()
    together.mkdir()
    outputs = [tmp_path / f"output-{number}" for number in range(3)]
    one = _torchrun(["--standalone", "--nproc-per-node=2"], together, "nvme")
    running = [_start(one, outputs[2])]
    try:
        for number, host in enumerate(hosts):
            running.append(_start_host(host, hosts[0], number, apart, outputs[number]))
        codes = [process.wait(timeout=120) for process in running]
    finally:
        for process in running:
            process.terminate()  # which torchrun passes on to its ranks
            process.wait()
    assert codes == [0, 0, 0], "\n".join(output.read_text() for output in outputs)
    assert f"step {STEPS}: loss" in outputs[0].read_text() + outputs[1].read_text()
    expected, found = _weights(together), _weights(apart)
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for number in range(2):
        assert not any((apart / f"nvme-{number}").glob(".infinity/*/*.swap"))
