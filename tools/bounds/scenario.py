"""A model on some nodes: what each rank keeps and moves, as ``infinity.plan`` has it, and between
which bounds a step lies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

import infinity
from bounds.formulas import StepBounds, disk_seconds, efficiency, intensity, save_seconds
from bounds.nodes import Node
from bounds.transformer import Transformer
from infinity.optim.adamw import AdamRule

_WEIGHT_BYTES = 2
"""Of a parameter in bfloat16, and of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``world_size`` ranks, ``per_node`` on each node. ``passes`` micro-batches go before a step;
    ``activations`` are kept on the "device", in "host" memory or on "nvme". Matrices of more than
    ``max_parameter_bytes`` are cut into tiles. A checkpoint that is written alone may have fewer
    ``writers`` than ranks on each node, each of which writes ``writer_limit`` bytes a second at
    most.
    """

    model: Transformer
    node: Node
    world_size: int
    per_node: int
    passes: int = 1
    activations: str = "host"
    max_parameter_bytes: str | None = None
    writers: int | None = None
    writer_limit: float = float("inf")

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

    ``with_saves``: a checkpoint is written by all ranks in every step. ``formula`` has the
    efficiencies that ZeRO-Infinity's section 4 gives for each kind of state if nothing overlaps.
    """

    scenario: Scenario
    host_bytes: int
    nvme_bytes: int
    nvme_share: float
    read_bytes: int
    written_bytes: int
    checkpoint_bytes: int
    save_alone_seconds: float
    step: StepBounds
    with_saves: StepBounds
    formula: dict[str, float]

    @property
    def compute_seconds(self) -> float:
        return self.step.seconds["computing"]

    @property
    def flops_per_device(self) -> float:
        """The most that there can be, counted as the papers do: with what is recomputed."""
        return self.scenario.model.flops * self.scenario.passes / self.step.least_seconds

    @property
    def efficiency(self) -> float:
        """The most of the time in which devices may compute."""
        return self.compute_seconds / self.step.least_seconds

    def as_json(self) -> dict[str, Any]:
        least = {"efficiency": self.efficiency, "flops_per_device": self.flops_per_device}
        steps = {"least_seconds": self.step.least_seconds, "most_seconds": self.step.most_seconds}
        return {**asdict(self), **least, **steps}


def look(scenario: Scenario) -> Outlook:
    """Raises ``BudgetError`` if the model cannot be trained with the memory of a rank."""
    node, model, size = scenario.node, scenario.model, scenario.world_size
    plan = _plan(scenario)
    on_nvme = plan.bytes_by_tier["nvme"]
    nvme_share = on_nvme / sum(plan.bytes_by_tier.values())
    state = sum(
        component.nbytes(model.num_parameters)
        for component in AdamRule().components(torch.bfloat16)
    )
    saved = state + _WEIGHT_BYTES * model.num_parameters
    activations = model.activation_bytes * scenario.passes * (scenario.activations == "nvme")
    read, written = plan.read_bytes_per_step, plan.written_bytes_per_step
    part = saved // size
    return Outlook(
        scenario=scenario,
        host_bytes=plan.host_bytes,
        nvme_bytes=plan.nvme_bytes,
        nvme_share=nvme_share,
        read_bytes=read + activations,
        written_bytes=written + activations,
        checkpoint_bytes=saved,
        save_alone_seconds=save_seconds(
            saved,
            writers=[scenario.writers or scenario.per_node] * (size // scenario.per_node),
            ssd_write=node.ssd_write,
            writer_limit=scenario.writer_limit,
        ),
        step=_bounds(scenario, read + activations, written + activations),
        with_saves=_bounds(
            scenario, read + activations + part * nvme_share, written + activations + part
        ),
        formula=_formula(scenario),
    )


def _plan(scenario: Scenario) -> infinity.Plan:
    plan = infinity.plan(
        scenario.model.module(),
        host_memory=scenario.node.host_memory,
        device_memory=scenario.node.device_memory,
        world_size=scenario.world_size,
        device="cuda",
        compute_dtype=torch.bfloat16,
        activations={"device": "keep"}.get(scenario.activations, scenario.activations),
        max_parameter_bytes=scenario.max_parameter_bytes,
        passes=scenario.passes,
    )
    if not plan.fits:
        raise infinity.BudgetError(
            f"a rank needs host_memory={plan.least_host_bytes} and "
            f"device_memory={plan.least_device_bytes} bytes, and has {scenario.node.host_memory} "
            f"and {scenario.node.device_memory}",
            least_host_bytes=plan.least_host_bytes,
        )
    return plan


def _bounds(scenario: Scenario, read: float, written: float) -> StepBounds:
    """Every weight is new on the device once in a step; what fits there stays for later passes."""
    node, model, passes = scenario.node, scenario.model, scenario.passes
    whole = _WEIGHT_BYTES * model.num_parameters
    mine = whole / scenario.world_size
    others = 1 - 1 / scenario.world_size
    again = 2 * passes - 1
    activations = passes * model.activation_bytes * (scenario.activations != "device")
    up = mine + again * max(0.0, mine - node.device_memory) + activations
    received = whole + again * max(0, whole - node.device_memory) + passes * whole
    disks, together = disk_seconds(
        read,
        written,
        ssd_read=node.ssd_read / scenario.per_node,
        ssd_write=node.ssd_write / scenario.per_node,
        ssd_together=node.ssd_together / scenario.per_node,
    )
    parts = {
        "computing": model.flops * passes / node.flops,
        **disks,
        "update": mine / _WEIGHT_BYTES * scenario.per_node / node.adam,
        "to the device": up / node.to_device,
        "from the device": (passes * mine + activations) / node.from_device,
        "other ranks": others * received / node.network,
    }
    return StepBounds(seconds=parts, together_seconds=together)


def _formula(scenario: Scenario) -> dict[str, float]:
    """Section 4 with everything on NVMe: a rank gets whole weights from all ranks' SSDs, as fast as
    links and network allow; the optimizer's states are read and written by all ranks at once.
    """
    node, model, size = scenario.node, scenario.model, scenario.world_size
    ait = intensity(
        tokens=model.tokens, batch=model.micro_batch * scenario.passes, hidden=model.hidden
    )
    ssd_read, ssd_write = node.ssd_read / scenario.per_node, node.ssd_write / scenario.per_node
    slices = size * min(ssd_read, node.to_device)
    links = {
        "device": float("inf"),
        "host": node.from_device,
        "nvme": min(ssd_write, node.from_device),
    }
    network = node.network if size > 1 else float("inf")
    weights_ait = ait.parameters / scenario.passes  # weights are moved for every micro-batch
    return {
        "parameters": efficiency(weights_ait, min(slices, network), node.flops),
        "optimizer": efficiency(ait.optimizer, size * min(ssd_read, ssd_write), node.flops),
        "activations": efficiency(ait.activations, links[scenario.activations], node.flops),
    }
