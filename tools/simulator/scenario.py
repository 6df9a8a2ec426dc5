"""A model on some nodes: what each rank keeps and moves, what a step takes, by replay and by the
formulas of the papers. Pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from simulator.analytic import efficiency, intensity, save_seconds
from simulator.homes import Homes, homes_of
from simulator.rates import UNLIMITED, Node, Rates
from simulator.replay import Pattern, StepTimes, simulate
from simulator.transformer import Transformer
from swap.plan.layout import Plane
from swap.plan.placement import planes_of
from swap.tiers import Budget, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``world_size`` ranks, ``per_node`` on each node, each with ``host_memory`` and
    ``device_memory`` bytes. ``passes`` micro-batches go before a step. With ``saves`` a checkpoint
    is written behind training at every step, by all ranks; one written alone may have fewer
    ``writers`` on each node, each of which writes ``writer_limit`` bytes a second at most.
    """

    model: Transformer
    node: Node
    world_size: int
    per_node: int
    passes: int = 1
    activations: Tier = Tier.HOST
    saves: bool = False
    writers: int | None = None
    writer_limit: float = UNLIMITED
    steps: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= self.world_size or self.world_size % self.per_node:
            raise ValueError(
                f"world_size={self.world_size} ranks are not whole nodes of {self.per_node}"
            )
        if self.writers is not None and not 1 <= self.writers <= self.per_node:
            raise ValueError(
                f"writers={self.writers} must be 1 to {self.per_node}, the ranks of a node"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a scenario comes to, bytes and seconds for one rank unless said otherwise.

    ``efficiency``: part of the time in which devices compute. The three of the formula are what
    ZeRO-Infinity's section 4 gives for each kind of state if nothing overlaps; infinite bandwidth,
    where it never leaves the device, is 1.
    """

    scenario: Scenario
    num_subgroups: int
    kept_parameters: int
    host_bytes: int
    nvme_bytes: int
    nvme_share: float
    checkpoint_bytes: int
    save_alone_seconds: float
    least_compute_seconds: float
    times: StepTimes
    times_with_saves: StepTimes | None
    formula: dict[str, float]

    @property
    def efficiency(self) -> float:
        return self.least_compute_seconds / self.times.step_seconds

    @property
    def flops_per_device(self) -> float:
        """As the papers count them: with what is recomputed."""
        return self.scenario.model.flops * self.scenario.passes / self.times.step_seconds

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["scenario"]["activations"] = self.scenario.activations.name
        return {
            **values,
            "efficiency": self.efficiency,
            "flops_per_device": self.flops_per_device,
        }


def look(scenario: Scenario) -> Outlook:
    """Raises ``BudgetError`` if the model cannot be trained with the memory of a rank."""
    node, model = scenario.node, scenario.model
    trace = model.trace()
    budget = Budget(host_bytes=node.host_memory, device_bytes=node.device_memory)
    homes = homes_of(trace, budget, world_size=scenario.world_size)
    rates = node.of_rank(scenario.per_node, scenario.world_size)
    pattern = Pattern(
        warm_steps=2,
        steps=scenario.steps,
        passes=scenario.passes,
        activations=scenario.activations,
    )
    saved, from_disk = _saved_bytes(homes)
    with_saves = None
    if scenario.saves:
        saving = replace(pattern, save_bytes=saved, save_read_bytes=from_disk)
        with_saves = simulate(trace, homes, rates, saving)
    placement = homes.placement
    state = placement.state_host_bytes + placement.state_nvme_bytes
    nodes = scenario.world_size // scenario.per_node
    return Outlook(
        scenario=scenario,
        num_subgroups=len(placement.layout.subgroups),
        kept_parameters=sum(spec.numel for spec in placement.layout.specs),
        host_bytes=placement.host_bytes,
        nvme_bytes=placement.nvme_bytes,
        nvme_share=placement.state_nvme_bytes / state,
        checkpoint_bytes=saved * scenario.world_size,
        save_alone_seconds=save_seconds(
            saved * scenario.world_size,
            writers=[scenario.writers or scenario.per_node] * nodes,
            ssd_write=node.ssd_write,
            writer_limit=scenario.writer_limit,
        ),
        least_compute_seconds=model.flops * scenario.passes / node.flops,
        times=simulate(trace, homes, rates, pattern),
        times_with_saves=with_saves,
        formula=_formula(scenario, rates),
    )


def _saved_bytes(homes: Homes) -> tuple[int, int]:
    """Bytes of a rank's part of a checkpoint, and how many of them are on NVMe."""
    total = on_nvme = 0
    placement = homes.placement
    for group, home in zip(placement.layout.subgroups, placement.state_home, strict=True):
        planes: tuple[Plane, ...] = planes_of(group, homes.rule)
        nbytes = sum(plane.nbytes(group.numel) for plane in planes)
        total += nbytes
        on_nvme += nbytes if home is Tier.NVME else 0
    return total, on_nvme


def _formula(scenario: Scenario, rates: Rates) -> dict[str, float]:
    """Section 4 with everything on NVMe: a rank gets whole weights from all ranks' SSDs, as fast as
    links and network allow; the optimizer's states are read and written by all ranks at once.
    """
    model, size = scenario.model, scenario.world_size
    ait = intensity(
        tokens=model.tokens, batch=model.micro_batch * scenario.passes, hidden=model.hidden
    )
    slices = size * min(rates.ssd_read, rates.to_device)
    optimizer = size * min(rates.ssd_read, rates.ssd_write)
    links = {
        Tier.DEVICE: float("inf"),
        Tier.HOST: rates.from_device,
        Tier.NVME: min(rates.ssd_write, rates.from_device),
    }
    weights_ait = ait.parameters / scenario.passes  # weights are moved for every micro-batch
    return {
        "parameters": efficiency(weights_ait, min(slices, rates.network), rates.flops),
        "optimizer": efficiency(ait.optimizer, optimizer, rates.flops),
        "activations": efficiency(ait.activations, links[scenario.activations], rates.flops),
    }
