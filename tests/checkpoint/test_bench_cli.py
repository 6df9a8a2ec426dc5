"""ckpt-bench as it is run: results, refusals, interruptions, and nothing left behind."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import checkpoint
from aio import AioError, File
from checkpoint.bench import cli
from checkpoint.bench.conditions.scratch import PREFIX
from checkpoint.bench.output.files import write_output
from checkpoint.bench.systems.peers import TorchSave
from checkpoint.bench.systems.system import Infinity
from tests.support.proof import matrix
from tests.support.rig import ssd_fixture
from tests.support.scripts import Script

ROOT = Path(__file__).parents[2]
SMALL = ("--size", "1MiB", "--backend", "posix", "--queue-depth", "4", "--keep-free", "1MiB")

RAM = Path("/dev/shm")  # syncs cost nothing there

ssds = ssd_fixture(2)


@pytest.fixture(autouse=True)
def page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Others need the page cache too."""
    drop = tmp_path_factory.mktemp("proc") / "drop_caches"
    monkeypatch.setattr("checkpoint.bench.conditions.pagecache._DROP", drop)
    return drop


@pytest.fixture
def directories() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as folder:
        made = [Path(folder, "a"), Path(folder, "b")]
        for path in made:
            path.mkdir()
        yield made


def left_in(directories: list[Path]) -> list[str]:
    return [path.name for directory in directories for path in directory.iterdir()]


def run(directories: list[Path], *words: str) -> int:
    dirs = [word for directory in directories for word in ("--dir", str(directory))]
    return cli.main([*dirs, *SMALL, *words])


