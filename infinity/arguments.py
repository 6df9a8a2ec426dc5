"""The arguments of ``offload``, parsed and checked once, before anything is changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from aio.errors import check_flag
from checkpoint.directory.destination import check_place
from checkpoint.transfer.memory import available_bytes, machine_bytes
from infinity.activations.tiers import ActivationShare, mode_of
from infinity.optim.optimizer import OptimizerFactory
from infinity.optim.rule import NativeOptimizer
from infinity.parameters.records import ALWAYS_ON_HOST_ELEMENTS, Record
from infinity.tiling.layers import MIN_TILE_BYTES
from swap.storage.drives.directory import check_usable
from swap.tiers import Budget, format_bytes, parse_bytes

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_log = logging.getLogger(__name__)
_DEVICE_SHARE = 0.5
"""Part of the free device memory that weights take by default; activations have the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What ``offload`` was given, as it was given."""

    nvme: Directories
    optimizer: NativeOptimizer | OptimizerFactory | None
    device: torch.device | str | None
    compute_dtype: torch.dtype | None
    device_memory: int | str | None
    host_memory: int | str | None
    max_grad_norm: float | None
    activations: str
    weights: str | os.PathLike[str] | None
    max_parameter_bytes: int | str | None
    overlap: bool
    verify_swap: bool
    process_group: torch.distributed.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of ``offload``, checked one by one."""

    directories: list[str]
    optimizer: NativeOptimizer | OptimizerFactory | None
    device: torch.device
    compute_dtype: torch.dtype | None
    budget: Budget
    max_grad_norm: float | None
    share: ActivationShare
    weights: str | os.PathLike[str] | None
    max_parameter_bytes: int | None
    overlap: bool
    verify_swap: bool

    def among(self, ranks: int) -> Options:
        """With this rank's part of the host memory that so many on one machine share."""
        host_bytes = self.budget.host_bytes // ranks
        return replace(self, budget=replace(self.budget, host_bytes=host_bytes))

    def facts(self) -> dict[str, object]:
        """What has to be the same on every rank."""
        names = ("compute_dtype", "max_grad_norm", "max_parameter_bytes", "overlap", "verify_swap")
        facts: dict[str, object] = {name: getattr(self, name) for name in names}
        facts["activations"] = self.share.mode
        if self.optimizer is None or isinstance(self.optimizer, NativeOptimizer):
            facts["optimizer"] = self.optimizer
        return facts


def warn_of(options: Options) -> None:
    """One warning for each thing about the budget and the directories that will hurt later."""
    host_bytes, machine = options.budget.host_bytes, machine_bytes()
    if host_bytes > machine:
        _log.warning(
            "host_memory=%s is more than the %s that this machine, or the control group of this "
            "process, has: the process may be killed or swap before it has used its budget",
            format_bytes(host_bytes),
            format_bytes(machine),
        )
    seen: dict[str, str] = {}
    for directory in options.directories:
        other = seen.setdefault(disk_of(directory), directory)
        if other != directory:
            _log.warning(
                "%s and %s are on the same disk: together they are as fast as one of them; give "
                "one directory for each SSD",
                other,
                directory,
            )


def warn_of_ranks(given: Arguments) -> None:
    """One warning where ranks train beside each other: nothing that they compute would tell."""
    if given.process_group is not None or given.optimizer is None:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _log.warning(
            "there are %d ranks, and each trains a model of its own: nothing averages gradients "
            "but what the program itself does; give process_group=torch.distributed.group.WORLD "
            "for one model, or a group of this process alone if that is meant",
            dist.get_world_size(),
        )


def warn_of_rounding(records: Sequence[Record], *, trains: bool) -> None:
    """One warning for values that no master keeps as they came."""
    rounded = [
        record.numel
        for record in records
        if not ((record.spec.trainable and trains) or record.parameter.is_meta)
        and record.dtype.itemsize > record.spec.dtype.itemsize
    ]
    if rounded:
        _log.warning(
            "%d values of %d parameters that are not trained are rounded to the compute dtype, and "
            "come back rounded after the block; keep a copy, or leave compute_dtype out",
            sum(rounded),
            len(rounded),
        )


def disk_of(directory: str) -> str:
    """Tells disks apart, as far as the kernel says: partitions of a disk are on that disk."""
    number = Path(directory).stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not device.exists():
        return str(number)  # a file system without a block device of its own
    return str(device.parent if (device / "partition").exists() else device)


