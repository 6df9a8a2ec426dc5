"""The command line, parsed and checked into `Options`. Creates nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from aio import AioError, Backend, Engine
from checkpoint.bench.conditions.settings import (
    SWEPT_BLOCK_BYTES,
    SWEPT_QUEUE_DEPTHS,
    Grid,
    Setting,
)
from checkpoint.bench.conditions.units import format_size, parse_size
from checkpoint.bench.conditions.workload import (
    Workload,
    equal_workload,
    gpt_workload,
    model_workload,
)
from checkpoint.transfer.memory import available_bytes

T = TypeVar("T")

COMPARABLE = ("raw", "fio", "async", "torch", "safetensors", "dcp", "zarr", "deepspeed")
BACKENDS: tuple[Backend, ...] = ("io_uring", "libaio", "posix")
DEFAULT_SIZE_BYTES = 1 << 30
MIN_SIZE_BYTES = 64 << 10
STDOUT = Path("-")

_EPILOG = """\
Options that say LIST take several values, separated by commas, and all combinations are measured.
Sizes are written like 4GiB, 64KiB or 4096.

examples:
  ckpt-bench --dir /mnt/nvme0 --dir /mnt/nvme1 --size 4GiB
  ckpt-bench --dir /mnt/nvme0 --sweep --plot sweep.png
  ckpt-bench --dir /mnt/nvme0 --compare all --json results.json
  ckpt-bench --dir /mnt/nvme0 --state model.safetensors --backend all --queue-depth 8,32
