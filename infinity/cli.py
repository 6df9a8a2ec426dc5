"""The ``infinity`` command: plan a run, look at checkpoints, measure and clean up directories."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import checkpoint
from checkpoint.directory.locate import read_manifest
from infinity.planning.plan import plan
from swap.storage.bandwidth import measure_and_keep
from swap.storage.directory import reclaim
from swap.tiers import format_bytes

MODEL = "model."
"""What the names of weights begin with in a checkpoint of `OffloadedModel.save`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 on success, 1 with a message on what users can mend."""
    options = _arguments().parse_args(argv)
    run: Callable[[argparse.Namespace, Console], int] = options.run
    try:
        # Names and paths are text: what is in brackets in them is no markup.
        return run(options, Console(soft_wrap=True, markup=False, emoji=False))
    except (OSError, ValueError) as error:
        print(f"infinity {options.command}: {error}", file=sys.stderr)
        return 1


def _plan(options: argparse.Namespace, console: Console) -> int:
    result = plan(
        options.parameters,
        nvme=options.nvme,
        host_memory=options.host_memory,
        device_memory=options.device_memory,
        world_size=options.world_size,
        passes=options.passes,
    )
    console.print(str(result), highlight=False)
    return 0 if result.fits else 1


def _ls(options: argparse.Namespace, console: Console) -> int:
    for name in checkpoint.list_tensors(options.path):
        console.print(name, highlight=False)
    return 0


def _show(options: argparse.Namespace, console: Console) -> int:
    manifest = read_manifest(Path(options.path))
    table = Table("tensor", "dtype", "shape", "bytes")
    for tensor in manifest.tensors:
        shape = " x ".join(str(size) for size in tensor.shape) or "scalar"
        name = Text(tensor.name)
        table.add_row(name, tensor.dtype, shape, format_bytes(tensor.nbytes))
    console.print(table)
    console.print(
        f"{len(manifest.tensors)} tensors, {format_bytes(manifest.nbytes)} in "
        f"{len(manifest.files)} files, saved by {manifest.world_size} rank(s)",
        highlight=False,
    )
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    report = checkpoint.verify(options.path, stripe_dirs=options.stripe_dir)
    console.print(str(report), highlight=False)
    return 0 if report.ok else 1


def _export(options: argparse.Namespace, console: Console) -> int:
    prefix = options.prefix
    if prefix is None:
        names = checkpoint.list_tensors(options.path)
        prefix = MODEL if any(name.startswith(MODEL) for name in names) else ""
    files = checkpoint.export_safetensors(
        options.path, options.folder, prefix=prefix, stripe_dirs=options.stripe_dir
    )
    for file in files:
        console.print(str(file), highlight=False)
    return 0


def _tune(options: argparse.Namespace, console: Console) -> int:
    for directory in options.directories:
        found = measure_and_keep(directory)
        console.print(
            f"{directory}: reads {format_bytes(found.read)}/s, "
            f"writes {format_bytes(found.write)}/s",
            highlight=False,
        )
    return 0


def _gc(options: argparse.Namespace, console: Console) -> int:
    for directory in options.directories:
        removed = reclaim(directory)
        console.print(f"{directory}: {len(removed)} leftovers removed", highlight=False)
    return 0


_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def _count(text: str) -> int:
    """A number of parameters: 7e9, 7B, 350M, 7_000_000_000."""
    digits = text.strip().rstrip("".join(_COUNTS) + "".join(_COUNTS).lower())
    unit = text.strip()[len(digits) :].upper()
    try:
        whole = digits.replace("_", "").isdecimal()
        count = (int(digits) if whole else float(digits)) * _COUNTS[unit]
        found = int(count)
    except (KeyError, ValueError, OverflowError):
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of parameters; write 7e9, 7B or 350M"
        )
    return found


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="infinity", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace, Console], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("plan", _plan, "where the bytes of a model of that size would live")
    command.add_argument("parameters", type=_count, help="such as 7e9 or 7B")
    command.add_argument("--nvme", action="append", help="a directory to measure; repeatable")
    command.add_argument("--host-memory", help="such as 64GiB")
    command.add_argument("--device-memory")
    command.add_argument("--world-size", type=_at_least_one, default=1, help="number of ranks")
    command.add_argument(
        "--passes", type=_at_least_one, default=1, help="backward passes before each step"
    )
    command = add("ls", _ls, "names of the tensors of a checkpoint")
    command.add_argument("path")
    command = add("show", _show, "dtype and shape of the tensors of a checkpoint")
    command.add_argument("path")
    moved = "where its data are, if they were moved; repeatable"
    command = add("verify", _verify, "read everything and compare the checksums")
    command.add_argument("path")
    command.add_argument("--stripe-dir", action="append", help=moved)
    command = add("export", _export, "write safetensors shards with an index")
    command.add_argument("path")
    command.add_argument("folder")
    command.add_argument("--stripe-dir", action="append", help=moved)
    command.add_argument(
        "--prefix",
        help=f"of the tensors to write; taken off (default: {MODEL} if there are any, else all)",
    )
    command = add("tune", _tune, "measure directories, and keep the result for offload")
    command.add_argument("directories", nargs="+")
    command = add("gc", _gc, "remove what dead processes left in directories")
    command.add_argument("directories", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main())