def checked(given: Arguments, device: torch.device) -> Options:
    """Raises ``ValueError``, ``TypeError``, or ``OSError`` for a directory that cannot be used."""
    directories = directories_of(given.nvme)
    if given.weights is not None:
        check_place(given.weights, "weights")
    mode = mode_of(given.activations)
    verify_swap = check_flag("verify_swap", given.verify_swap)
    overlap = check_flag("overlap", given.overlap)
    return Options(
        directories=directories,
        optimizer=given.optimizer,
        device=device,
        compute_dtype=given.compute_dtype,
        budget=make_budget(given.host_memory, given.device_memory, device),
        max_grad_norm=_checked_norm(given.max_grad_norm),
        share=ActivationShare(mode=mode, device=device, num_directories=len(directories)),
        weights=given.weights,
        max_parameter_bytes=parameter_bound(given.max_parameter_bytes),
        overlap=overlap,
        verify_swap=verify_swap,
    )


def parameter_bound(max_parameter_bytes: int | str | None) -> int | None:
    """The argument of ``offload`` in bytes; tiles that count as small parameters, which always
    stay in memory, would defeat their purpose.
    """
    if max_parameter_bytes is None:
        return None
    bound = parse_bytes(max_parameter_bytes, name="max_parameter_bytes")
    if bound < MIN_TILE_BYTES:
        raise ValueError(
            f"max_parameter_bytes={bound} is less than {MIN_TILE_BYTES}, four times the "
            f"{ALWAYS_ON_HOST_ELEMENTS} elements of float32 up to which parameters always stay in "
            "memory: tiles of less would stay there as well"
        )
    return bound


def make_budget(
    host_memory: int | str | None,
    device_memory: int | str | None,
    device: torch.device | None = None,
) -> Budget:
    """The budget that the arguments of ``offload`` mean; half of the memory that is free by
    default.
    """
    if host_memory is None:
        host_memory = available_bytes() // 2
    device_bytes = None
    if device_memory is not None:
        device_bytes = parse_bytes(device_memory, name="device_memory")
    elif device is not None and device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        device_bytes = int(free * _DEVICE_SHARE)
    return Budget(
        host_bytes=parse_bytes(host_memory, name="host_memory"), device_bytes=device_bytes
    )


def directories_of(nvme: Directories) -> list[str]:
    """The directories as absolute paths, each one usable.

    Raises ``TypeError``, ``ValueError`` or ``OSError`` (missing, no directory, not writable).
    """
    entries = [nvme] if isinstance(nvme, (str, bytes, os.PathLike)) else nvme
    if not isinstance(entries, Sequence):
        raise TypeError(f"nvme={nvme!r} is neither a path nor a sequence of paths")
    for entry in entries:
        check_place(entry, "nvme")
    directories = [str(Path(entry).absolute()) for entry in entries]
    if not directories:
        raise ValueError("nvme is empty; give a directory, or one for each SSD")
    if len({os.path.realpath(entry) for entry in directories}) < len(directories):
        raise ValueError(f"nvme={directories} names a directory twice; give each SSD once")
    for directory in directories:
        check_usable(Path(directory))
    return directories


def _checked_norm(max_grad_norm: float | None) -> float | None:
    if max_grad_norm is None:
        return None
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)):
        raise TypeError(f"max_grad_norm={max_grad_norm!r} is neither a number nor None")
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be more than 0")
    return max_grad_norm


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that an argument of ``offload`` means, with its index: what is on ``cuda`` is on
    ``cuda:0``, say, and threads of ours have another current device.
    """
    if device is None:
        return _with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = named_device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: this torch sees no CUDA device")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r}: this torch sees {torch.cuda.device_count()} CUDA device(s)"
        )
    return _with_index(chosen)


def _with_index(device: torch.device) -> torch.device:
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", torch.cuda.current_device())


def named_device(device: torch.device | str) -> torch.device:
    """A kind of device that there is, here or elsewhere. Raises ``ValueError`` for another one."""
    refusal = f"device={device!r} is not supported; use 'cpu' or 'cuda'"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(refusal) from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(refusal)
    return torch.device("cpu") if chosen.type == "cpu" else chosen  # there is one, of any number


def budget_of_rank(host_memory: int | str | None) -> int:
    """Bytes of host memory for one rank that knows its group only as that of the whole job: by
    default its part of half of what is free, as if all ranks were on this machine and looked at
    the same free memory.
    """
    shared = host_memory is None and dist.is_available() and dist.is_initialized()
    return make_budget(host_memory, None).host_bytes // (dist.get_world_size() if shared else 1)