"""


_NO_DIRECTORY = """\
say on which disk: --dir DIRECTORY, once for each SSD. By default 10 GiB are written to each in
turn and removed (5 runs of 1 GiB, beside as many raw writes); --size and --runs make it less.
"""


class UsageError(ValueError):
    """Arguments that cannot work together, or not on this machine; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be measured, and where the results go.

    `stripes`: over how many of the first directories; `skipped`: what "all" left out, and why.
    """

    directories: tuple[Path, ...]
    stripes: tuple[int, ...]
    workloads: tuple[Workload, ...]
    settings: tuple[Setting, ...]
    compare: tuple[str, ...]
    compare_all: bool
    runs: int
    verify: bool
    live: bool
    keep_free_bytes: int | None
    json: Path | None
    plot: Path | None
    quiet: bool


def parse_arguments(argv: Sequence[str] | None) -> Options:
    """Ends the program on words it does not know; raises UsageError for values that cannot work."""
    words = _parser().parse_args(argv)
    if not words.dir:
        raise UsageError(_NO_DIRECTORY)
    directories = _directories(words.dir)
    stripes = tuple(words.stripes or [len(directories)])
    if max(stripes) > len(directories):
        raise UsageError(
            f"--stripes {max(stripes)} asks for more than the {len(directories)} --dir"
        )
    options = Options(
        directories=directories,
        stripes=stripes,
        workloads=_workloads(words),
        settings=_settings(words, stripes),
        compare=COMPARABLE if "all" in words.compare else tuple(words.compare),
        compare_all="all" in words.compare,
        runs=words.runs,
        verify=words.verify,
        live=words.load == "live",
        keep_free_bytes=words.keep_free,
        json=words.json,
        plot=words.plot,
        quiet=words.quiet,
    )
    _check_memory(options)
    _check_outputs(options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt-bench",
        description="Measures how fast checkpoints are saved and loaded, beside what the disks "
        "give to raw writes and reads, and beside other libraries.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser)
    _add_settings(parser)
    _add_how(parser)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is saved, and where").add_argument
    add("--dir", type=_of(_path), action="append", help="a directory to write to, once per SSD")
    add("--stripes", type=_list(_count), metavar="LIST", help="over the first so many (all)")
    add("--size", type=_of(_size), metavar="SIZE", help="bytes of tensors (1GiB)")
    add(
        "--tensor-size",
        type=_list(_tensor_size),
        metavar="LIST",
        help="tensors of that size; `whole` for one tensor, `gpt` for those of a GPT (gpt)",
    )
    add("--state", type=_of(_path), metavar="PATH", help="shapes of a safetensors file or folder")
    add(
        "--compare",
        type=_list(_comparable),
        default=(),
        metavar="LIST",
        help=f"measure these too: {', '.join(COMPARABLE)}, or all that work here",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the engine").add_argument
    add("--backend", type=_list(_backend), metavar="LIST", help=f"{', '.join(BACKENDS)}, auto, all")
    add("--queue-depth", type=_list(_count), metavar="LIST", help="blocks in flight a lane (32)")
    add("--block-size", type=_list(_size), metavar="LIST", help="bytes of a block (1MiB)")
    add("--lanes", type=_list(_count), metavar="LIST", help="queues with a thread (1 a directory)")
    add("--staging", type=_list(_size), metavar="LIST", help="memory for staging (256MiB)")
    add(
        "--sweep",
        action="store_true",
        help="go through usual queue depths and block sizes, where these are not given",
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how, and what comes out").add_argument
    add("--runs", type=_of(_count), default=5, metavar="N", help="of each, taking turns (5)")
    add(
        "--load",
        choices=("live", "new"),
        default="live",
        help="load into the tensors that were saved, as a resume does, or into new ones (live)",
    )
    add("--no-verify", dest="verify", action="store_false", help="load without checksums")
    add(
        "--keep-free",
        type=_of(_size),
        metavar="SIZE",
        help="leave so much of every file system free (a twentieth of it)",
    )
    add("--json", type=_of(_path), nargs="?", const=STDOUT, metavar="FILE", help="results (stdout)")
    add("--plot", type=_of(_path), metavar="FILE", help="a picture of them, such as results.png")
    add("--quiet", action="store_true", help="no progress")


def _of(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser for argparse, which shows the messages of its own error only."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _list(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    def values(text: str) -> list[T]:
        return list(dict.fromkeys(parse(word.strip()) for word in text.split(",")))

    return _of(values)


def _path(text: str) -> Path:
    """An empty one is a variable of the shell that is not set, and means nothing."""
    if not text:
        raise ValueError("the path is empty; give . for the current directory")
    return Path(text)


def _size(text: str) -> int:
    nbytes = parse_size(text)
    if nbytes < 1:
        raise ValueError(f"{text!r} is not a size above zero")
    return nbytes


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number above zero")
    return int(text)


def _tensor_size(text: str) -> int | str:
    if text in ("gpt", "whole"):
        return text
    nbytes = _size(text)
    if nbytes % 4:
        raise ValueError(f"{text!r} is not a multiple of 4 bytes")
    return nbytes


def _comparable(text: str) -> str:
    if text not in (*COMPARABLE, "all"):
        raise ValueError(f"{text!r} is not one of {', '.join(COMPARABLE)} and all")
    return text


def _backend(text: str) -> str:
    if text not in (*BACKENDS, "auto", "all"):
        raise ValueError(f"{text!r} is not one of {', '.join(BACKENDS)}, auto and all")
    return text


def _directories(given: Sequence[Path]) -> tuple[Path, ...]:
    directories = tuple(path.resolve() for path in given)
    for path in directories:
        if not path.is_dir():
            raise UsageError(f"--dir {path} is not a directory; make it first")
        if not os.access(path, os.W_OK):
            raise UsageError(f"--dir {path} cannot be written to")
    if len(set(directories)) != len(directories):
        raise UsageError(f"--dir names a directory twice: {', '.join(map(str, directories))}")
    return directories


def _workloads(words: argparse.Namespace) -> tuple[Workload, ...]:
    if words.state is not None:
        if words.size is not None or words.tensor_size is not None:
            raise UsageError("--state says what is saved; leave out --size and --tensor-size")
        try:
            return (model_workload(words.state),)
        except (ValueError, OSError) as error:
            raise UsageError(f"--state: {error}") from error
    nbytes = DEFAULT_SIZE_BYTES if words.size is None else words.size
    if nbytes < MIN_SIZE_BYTES:
        raise UsageError(f"--size {nbytes} is less than {MIN_SIZE_BYTES}: nothing to measure")
    return tuple(_workload(kind, nbytes) for kind in words.tensor_size or ["gpt"])


def _workload(kind: int | str, nbytes: int) -> Workload:
    if kind == "gpt":
        return gpt_workload(nbytes)
    if kind == "whole":
        return equal_workload(nbytes, nbytes // 4 * 4)
    assert isinstance(kind, int)
    if kind > nbytes:
        raise UsageError(f"--tensor-size {kind} is more than --size {nbytes}")
    return equal_workload(nbytes, kind)


def _settings(words: argparse.Namespace, stripes: Sequence[int]) -> tuple[Setting, ...]:
    depths = words.queue_depth or (SWEPT_QUEUE_DEPTHS if words.sweep else None)
    blocks = words.block_size or (SWEPT_BLOCK_BYTES if words.sweep else None)
    given: dict[str, Any] = {
        "backends": _backends(words.backend or ["auto"]),
        "queue_depths": depths,
        "block_bytes": blocks,
        "lanes": words.lanes,
        "staging_bytes": words.staging,
    }
    grid = Grid(**{name: tuple(values) for name, values in given.items() if values})
    for setting in grid.settings():
        _try(setting, max(stripes))
    return grid.settings()


def _backends(names: Sequence[str]) -> list[Backend]:
    if "all" not in names:
        return cast("list[Backend]", list(names))
    working: list[Backend] = []
    for backend in BACKENDS:
        try:
            Engine(backend, queue_depth=1).close()
        except AioError:
            continue
        working.append(backend)
    return working


def _try(setting: Setting, num_directories: int) -> None:
    """An engine that cannot be made is found out now, by the name that the user gave."""
    try:
        setting.engine(num_directories).close()
    except (ValueError, AioError) as error:
        text = str(error)
        for field, option in (
            ("queue_depth", "--queue-depth"),
            ("block_bytes", "--block-size"),
            ("lanes", "--lanes"),
            ("backend", "--backend"),
        ):
            text = text.replace(f"{field}=", f"{option} ")
        raise UsageError(text) from error


def _check_memory(options: Options) -> None:
    """Every state stays in memory, and one more for systems that load into new tensors."""
    sizes = [workload.nbytes for workload in options.workloads]
    staging = max(setting.staging_bytes for setting in options.settings)
    needed = sum(sizes) + max(sizes) + staging
    available = available_bytes()
    if needed > available:
        raise UsageError(
            f"measuring takes {format_size(needed)} of memory (every state and one more to load, "
            f"and staging), and {format_size(available)} are available; use a smaller --size"
        )


def _check_outputs(options: Options) -> None:
    """A result that cannot be written is found out before it has been measured."""
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is None or path == STDOUT:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"{option} {path} cannot be written: not a file in a directory")
        if not any(os.access(place, os.W_OK) for place in (path, path.parent)):
            raise UsageError(f"{option} {path} cannot be written: neither it nor its directory is")
    if options.plot is not None and options.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {options.plot} does not end in .png, .svg or .pdf")
