"""``infinity.offload``: from a model and a budget to an ``OffloadedModel``, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from infinity.activation_tiers import ActivationShare, activations_for, mode_of
from infinity.bandwidth import shares
from infinity.buffers import BufferConversion
from infinity.discovery import RESIDENT_ELEMENTS, Record, least_arena_bytes, records_of
from infinity.loss_scale import LossScale
from infinity.materialize import fill_all, values_for
from infinity.model import OffloadedModel
from infinity.optimizer import AdamW, OffloadedOptimizer, OptimizerFactory, TorchRule
from infinity.tiling import MIN_TILE_BYTES, Tiling
from swap.directory import check_usable, reclaim
from swap.placement import Placement, place
from swap.rules import AdamRule, FrozenRule, UpdateRule
from swap.tiered import TieredState
from swap.tiers import Budget, BudgetError, format_bytes, parse_bytes

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_DEFAULT_OPTIMIZER = AdamW()
_DEVICE_SHARE = 0.5
"""Part of the free device memory that weights take by default; activations have the rest."""


@contextmanager
def offload(
    model: nn.Module,
    nvme: Directories,
    *,
    optimizer: AdamW | OptimizerFactory | None = _DEFAULT_OPTIMIZER,
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_grad_norm: float | None = None,
    activations: str = "keep",
    weights: str | os.PathLike[str] | None = None,
    max_parameter_bytes: int | str | None = None,
    overlap: bool = True,
) -> Iterator[OffloadedModel]:
    """Train (or run) ``model`` unchanged with its state on NVMe, within the budget, inside the
    block.

    - ``nvme``: a directory, or one for each SSD. Swap files live there while the block runs,
      nothing stays.
    - ``optimizer``: ``AdamW(...)`` for the native kernel, a factory ``params ->
      torch.optim.Optimizer`` for any other, None for inference.
    - ``device``: where to compute; None takes CUDA if there is one, else the CPU.
    - ``compute_dtype``: dtype of weights, gradients and floating-point buffers, as
      ``model.to(dtype)``; masters are kept in float32. None keeps each parameter's dtype.
    - ``device_memory``: most bytes of weights resident for compute; ``host_memory``: most bytes of
      host memory that the library takes (default: half of what is free). Ints, or text such as
      ``"8GiB"``.
    - ``max_grad_norm``: clip the gradients of every step to this 2-norm.
    - ``activations``: what autograd saves for the backward pass, ``"keep"`` leaves to it;
      ``"nvme"`` moves it to ``nvme`` but for the latest, within ``host_memory``; ``"host"`` moves
      it from a GPU to pinned memory, within ``host_memory``, and counts it on a CPU.
    - ``weights``: a safetensors file or folder, or a checkpoint of ours, to take the values from.
    - ``max_parameter_bytes``: weights of ``nn.Linear`` layers that are larger (in the compute
      dtype) are cut into tiles inside the block, see ``TiledLinear``; the layers come back after.
    - ``overlap=False`` does one transfer after the other, for measuring what overlap is worth.

    On leaving, parameters are real tensors with the trained values again, or on meta if they came
    so. Raises ``ValueError``, ``TypeError``, ``BudgetError`` (with the least budget that works) or
    ``OSError``; the model is as it was then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not an nn.Module")
    target = _device(device)
    directories = directories_of(nvme)
    for directory in directories:
        reclaim(directory)
    options = _Options(
        directories=directories,
        optimizer=optimizer,
        device=target,
        compute_dtype=compute_dtype,
        budget=make_budget(host_memory, device_memory, target),
        max_grad_norm=_checked_norm(max_grad_norm),
        share=ActivationShare(
            mode=mode_of(activations), device=target, num_directories=len(directories)
        ),
        weights=weights,
        max_parameter_bytes=parameter_bound(max_parameter_bytes),
        overlap=overlap,
    )
    with ExitStack() as stack:
        yield _enter(stack, model, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of ``offload``, checked one by one."""

    directories: list[str]
    optimizer: AdamW | OptimizerFactory | None
    device: torch.device
    compute_dtype: torch.dtype | None
    budget: Budget
    max_grad_norm: float | None
    share: ActivationShare
    weights: str | os.PathLike[str] | None
    max_parameter_bytes: int | None
    overlap: bool


def _enter(stack: ExitStack, model: nn.Module, options: _Options) -> OffloadedModel:
    """Offload ``model``; ``stack`` undoes all of it."""
    dtype = options.compute_dtype
    records = records_of(model, dtype)
    values = values_for(model, records, options.weights)
    if options.max_parameter_bytes is not None:
        tiling = Tiling(model, records, options.max_parameter_bytes, dtype)
        stack.enter_context(tiling)
        records = records_of(model, dtype)
        values = tiling.values(values, records)
    rule, inner = _rule(options.optimizer, records)
    placement = _place(model, records, rule, options)
    state = _open_state(stack, placement, rule, options)
    activations = activations_for(
        options.share, options.budget.host_bytes, options.directories, state.timeline
    )
    stack.callback(activations.close)
    offloaded = OffloadedModel(
        model,
        records,
        state,
        rule=rule,
        budget=options.budget,
        activations=activations,
        max_grad_norm=options.max_grad_norm,
        loss_scale=LossScale() if dtype == torch.float16 else None,
        compute_dtype=dtype,
        checkpoint_bytes=placement.checkpoint_bytes,
    )
    fill_all(state, records, values)
    stack.enter_context(BufferConversion(model, options.device, dtype, values))
    activations.leave_alone(model.buffers())
    offloaded.optimizer = _optimizer(options.optimizer, inner, records, offloaded)
    offloaded.attach(stack)
    return offloaded


def _place(
    model: nn.Module, records: Sequence[Record], rule: UpdateRule, options: _Options
) -> Placement:
    least_bytes = least_arena_bytes(model, records)
    check_device_budget(options.budget, least_bytes)
    try:
        return place(
            [record.spec for record in records],
            rule,
            options.share.rest_of(options.budget),
            least_arena_bytes=least_bytes,
            separate_device=options.device.type != "cpu",
        )
    except BudgetError as error:
        raise options.share.error(error, options.budget) from error


def parameter_bound(max_parameter_bytes: int | str | None) -> int | None:
    """The argument of ``offload`` in bytes; tiles that count as small parameters, which always
    stay in memory, would defeat their purpose.
    """
    if max_parameter_bytes is None:
        return None
    bound = parse_bytes(max_parameter_bytes, name="max_parameter_bytes")
    if bound < MIN_TILE_BYTES:
        raise ValueError(
            f"max_parameter_bytes={bound} is less than {MIN_TILE_BYTES}: parameters of up to "
            f"{RESIDENT_ELEMENTS} elements always stay in memory, smaller tiles would as well"
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
        host_memory = psutil.virtual_memory().available // 2
    device_bytes = None
    if device_memory is not None:
        device_bytes = parse_bytes(device_memory, name="device_memory")
    elif device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        device_bytes = int(free * _DEVICE_SHARE)
    return Budget(
        host_bytes=parse_bytes(host_memory, name="host_memory"), device_bytes=device_bytes
    )


def check_device_budget(budget: Budget, least_bytes: int) -> None:
    """Raises ``BudgetError`` if weights that are at work at once do not fit ``device_memory``."""
    if budget.device_bytes is not None and budget.device_bytes < least_bytes:
        raise BudgetError(
            f"device_memory={format_bytes(budget.device_bytes)} is too small: the largest block of "
            f"this model computes from {format_bytes(least_bytes)} ({least_bytes} bytes) of weights"
        )


def directories_of(nvme: Directories) -> list[str]:
    """The directories as absolute paths, each one usable.

    Raises ``TypeError``, ``ValueError`` or ``OSError`` (missing, no directory, not writable).
    """
    entries = [nvme] if isinstance(nvme, (str, os.PathLike)) else nvme
    if not isinstance(entries, Sequence):
        raise TypeError(f"nvme={nvme!r} is neither a path nor a sequence of paths")
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


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported; use 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: this torch sees no CUDA device")
    return chosen


def _rule(
    optimizer: AdamW | OptimizerFactory | None, records: Sequence[Record]
) -> tuple[UpdateRule, torch.optim.Optimizer | None]:
    """The rule for updates, and the user's own optimizer when a factory made one."""
    trained = [record for record in records if record.spec.trainable]
    if optimizer is None or not trained:
        return FrozenRule(), None
    if isinstance(optimizer, AdamW):
        for record in trained:
            if record.spec.dtype == torch.float64:
                raise ValueError(
                    f"{record.name} is float64, which infinity.AdamW does not compute in; pass "
                    "compute_dtype=torch.float32, or a factory such as torch.optim.AdamW"
                )
        return AdamRule(state_dtype=optimizer.state_dtype), None
    is_class = isinstance(optimizer, type) and issubclass(optimizer, AdamW)
    if is_class or not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is neither infinity.AdamW(...), a factory params -> "
            "Optimizer, nor None"
        )
    inner = optimizer([record.parameter for record in trained])
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"the optimizer factory returned {type(inner).__name__}, not an Optimizer")
    _check_groups(inner, trained)
    return TorchRule(inner), inner


