"""``infinity plan``: for one model, or for the largest that a machine has room for."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

import torch
from rich.console import Console
from torch import nn

from infinity.activations.tiers import mode_of
from infinity.arguments import directories_of, disk_of, named_device
from infinity.commands.largest import largest
from infinity.commands.sources import DEFAULT, DTYPES, UsageError, source_of
from infinity.commands.waiting import told
from infinity.optim.adamw import AdamW
from infinity.planning.plan import Plan, plan
from swap.tiers import parse_bytes

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


_SIZES = ("host_memory", "device_memory", "space", "max_parameter_bytes", "drive_endurance")


def run_plan(options: argparse.Namespace, console: Console) -> bool:
    """Print the plan; whether it fits. Raises ``ValueError`` and ``OSError`` as ``plan`` does, and
    ``UsageError``.
    """
    _check(options)
    found, text, facts = (_largest if options.largest else _planned)(options)
    if options.json:
        document = {"source": text, **found.to_json(), **facts}
        console.out(json.dumps(document, indent=2), highlight=False)
        return found.fits
    console.print(f"{text}\n")
    console.print(str(found))
    for name, value in facts.items():
        console.print(f"\n{name.replace('_', ' ')}: {value}")
    return found.fits


def _check(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` for what makes no sense, whatever the model: who asks by the exit code
    whether one fits is not to take a slip of the pen for the answer.
    """
    try:
        for name in _SIZES:
            if (size := getattr(options, name)) is not None:
                parse_bytes(size, name="--space" if name == "space" else name)
        if options.device is not None:
            named_device(options.device)
        mode_of(options.activations)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _planned(options: argparse.Namespace) -> tuple[Plan, str, dict[str, Any]]:
    source = source_of(options.model, _dtype(options))
    if options.inference and isinstance(source.model, nn.Module):
        source.model.requires_grad_(False)
    compute_dtype = _dtype(options) if isinstance(source.model, int) else None
    with told(f"planning {source.text}"):
        found = plan(
            source.model, nvme=options.nvme, compute_dtype=compute_dtype, **_arguments(options)
        )
    return found, source.text, {}


def _largest(options: argparse.Namespace) -> tuple[Plan, str, dict[str, Any]]:
    given = {**_arguments(options), "compute_dtype": _dtype(options)}
    # Free memory changes meanwhile, and the budget has to be the same for all that are tried.
    given["host_memory"] = given["host_memory"] or plan(10**6).budget_host_bytes
    space_bytes = _space_bytes(options)
    with told("looking for the largest model that fits"):
        found = largest(lambda count: plan(count, **given), space_bytes)
        count = found.plan.num_parameters
        result = plan(count, nvme=options.nvme, **given)
    dtype = str(_dtype(options) or DEFAULT).removeprefix("torch.")
    text = f"the largest transformer that fits: {count:,} parameters in {dtype}"
    return result, text, {"a_larger_one": found.lacks}


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    optimizer = AdamW(state_dtype=STATE_DTYPES[options.state_dtype])
    return {
        "host_memory": options.host_memory,
        "device_memory": options.device_memory,
        "world_size": options.ranks,
        "passes": options.passes,
        "device": options.device,
        "activations": options.activations,
        "max_parameter_bytes": options.max_parameter_bytes,
        "verify_swap": options.verify_swap,
        "drive_endurance": options.drive_endurance,
        "optimizer": None if options.inference else optimizer,
    }


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return None if options.dtype is None else DTYPES[options.dtype]


def _space_bytes(options: argparse.Namespace) -> int | None:
    """Space on NVMe for each rank: what was said, or what is free in the directories now."""
    ranks: int = options.ranks
    if options.space is not None:
        return parse_bytes(options.space, name="--space") // ranks
    if options.nvme is None:
        return None
    # Each directory takes an equal part, and those on one disk share what it has.
    directories = directories_of(options.nvme)
    disks = [disk_of(directory) for directory in directories]
    free = [shutil.disk_usage(directory).free for directory in directories]
    part = min(nbytes // disks.count(disk) for nbytes, disk in zip(free, disks, strict=True))
    return part * len(directories) // ranks
