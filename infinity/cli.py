"""The ``infinity`` command: plan a run, look at checkpoints, measure and clean up directories."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import checkpoint
import infinity
from aio import naming
from aio.process import output
from checkpoint.directory.locate import read_manifest
from infinity.commands.contents import printable, tree_lines
from infinity.commands.foreign.exporting import (
    check_exportable,
    export_optimizer,
    parameters_for,
)
from infinity.commands.foreign.importing import import_state
from infinity.commands.planned import STATE_DTYPES, run_plan
from infinity.commands.sources import DTYPES, UsageError, has_config, source_of
from infinity.commands.waiting import told
from infinity.snapshots.entries import checked_name
from infinity.snapshots.points import Snapshots
from infinity.values.initial.weight_files import WeightFolder
from swap.storage.drives.bandwidth import measure_and_keep
from swap.storage.drives.directory import reclaim
from swap.storage.drives.endurance import DRIVE_ENDURANCE
from swap.tiers import format_bytes

MODEL = "model."
"""What the names of weights begin with in a checkpoint of `OffloadedModel.save`."""
DONE, FAILED, MISUSED, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
Run = Callable[[argparse.Namespace, Console], int]

_EXAMPLES = """\
examples:
  infinity plan 7B --host-memory 32GiB
  infinity plan --largest --host-memory 32GiB --space 1TB
  infinity tune /mnt/nvme0 /mnt/nvme1
  infinity show /mnt/nvme0/run/final --depth 3
  infinity verify /mnt/nvme0/run/final
  infinity export /mnt/nvme0/run/final weights

`infinity COMMAND --help` says more of each.

exit codes: 0 done; 1 it failed, or the answer is no (a plan that does not fit, a checkpoint that is
damaged); 2 arguments that make no sense; 130 Ctrl-C; 141 nobody reads the output any more.
"""
_PLAN = """\
Nothing is loaded and no memory is taken: the model of a folder is built on the meta device. With
--nvme each directory is measured: 256 MiB are written to it, read and removed.

examples:
  infinity plan 7B --host-memory 32GiB
  infinity plan path/to/llama --host-memory 32GiB --device cuda --device-memory 24GiB
  infinity plan model.safetensors --state-dtype bfloat16 --nvme /mnt/nvme0 --nvme /mnt/nvme1
  infinity plan 70B --ranks 8 --passes 4 --json
  infinity plan --largest --host-memory 32GiB --space 1TB
"""
_IMPORT = """\
What comes from the source goes on bit for bit: masters where it has them (DeepSpeed, FSDP),
moments and step counts. Files of torch.save have no weights of the model; those of --model are
taken, so give the folder that was saved with them. Learning rate, betas and so on are those of the
source where it names its groups, else those that you pass.

Afterwards: offload the same model, and offloaded.load(path).

examples:
  infinity import checkpoint-500/optimizer.pt imported --model checkpoint-500
  infinity import global_step500_universal imported --model path/to/llama
  infinity import fsdp/step-500 imported --model path/to/llama