def _check_groups(optimizer: torch.optim.Optimizer, trained: Sequence[Record]) -> None:
    """Raises ``ValueError`` unless the optimizer has the trained parameters and no others."""
    grouped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for record in trained:
        if grouped.pop(id(record.parameter), None) is None:
            raise ValueError(
                f"{record.name} is in no group of the optimizer that the factory made; add it, or "
                "call requires_grad_(False) if it is not to be trained"
            )
    for parameter in grouped.values():
        raise ValueError(
            f"the optimizer that the factory made has a parameter of shape "
            f"{tuple(parameter.shape)}, which is not one of those that it was given"
        )


def _optimizer(
    optimizer: AdamW | OptimizerFactory | None,
    inner: torch.optim.Optimizer | None,
    records: Sequence[Record],
    owner: OffloadedModel,
) -> OffloadedOptimizer:
    trained = [record.parameter for record in records if record.spec.trainable]
    if inner is not None:
        return OffloadedOptimizer(trained, inner.defaults, owner, param_groups=inner.param_groups)
    options = (optimizer if isinstance(optimizer, AdamW) else _DEFAULT_OPTIMIZER).defaults()
    return OffloadedOptimizer(trained or [records[0].parameter], options, owner)


def _open_state(
    stack: ExitStack, placement: Placement, rule: UpdateRule, options: _Options
) -> TieredState:
    state = TieredState(
        placement,
        rule,
        options.directories,
        shares=shares(options.directories),
        device=options.device,
        device_bytes=options.budget.device_bytes,
        overlap=options.overlap,
    )
    stack.callback(state.close)
    return state
