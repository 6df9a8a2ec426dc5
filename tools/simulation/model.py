"""A Llama, as its parameters and the arithmetic of its layers, and the homes of its state in small.

Homes are those that the planner gives the model in its true size. What is run is a ``SCALE``-th of
every parameter and of every memory: as many subgroups, whose parts take as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from swap.plan.layout import PIECE, Layout, ParameterSpec, pack, pad
from swap.plan.placement import Placement, place
from swap.plan.rules import UpdateRule
from swap.plan.sizes import gradient_bytes, slot_bytes_of, state_bytes, unit_state_bytes
from swap.tiers import Budget, Tier

SCALE = 512
"""Of the largest subgroups, of 2 Mi elements, one piece is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Of 6.7 G parameters, as ``python tools/simulate_steps.py`` has it by default."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 11008
    vocabulary: int = 32000

    @property
    def modules(self) -> list[list[int]]:
        """Elements of the parameters of each module, in the order of execution; norms left out."""
        square, wide = self.hidden**2, self.hidden * self.inner
        table = self.vocabulary * self.hidden
        return [[table], *[[square] * 4 + [wide] * 3] * self.layers, [table]]

    @property
    def num_parameters(self) -> int:
        return sum(map(sum, self.modules))

    def flops(self, module: int, tokens: int) -> float:
        """Of a forward pass through a module: 2 for each parameter that is multiplied and token. A
        backward pass has twice as many.
        """
        is_table = module == 0
        return 0.0 if is_table else 2.0 * sum(self.modules[module]) * tokens

    def specs(self) -> list[ParameterSpec]:
        sizes = [numel for module in self.modules for numel in module]
        return [_spec(index, numel) for index, numel in enumerate(sizes)]

    @property
    def largest_module_bytes(self) -> int:
        return 2 * max(map(sum, self.modules))


def placed(model: Llama, rule: UpdateRule, budget: Budget) -> Placement:
    """Homes in the true size. Raises ``BudgetError``."""
    return place(
        model.specs(),
        rule,
        budget,
        least_arena_bytes=2 * model.largest_module_bytes,
        separate_device=True,
        hides_updates=True,
    )


def in_small(placement: Placement, rule: UpdateRule) -> Placement:
    """A ``SCALE``-th of everything, with the same homes. Raises ``ValueError`` where rounding to
    whole pieces makes other subgroups.
    """
    layout = _small_layout(placement.layout)
    _check_alike(layout, placement.layout)
    moving = [unit for unit in layout.units if unit.trainable and not unit.always_on_host]
    state = [unit_state_bytes(unit, rule) for unit in layout.units]
    gradients = [gradient_bytes(unit) for unit in layout.units]
    states = {tier: _sum_at(placement.state_home, layout, state, tier) for tier in Tier}
    kept = {tier: _sum_at(placement.gradient_home, layout, gradients, tier) for tier in Tier}
    slot_bytes = max((slot_bytes_of(unit, rule) for unit in moving), default=0)
    sizes: dict[str, Any] = {
        "slot_bytes": slot_bytes if placement.num_slots else 0,
        "scratch_bytes": 0,
        "state_host_bytes": states[Tier.HOST],
        "spare_bytes": sum(state_bytes(layout.subgroups[one], rule) for one in placement.spared),
        "state_nvme_bytes": states[Tier.NVME],
        "state_device_bytes": states[Tier.DEVICE],
        "gradient_device_bytes": kept[Tier.DEVICE],
        "gradient_host_bytes": kept[Tier.HOST],
        "gradient_nvme_bytes": kept[Tier.NVME],
    }
    others = [field.name for field in fields(placement) if field.name.endswith("_bytes")]
    for name in others:
        sizes.setdefault(name, _small(getattr(placement, name)))
    return replace(placement, layout=layout, **sizes)


def _spec(index: int, numel: int) -> ParameterSpec:
    return ParameterSpec(
        index=index,
        name=f"p{index}",
        numel=numel,
        dtype=torch.bfloat16,
        trainable=True,
    )


def _small(nbytes: int) -> int:
    return pad(-(-nbytes // SCALE)) if nbytes else 0


def _small_layout(layout: Layout) -> Layout:
    specs = [_spec(spec.index, -(-spec.numel // SCALE)) for spec in layout.specs]
    return pack(specs, pad(layout.subgroup_elements // SCALE))


def _check_alike(small: Layout, true: Layout) -> None:
    for one, other in zip(small.units, true.units, strict=False):
        if (one.parameters, one.num_subgroups) != (other.parameters, other.num_subgroups):
            break
    else:
        if len(small.units) == len(true.units):
            return
    raise ValueError(
        f"the subgroups of this model in a {SCALE}-th of its size are others (parameters are "
        f"rounded to {PIECE} elements); give sizes that are multiples of {PIECE * SCALE}"
    )


def _sum_at(homes: Sequence[Tier], layout: Layout, nbytes: Sequence[int], tier: Tier) -> int:
    return sum(
        size for unit, size in zip(layout.units, nbytes, strict=True) if homes[unit.first] is tier
    )