"""


class _Screen(Console):
    """Names and paths are text: what is in brackets in them is no markup."""

    def __init__(self) -> None:
        super().__init__(soft_wrap=True, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:
        with naming(output.NAME):
            super().print(*objects, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; arguments that make no sense exit with 2."""
    options = _arguments().parse_args(argv)
    run: Run = options.run
    output.escape_others()
    try:
        code = run(options, _Screen())
        with naming(output.NAME):
            print(end="", flush=True)  # nothing where stdout is closed
        return code
    except BrokenPipeError:  # such as `infinity ls ... | head`
        output.give_up_unwritten()
        return UNREAD
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError) as error:
        output.give_up_unwritten()
        print(f"infinity {options.command}: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, UsageError) else FAILED


def _plan(options: argparse.Namespace, console: Console) -> int:
    if (options.model is None) != options.largest:
        raise UsageError(
            "give a model (a folder, a safetensors file, or a number of parameters such as 7B), or "
            "--largest in its place"
        )
    return DONE if run_plan(options, console) else FAILED


def _ls(options: argparse.Namespace, console: Console) -> int:
    for name in checkpoint.list_tensors(options.path):
        console.print(printable(name))
    return DONE


def _show(options: argparse.Namespace, console: Console) -> int:
    manifest = read_manifest(Path(options.path))
    for line in tree_lines(manifest.tensors, options.depth):
        console.print(line)
    console.print(
        f"{len(manifest.tensors)} tensors, {format_bytes(manifest.nbytes)} in "
        f"{len(manifest.files)} files, saved by {manifest.world_size} rank(s)"
    )
    return DONE


def _verify(options: argparse.Namespace, console: Console) -> int:
    nbytes = format_bytes(read_manifest(Path(options.path)).nbytes)
    with told(f"verifying {nbytes} of {options.path}"):
        report = checkpoint.verify(options.path, stripe_dirs=options.stripe_dir)
    console.print(str(report))
    return DONE if report.ok else FAILED


def _export(options: argparse.Namespace, console: Console) -> int:
    if options.optimizer is not None:
        check_exportable(
            options.path, options.optimizer, options.stripe_dir, folder=Path(options.folder)
        )
    prefix = options.prefix
    if prefix is None:
        names = checkpoint.list_tensors(options.path)
        prefix = MODEL if any(name.startswith(MODEL) for name in names) else ""
    with told(f"exporting {options.path} to {options.folder}"):
        files = checkpoint.export_safetensors(
            options.path, options.folder, prefix=prefix, stripe_dirs=options.stripe_dir
        )
        if options.optimizer is not None:
            files.append(export_optimizer(options.path, options.optimizer, options.stripe_dir))
    for file in files:
        console.print(str(file))
    if options.optimizer is not None and (
        told_of := parameters_for(options.path, options.stripe_dir)
    ):
        console.print(told_of)
    return DONE


def _import(options: argparse.Namespace, console: Console) -> int:
    model = source_of(str(options.model), torch.float32).model
    if isinstance(model, int):
        raise UsageError(f"--model {options.model}: there is nothing at that path")
    files = WeightFolder(options.model)
    with told(f"importing {options.source} to {options.path}"):
        found = import_state(
            options.source, model, files, Path(options.path), is_ordered=has_config(options.model)
        )
    info, taken = found.info, found.taken
    console.print(f"{info.path}: {format_bytes(info.nbytes)}; go on with offloaded.load")
    if taken:
        console.print(
            f"weights of {len(taken)} parameters are those of {options.model}, which has to be of "
            f"the same step: {', '.join(taken[:3])}{', ...' if len(taken) > 3 else ''}"
        )
    if not found.has_options:
        console.print(
            f"{options.source} names no options of the optimizer: those that you give to "
            "infinity.offload (learning rate, betas, eps, weight decay) are used"
        )
    return DONE


def _tune(options: argparse.Namespace, console: Console) -> int:
    for directory in options.directories:
        with told(f"measuring {directory}"):
            found = measure_and_keep(directory)
        console.print(
            f"{directory}: reads {format_bytes(found.read)}/s, writes {format_bytes(found.write)}/s"
        )
    return DONE


def _gc(options: argparse.Namespace, console: Console) -> int:
    for directory in options.directories:
        removed = reclaim(directory)
        console.print(f"{directory}: {len(removed)} orphans removed")
    return DONE


def _snapshots(options: argparse.Namespace, console: Console) -> int:
    for directory in options.directories:
        with os.scandir(directory):
            pass  # who mistypes one is told
    snapshots = Snapshots(options.directories)
    snapshots.warn_of_others()
    try:
        for name in options.drop or ():
            snapshots.drop(None, checked_name(name))
    finally:
        snapshots.close()
    for one in snapshots.listed():
        when = one.time.isoformat(timespec="seconds")
        console.print(f"{one.name}: step {one.step}, {when}, {format_bytes(one.nbytes)}")
    return DONE


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity",
        description="Plan a training run, look at checkpoints, measure and clean up directories.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"infinity-offload {infinity.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Run, text: str, more: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{name}: {text}",
            epilog=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    _add_plan(add("plan", _plan, "what a model takes, and where its bytes would live", _PLAN))
    command = add("ls", _ls, "names of the tensors of a checkpoint")
    command.add_argument("path")
    command = add("show", _show, "tensors of a checkpoint as a tree, with dtypes, shapes and bytes")
    command.add_argument("path")
    command.add_argument("--depth", type=_at_least_one, help="so many parts of the names")
    command = add("verify", _verify, "read everything and compare the checksums")
    command.add_argument("path")
    _add_stripes(command)
    command = add("export", _export, "write safetensors shards with an index")
    command.add_argument("path")
    command.add_argument("folder")
    _add_stripes(command)
    command.add_argument(
        "--prefix",
        help=f"of the tensors to write; taken off (default: {MODEL} if there are any, else all)",
    )
    command.add_argument(
        "--optimizer",
        type=Path,
        metavar="FILE",
        help="write the moments there too, as the state dict of torch.optim.AdamW",
    )
    command = add("import", _import, "AdamW's state of other libraries, as a checkpoint", _IMPORT)
    command.add_argument(
        "source",
        type=Path,
        help="a file of torch.save, a universal checkpoint of DeepSpeed, or one of "
        "torch.distributed.checkpoint",
    )
    command.add_argument("path", type=_place, help="of the checkpoint to write")
    command.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="its config.json and safetensors files, or such a file: names, shapes, and the "
        "weights where the source has none",
    )
    command = add(
        "tune", _tune, "measure directories (256 MiB in each), and keep the result for offload"
    )
    command.add_argument("directories", nargs="+", metavar="directory", type=_place)
    command = add("gc", _gc, "remove what dead processes left in directories, snapshots excepted")
    command.add_argument("directories", nargs="+", metavar="directory", type=_place)
    _add_snapshots(add("snapshots", _snapshots, "list the snapshots on the directories of a run"))
    return parser


def _place(text: str) -> str:
    """A variable of the shell that is not set is not meant to be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give '.' for the current directory")
    return text


def _add_snapshots(command: argparse.ArgumentParser) -> None:
    command.add_argument("directories", nargs="+", metavar="directory", type=_place)
    text = "remove one, and what only it keeps; repeatable"
    command.add_argument("--drop", action="append", metavar="NAME", help=text)


def _add_stripes(command: argparse.ArgumentParser) -> None:
    text = "where its data are, if they were moved; repeatable"
    command.add_argument("--stripe-dir", action="append", metavar="DIR", help=text)


def _add_plan(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "model",
        nargs="?",
        help="a folder with config.json, a safetensors file, or a number of parameters: 7B, 7e9",
    )
    add("--largest", action="store_true", help="the largest transformer that fits, by its size")
    add("--nvme", action="append", metavar="DIR", help="a directory to measure; repeatable")
    add("--space", metavar="SIZE", help="space on NVMe that --largest may take, such as 1TB")
    add("--host-memory", metavar="SIZE", help="such as 64GiB (half of what is free)")
    add("--device-memory", metavar="SIZE", help="for weights on the GPU, with --device cuda")
    add("--device", help="cpu or cuda; a GPU need not be here (cuda where there is one)")
    add(
        *("--ranks", "--world-size"),
        type=_at_least_one,
        default=1,
        metavar="N",
        help="processes that share the model; figures are of one (1)",
    )
    add(
        "--passes",
        type=_at_least_one,
        default=1,
        metavar="N",
        help="backward passes before each step (1)",
    )
    add(
        "--dtype", choices=DTYPES, help="of the weights (what the model says; of a number bfloat16)"
    )
    add("--state-dtype", choices=STATE_DTYPES, default="float32", help="of AdamW's moments")
    add("--inference", action="store_true", help="without gradients and optimizer")
    add("--activations", default="keep", help="keep, host or nvme (keep)")
    add("--max-parameter-bytes", metavar="SIZE", help="cut larger layers into tiles")
    add("--verify-swap", action="store_true", help="with checksums of what is on NVMe")
    add(
        "--drive-endurance",
        default=DRIVE_ENDURANCE,
        metavar="SIZE",
        help=f"bytes that each drive is rated for ({DRIVE_ENDURANCE})",
    )
    add("--json", action="store_true", help="as JSON: bytes and seconds as numbers")


if __name__ == "__main__":
    sys.exit(main())
