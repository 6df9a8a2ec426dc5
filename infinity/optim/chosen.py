"""What the ``optimizer`` argument of ``offload`` means: a rule for updates, and what users hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from infinity.optim.adamw import AdamW
from infinity.optim.optimizer import (
    OffloadedOptimizer,
    OptimizerFactory,
    StepTaker,
    check_in_model,
)
from infinity.optim.rule import FrozenRule, NativeOptimizer, OptimizerRule
from infinity.optim.stepping import listed_twice
from infinity.optim.torch_optimizer.rule import TorchRule
from infinity.optim.torch_optimizer.workers import share_hooks
from infinity.parameters.records import Record


def rule_for(
    optimizer: NativeOptimizer | OptimizerFactory | None, records: Sequence[Record]
) -> tuple[OptimizerRule, torch.optim.Optimizer | None]:
    """The rule for updates, and the user's own optimizer when a factory made one."""
    trained = [record for record in records if record.spec.trainable]
    if optimizer is None or not trained:
        return FrozenRule(), None
    if isinstance(optimizer, NativeOptimizer):
        return optimizer.rule(trained), None
    is_class = isinstance(optimizer, type) and issubclass(optimizer, NativeOptimizer)
    if is_class or not callable(optimizer):
        raise TypeError(_not_chosen(optimizer))
    _check_factory(getattr(optimizer, "func", optimizer))
    inner = optimizer([record.parameter for record in trained])
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"the optimizer factory returned {type(inner).__name__}, not an Optimizer")
    try:
        _check_factory(type(inner))
    except TypeError:
        inner.close()  # type: ignore[attr-defined]
        raise
    _check_groups(inner, trained)
    return TorchRule(inner), inner


def _not_chosen(optimizer: object) -> str:
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        return (
            f"optimizer is a {kind} that is made already, of other parameters; give what makes it "
            f"of those inside the block, such as optimizer=lambda params: {kind}(params, ...)"
        )
    return (
        f"optimizer={optimizer!r} is neither infinity.AdamW(...), a factory params -> Optimizer, "
        "nor None"
    )


def _check_factory(factory: object) -> None:
    """Raises ``TypeError`` for an optimizer that has tiers of its own (``OffloadedAdamW``)."""
    if getattr(factory, "has_own_tiers", False):
        raise TypeError(
            f"{getattr(factory, '__name__', factory)} keeps its state on NVMe by itself, for a "
            "model that is not offloaded; to offload pass optimizer=infinity.AdamW(...), whose "
            "results are the same"
        )


def _check_groups(optimizer: torch.optim.Optimizer, trained: Sequence[Record]) -> None:
    """Raises ``ValueError`` unless the optimizer has the trained parameters, each once, and no
    others.
    """
    times = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    grouped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for parameter in grouped.values():
        check_in_model(parameter)
    for record in trained:
        if grouped.pop(id(record.parameter), None) is None:
            raise ValueError(
                f"{record.name} is in no group of the optimizer that the factory made; add it, or "
                "call requires_grad_(False) if it is not to be trained"
            )
        if times[id(record.parameter)] > 1:
            raise listed_twice(record.name, "the groups of the optimizer that the factory made")
    for parameter in grouped.values():
        raise ValueError(
            f"the {type(optimizer).__name__} that the factory made has a parameter of shape "
            f"{tuple(parameter.shape)}, which is not one of those that it was given; give it those "
            "alone, `[p for p in model.parameters() if p.requires_grad]` (one that has frozen "
            "parameters in its groups, as that of LoRA-FA, cannot be honoured: use AdamW)"
        )


def optimizer_for(
    optimizer: NativeOptimizer | OptimizerFactory | None,
    inner: torch.optim.Optimizer | None,
    records: Sequence[Record],
    owner: StepTaker,
) -> OffloadedOptimizer:
    """The optimizer of the model: of all trained parameters, with the groups of ``inner`` and the
    hooks on its step.
    """
    trained = [record.parameter for record in records if record.spec.trainable]
    if inner is not None:
        offloaded = OffloadedOptimizer(trained, inner.defaults, owner, made=inner)
        share_hooks(offloaded, inner)
        return offloaded
    options = (optimizer if isinstance(optimizer, NativeOptimizer) else AdamW()).defaults()
    return OffloadedOptimizer(trained or [records[0].parameter], options, owner)
