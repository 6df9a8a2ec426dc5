"""What ckpt-bench makes of its words, and which ones it refuses, by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.bench.conditions import arguments
from checkpoint.bench.conditions.arguments import Options, UsageError, parse_arguments
from checkpoint.bench.conditions.settings import SWEPT_BLOCK_BYTES, SWEPT_QUEUE_DEPTHS, Setting
from checkpoint.bench.conditions.units import format_size, parse_size


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "ssd"
    folder.mkdir()
    return folder


def parse(directory: Path, *words: str) -> Options:
    return parse_arguments(["--dir", str(directory), *words])


def test_arguments_without_a_directory_are_refused_with_what_would_be_written() -> None:
    with pytest.raises(UsageError, match=r"--dir DIRECTORY.* 10 GiB are written"):
        parse_arguments([])


def test_arguments_with_a_directory_alone_measure_the_defaults(directory: Path) -> None:
    options = parse(directory)
    assert options.directories == (directory,)
    assert options.stripes == (1,)
    assert options.settings == (Setting(),)
    assert [workload.nbytes for workload in options.workloads] == [1 << 30]
    assert (options.runs, options.verify, options.live) == (5, True, True)
    assert (options.compare, options.json, options.plot) == ((), None, None)


def test_lists_are_measured_in_all_combinations(directory: Path) -> None:
    options = parse(
        directory,
        *("--queue-depth", "4,8", "--block-size", "64KiB,1MiB", "--lanes", "1,2"),
        *("--staging", "32MiB", "--backend", "posix", "--size", "1MiB"),
    )
    assert len(set(options.settings)) == 8
    assert {setting.staging_bytes for setting in options.settings} == {32 << 20}
    assert {setting.queue_depth for setting in options.settings} == {4, 8}
    assert {setting.lanes for setting in options.settings} == {1, 2}


def test_sweep_fills_in_what_is_not_given(directory: Path) -> None:
    swept = parse(directory, "--sweep", "--size", "1MiB").settings
    assert len(swept) == len(SWEPT_QUEUE_DEPTHS) * len(SWEPT_BLOCK_BYTES)
    narrower = parse(directory, "--sweep", "--queue-depth", "8", "--size", "1MiB").settings
    assert {setting.queue_depth for setting in narrower} == {8}
    assert len(narrower) == len(SWEPT_BLOCK_BYTES)


def test_backend_all_takes_those_that_work_here(directory: Path) -> None:
    settings = parse(directory, "--backend", "all", "--size", "1MiB").settings
    backends = [setting.backend for setting in settings]
    assert "posix" in backends
    assert len(backends) == len(set(backends))
    assert set(backends) <= set(arguments.BACKENDS)


def test_tensor_sizes_make_one_workload_each(directory: Path) -> None:
    words = ("--size", "1MiB", "--tensor-size", "64KiB,whole,gpt")
    workloads = parse(directory, *words).workloads
    assert [len(workload.tensors) for workload in workloads] == [16, 1, 73]
    assert [workload.nbytes for workload in workloads] == [1 << 20] * 3
    assert [workload.label for workload in workloads][:2] == ["16 x 64 KiB", "1 x 1 MiB"]


def test_state_takes_shapes_and_dtypes_of_a_model(directory: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros((), dtype=torch.int64)}, tmp_path / "2.safetensors")
    (workload,) = parse(directory, "--state", str(tmp_path)).workloads
    assert [(spec.name, spec.dtype, spec.shape) for spec in workload.tensors] == [
        ("a", torch.bfloat16, (3, 5)),
        ("b", torch.int64, ()),
    ]
    (one,) = parse(directory, "--state", str(tmp_path / "1.safetensors")).workloads
    assert (one.label, one.nbytes) == ("1.safetensors", 30)


def test_compare_all_stands_for_everybody(directory: Path) -> None:
    options = parse(directory, "--compare", "all")
    assert options.compare == arguments.COMPARABLE
    assert options.compare_all


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stripes", "2"], "--stripes 2 asks for more than the 1 --dir"),
        (["--size", "4KiB"], "--size 4096 is less than"),
        (["--size", "1MiB", "--tensor-size", "2MiB"], "--tensor-size 2097152 is more than --size"),
        (["--block-size", "6000"], "--block-size 6000 is not a multiple of"),
        (["--queue-depth", "100000"], "--queue-depth 100000 is not between"),
        (["--lanes", "1000"], "--lanes 1000 is not between"),
        (["--state", "/no/such/model"], "--state: .*No such file.*/no/such/model"),
        (["--state", "x", "--size", "1MiB"], "--state says what is saved"),
        (["--plot", "results.txt"], "--plot results.txt does not end in .png"),
        (["--json", "/no/such/folder/x"], "--json /no/such/folder/x cannot be written"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    directory: Path, words: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse(directory, *words)


def test_directories_that_cannot_be_used_are_refused_by_name(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"--dir .*missing is not a directory"):
        parse(directory, "--dir", str(directory / "missing"))
    with pytest.raises(UsageError, match="--dir names a directory twice"):
        parse(directory, "--dir", f"{directory}/../ssd")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_results_for_a_folder_that_is_not_ours_are_refused_before_they_are_measured(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    ours = {directory, tmp_path / "ours.png"}  # root may write to all of them
    monkeypatch.setattr(os, "access", lambda path, _: path in ours)
    with pytest.raises(UsageError, match=f"{option} .*other.png cannot be written"):
        parse(directory, option, str(tmp_path / "other.png"))
    assert parse(directory, option, str(tmp_path / "ours.png"))
    ours.add(tmp_path)
    assert parse(directory, option, str(tmp_path / "other.png"))


@pytest.mark.parametrize("option", ["--dir", "--state", "--json", "--plot"])
def test_empty_paths_are_refused(
    directory: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """A variable of the shell that is not set is no wish for the current directory."""
    with pytest.raises(SystemExit, match="2"):
        parse(directory, option, "")
    assert f"argument {option}: the path is empty" in capsys.readouterr().err


def test_size_beyond_memory_is_refused_with_the_numbers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "available_bytes", lambda: 1 << 30)
    with pytest.raises(UsageError, match=r"takes 2\.25 GiB of memory .* 1 GiB are available"):
        parse(directory, "--size", "1GiB")
    assert parse(directory, "--size", "256MiB").workloads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "4 bananas"], "argument --size: '4 bananas' is not a size"),
        (["--size", "0"], "argument --size: '0' is not a size above zero"),
        (["--runs", "0"], "argument --runs: '0' is not a whole number above zero"),
        (["--queue-depth", "8,x"], "argument --queue-depth: 'x' is not a whole number"),
        (["--backend", "aio"], "argument --backend: 'aio' is not one of"),
        (["--compare", "pickle"], "argument --compare: 'pickle' is not one of"),
        (["--tensor-size", "1MiB,6"], "argument --tensor-size: '6' is not a multiple of 4"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_words_that_mean_nothing_are_refused_by_name(
    directory: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(directory, *words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def header_file(path: Path, header: Any) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "is not a safetensors file"),
        ([1, 2], "its header is no object"),
        ({}, "there are no tensors in"),
        ({"w": {"dtype": "F31", "shape": [1]}}, "cannot make a tensor like 'w'"),
        ({"w": {"dtype": "F32", "shape": [-1]}}, r"its shape is \(-1,\)"),
        ({"w": 5}, "cannot make a tensor like 'w'"),
    ],
)
def test_state_that_is_no_model_is_refused_by_name(
    directory: Path, tmp_path: Path, header: Any, message: str
) -> None:
    path = header_file(tmp_path / "model.safetensors", header)
    with pytest.raises(UsageError, match=message):
        parse(directory, "--state", str(path))


def test_state_with_a_header_of_absurd_length_is_refused(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match="its header has"):
        parse(directory, "--state", str(path))
    with pytest.raises(UsageError, match=r"no \*.safetensors file"):
        parse(directory, "--state", str(directory))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("4KiB", 4096), ("4k", 4000), ("1.5 MiB", 3 << 19), ("2TB", 2 * 10**12)],
)
def test_parse_size_reads_binary_and_decimal_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_format_size_reads_back_as_the_same_size() -> None:
    for nbytes in (1, 1023, 1024, 5 << 20, 3 << 30, 1 << 40):
        assert parse_size(format_size(nbytes)) == nbytes
