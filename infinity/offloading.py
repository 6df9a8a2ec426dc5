"""``infinity.offload``: from a model and a budget to an ``OffloadedModel``, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil
import torch
from torch import nn

from infinity.buffers import BufferConversion
from infinity.discovery import Record, least_arena_bytes, records_of
from infinity.loss_scale import LossScale
from infinity.materialize import fill_all, values_for
from infinity.model import OffloadedModel
from infinity.optimizer import AdamW, OffloadedOptimizer, OptimizerFactory, TorchRule
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
    weights: str | os.PathLike[str] | None = None,
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
    - ``weights``: a safetensors file or folder, or a checkpoint of ours, to take the values from.
    - ``overlap=False`` does one transfer after the other, for measuring what overlap is worth.

    On leaving, parameters are real tensors with the trained values again, or on meta if they came
    so. Raises ``ValueError``, ``TypeError``, ``BudgetError`` (with the least budget that works) or
    ``OSError`` before the model is changed.
    """
    directories = directories_of(nvme)
    target = _device(device)
    records = records_of(model, compute_dtype)
    rule, inner = _rule(optimizer, records)
    budget = make_budget(host_memory, device_memory, target)
    check_device_budget(budget, least_arena_bytes(model, records))
    placement = place(
        [record.spec for record in records],
        rule,
        budget,
        least_arena_bytes=least_arena_bytes(model, records),
        separate_device=target.type != "cpu",
    )
    values = values_for(model, records, weights)
    with ExitStack() as stack:
        state = _open_state(stack, placement, rule, directories, target, budget, overlap)
        offloaded = OffloadedModel(
            model,
            records,
            state,
            rule=rule,
            budget=budget,
            max_grad_norm=max_grad_norm,
            loss_scale=LossScale() if compute_dtype == torch.float16 else None,
            compute_dtype=compute_dtype,
            checkpoint_bytes=placement.checkpoint_bytes,
        )
        fill_all(state, records, values)
        stack.enter_context(BufferConversion(model, target, compute_dtype, values))
        offloaded.optimizer = _optimizer(optimizer, inner, records, offloaded)
        offloaded.attach(stack)
        yield offloaded


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
    """Raises ``BudgetError`` if the weights that are at work at once do not fit ``device_memory``."""
    if budget.device_bytes is not None and budget.device_bytes < least_bytes:
        raise BudgetError(
            f"device_memory={format_bytes(budget.device_bytes)} is too small: the largest block of "
            f"this model computes from {format_bytes(least_bytes)} ({least_bytes} bytes) of weights"
        )


def directories_of(nvme: Directories) -> list[str]:
    entries = [nvme] if isinstance(nvme, (str, os.PathLike)) else list(nvme)
    directories = [os.fspath(entry) for entry in entries]
    if not directories:
        raise ValueError("nvme is empty; give a directory, or one for each SSD")
    if len({os.path.realpath(entry) for entry in directories}) < len(directories):
        raise ValueError(f"nvme={directories} names a directory twice; give each SSD once")
    return directories


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
    if not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is neither infinity.AdamW(...), a factory params -> "
            "Optimizer, nor None"
        )
    inner = optimizer([record.parameter for record in trained])
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"the optimizer factory returned {type(inner).__name__}, not an Optimizer")
    return TorchRule(inner), inner


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
    stack: ExitStack,
    placement: Placement,
    rule: UpdateRule,
    directories: Sequence[str],
    device: torch.device,
    budget: Budget,
    overlap: bool,
) -> TieredState:
    state = TieredState(
        placement,
        rule,
        directories,
        device=device,
        device_bytes=budget.device_bytes,
        overlap=overlap,
    )
    stack.callback(state.close)
    return state