def test_bench_gives_table_json_and_plot_and_leaves_nothing(
    directories: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], page_cache: Path
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    words = ("--runs", "2", "--compare", "torch,safetensors", "--stripes", "1,2")
    assert run(directories, *words, "--json", str(out), "--plot", str(plot)) == 0
    shown = capsys.readouterr()
    for text in ("infinity", "torch", "safetensors", "page cache was dropped", "aio.Engine("):
        assert text in shown.out
    assert "will be written and read" in shown.err
    document = json.loads(out.read_text())
    assert document["num_runs"] == 2
    assert [one["path"] for one in document["directories"]] == [str(path) for path in directories]
    found = [(one["role"], one["system"], one["num_directories"]) for one in document["rows"]]
    assert found == [
        ("limit", "raw", 1),
        ("raw", "raw", 2),
        ("infinity", "infinity", 1),
        ("infinity", "infinity", 2),
        ("peer", "torch", 1),
        ("peer", "safetensors", 1),
    ]
    assert all(len(one["samples"]) == 2 for one in document["rows"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert page_cache.read_text() == "3"
    assert left_in(directories) == []


def test_bench_prints_json_alone_on_stdout_when_asked(
    directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(directories[:1], "--runs", "1", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["program"] == "ckpt-bench"
    assert "infinity" in shown.err


def test_bench_sweeps_settings_and_recommends_one_of_them(
    directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--block-size", "64KiB,256KiB", "--lanes", "1,2", "--staging", "1MiB")
    assert run(directories, "--runs", "1", *sizes, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    settings = [one["setting"] for one in document["rows"] if one["role"] == "infinity"]
    assert len(settings) == 4
    assert document["recommended"] in settings


def test_bench_of_a_model_saves_its_shapes(
    directories: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"w": torch.zeros(100, 70, dtype=torch.bfloat16), "b": torch.zeros(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    words = ["--dir", str(directories[0]), "--state", str(tmp_path / "model.safetensors")]
    assert cli.main([*words, "--runs", "1", "--backend", "posix", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (workload,) = document["workloads"]
    assert workload == {"label": "model.safetensors", "num_tensors": 2, "nbytes": 14_020}


def test_bench_loads_into_new_tensors_without_checksums_when_asked(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = checkpoint.load
    asked: list[dict[str, Any]] = []

    def noting(path: Path, **options: Any) -> Any:
        asked.append(options)
        return load(path, **options)

    monkeypatch.setattr(checkpoint, "load", noting)
    assert run(directories[:1], "--runs", "1", "--load", "new", "--no-verify", "--json") == 0
    assert {(one["into"], one["verify"]) for one in asked} == {(None, False)}
    assert json.loads(capsys.readouterr().out)["load_into"] == "new"


def flip_a_bit(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state["layers.3.mlp.up.weight"].view(torch.uint8)[2, 3] ^= 4
    return state


def test_bench_of_this_library_giving_a_wrong_bit_fails_and_names_the_tensor(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda *a, **k: flip_a_bit(load(*a, **k)))
    assert run(directories, "--runs", "1") == 1
    shown = capsys.readouterr()
    assert "tensor 'layers.3.mlp.up.weight' came back with CRC-32C" in shown.err
    assert shown.out == ""
    assert left_in(directories) == []


def test_bench_of_a_peer_giving_a_wrong_bit_goes_on_and_says_so(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = TorchSave.load_folder
    monkeypatch.setattr(TorchSave, "load_folder", lambda *a: flip_a_bit(load(*a)))
    assert run(directories, "--runs", "1", "--compare", "torch,safetensors", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (failure,) = document["failures"]
    assert failure["system"] == "torch"
    assert "CheckError: tensor 'layers.3.mlp.up.weight'" in failure["failure"]
    systems = [one["system"] for one in document["rows"]]
    assert systems == ["raw", "raw", "infinity", "safetensors"]
    assert left_in(directories) == []


def test_bench_whose_disk_fails_ends_with_the_error_and_leaves_nothing(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: File) -> None:
        raise AioError(f"cannot sync {self.path}: broken", errno=5, filename=str(self.path))

    monkeypatch.setattr(File, "sync", fail)
    assert run(directories, "--runs", "1") == 1
    assert "cannot sync" in capsys.readouterr().err
    assert left_in(directories) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "1000TiB"], "of memory"),
        (["--keep-free", "100TiB"], "are to stay free"),
        (["--compare", "deepspeed"], "--compare deepspeed: "),
        (["--stripes", "3"], "--stripes 3"),
    ],
)
def test_bench_that_cannot_work_is_refused_before_anything_is_written(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    reason = "it is missing"
    monkeypatch.setattr(
        "checkpoint.bench.systems.fastpersist.DeepSpeed.unavailable_reason", lambda: reason
    )
    assert run(directories, *words) == 2
    assert message in capsys.readouterr().err
    assert left_in(directories) == []


def test_bench_comparing_all_leaves_out_what_is_not_there(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "checkpoint.bench.systems.fastpersist.DeepSpeed.unavailable_reason", lambda: "it is missing"
    )
    monkeypatch.setattr("checkpoint.bench.systems.fio.Fio.unavailable_reason", lambda: "no fio")
    assert run(directories[:1], "--runs", "1", "--compare", "all", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["skipped"]["deepspeed"] == "it is missing"
    assert document["skipped"]["fio"] == "no fio"
    systems = {one["system"] for one in document["rows"]}
    assert {"raw", "infinity", "torch", "safetensors", "dcp", "zarr"} <= systems


def interrupted(number: signal.Signals, after: int, action: Callable[..., Any]) -> Any:
    """The action, which the process gets a signal after it was done so many times."""
    done = 0

    def acting(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done == after:
            os.kill(os.getpid(), number)
        return action(*arguments)

    return acting


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_bench_interrupted_shows_the_runs_it_finished_and_leaves_nothing(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    handler = signal.getsignal(number)
    # One save is the rehearsal, the third one belongs to the second run.
    monkeypatch.setattr(Infinity, "save", interrupted(number, 3, Infinity.save))
    assert run(directories, "--runs", "5") == 128 + number
    assert "Ended after 1 of 5 runs" in capsys.readouterr().out
    assert left_in(directories) == []
    assert signal.getsignal(number) == handler


def test_bench_interrupted_with_files_open_leaves_nothing(
    directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Infinity, "load", interrupted(signal.SIGTERM, 1, Infinity.load))
    assert run(directories, "--runs", "1") == 128 + signal.SIGTERM
    assert capsys.readouterr().out == ""
    assert left_in(directories) == []


def test_bench_as_a_process_ends_at_a_signal_and_leaves_nothing(directories: list[Path]) -> None:
    command = "import runpy; runpy.run_module('checkpoint.bench.cli', run_name='__main__')"
    words = ["--dir", directories[0], *SMALL, "--runs", 100_000]
    script = Script(command, *words, ends_interpreter=True)
    assert any("100000 runs" in line for line in script.stderr)
    assert left_in(directories)[0].startswith(PREFIX)
    script.send_signal(signal.SIGTERM)
    script.end()
    assert script.returncode == 128 + signal.SIGTERM
    assert left_in(directories) == []


def as_a_process(directories: list[Path], *words: str, **options: Any) -> Any:
    command = [sys.executable, "-m", "checkpoint.bench.cli", "--dir", str(directories[0])]
    command += [*SMALL, "--runs", "2", *words]
    return subprocess.run(
        command, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("words", matrix([[], ["--json"]], usual=[["--json"]]))
def test_bench_whose_output_is_full_names_it_and_writes_what_it_can(
    directories: list[Path], tmp_path: Path, words: tuple[str, ...]
) -> None:
    out = tmp_path / "out.json"
    with Path("/dev/full").open("w") as full:
        done = as_a_process(directories, *(words or ("--json", str(out))), stdout=full)
    assert done.returncode == 1
    *_, last = done.stderr.strip().splitlines()
    assert last == "ckpt-bench: [Errno 28] No space left on device: 'standard output'"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert words or json.loads(out.read_text())["num_runs"] == 2
    assert left_in(directories) == []


@pytest.mark.proof
@pytest.mark.parametrize("encoding", matrix(["ascii", "latin-1", "utf-8"], usual=["ascii"]))
def test_bench_shows_its_table_in_the_characters_that_there_are(
    directories: list[Path], encoding: str
) -> None:
    named = directories[0].with_name("\N{GREEK SMALL LETTER ALPHA}")
    named.mkdir()
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = as_a_process([named], env=environment, stdout=subprocess.PIPE, encoding=encoding)
    assert done.returncode == 0, done.stderr
    mark = "+-" if encoding == "ascii" else "\N{PLUS-MINUS SIGN}"
    assert f"median {mark} half the range" in done.stdout
    name = str(named) if encoding == "utf-8" else str(named).replace(named.name, r"\u03b1")
    assert name in done.stdout.replace("\n", "")


def test_bench_is_a_command_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["ckpt-bench"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


@pytest.mark.proof
def test_bench_on_limited_ssds_counts_each_disk(ssds: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    bench = [sys.executable, "-m", "checkpoint.bench.cli", "--dir={}", "--json", str(out)]
    command = ssds.command([*bench, "--size", "8MiB", "--runs", "1", "--keep-free", "1MiB"])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert [one["direct_io"] for one in document["directories"]] == [True, True]
    assert [one["role"] for one in document["rows"]] == ["limit", "limit", "raw", "infinity"]
    own = document["rows"][-1]
    limits = [one["save"]["bytes_per_second"]["median"] for one in document["rows"][:2]]
    assert own["save"]["limit_bytes_per_second"]["median"] == pytest.approx(sum(limits))
    left = [path.name for directory in ssds.directories for path in directory.iterdir()]
    assert left == ["lost+found"] * 2


def test_results_that_there_is_no_room_for_leave_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_output(path, b"before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_output(path, b"after")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]


def test_results_go_into_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        write_output(pipe, b"text")
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_results_go_into_a_file_that_has_no_other_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"before")

    def refused(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "replace", refused)
    write_output(path, b"after")
    assert path.read_bytes() == b"after"
