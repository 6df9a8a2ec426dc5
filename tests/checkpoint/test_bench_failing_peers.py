"""ckpt-bench beside libraries that fail, or that make something else of an interrupt."""

import contextlib
import errno
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from checkpoint.bench import cli
from checkpoint.bench.systems.peers import TorchSave

RAM = Path("/dev/shm")  # syncs cost nothing there


@pytest.fixture(autouse=True)
def page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others need the page cache too."""
    monkeypatch.setattr("checkpoint.bench.conditions.pagecache._DROP", tmp_path / "drop_caches")


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as folder:
        yield Path(folder)


def run(directory: Path, peer: str, runs: int) -> int:
    small = ["--size", "1MiB", "--backend", "posix", "--queue-depth", "4", "--keep-free", "1MiB"]
    words = ["--compare", peer, "--runs", str(runs), "--json"]
    return cli.main(["--dir", str(directory), *small, *words])


def test_interrupt_of_which_a_peer_makes_an_error_ends_all_and_is_no_failure_of_the_peer(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = TorchSave.save
    done = 0

    def saving(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        try:
            if done == 3:  # the second run: one save is the rehearsal
                os.kill(os.getpid(), signal.SIGTERM)
            return save(*arguments)
        except BaseException as error:
            raise RuntimeError("unexpected position") from error

    monkeypatch.setattr(TorchSave, "save", saving)
    assert run(directory, "torch", 5) == 128 + signal.SIGTERM
    document = json.loads(capsys.readouterr().out)
    assert (document["num_runs"], document["failures"]) == (1, [])
    assert list(directory.iterdir()) == []


def test_interrupt_that_a_peer_swallows_ends_all(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = TorchSave.save

    def saving(*arguments: Any) -> Any:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        return save(*arguments)

    monkeypatch.setattr(TorchSave, "save", saving)
    assert run(directory, "torch", 5) == 128 + signal.SIGINT
    assert capsys.readouterr().out == ""
    assert list(directory.iterdir()) == []


def test_interrupt_within_dcp_ends_all(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(FileSystemWriter, "write_data", ended)
    assert run(directory, "dcp", 1) == 128 + signal.SIGTERM
    assert capsys.readouterr().out == ""
    assert list(directory.iterdir()) == []


def test_dcp_that_fails_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    assert run(directory, "dcp", 1) == 0
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert (failure["system"], failure["failure"]) == ("dcp", "OSError: [Errno 28] no room")
    assert list(directory.iterdir()) == []
