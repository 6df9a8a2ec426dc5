"""A plain twin of ``TieredState``: every value an ordinary tensor, every update the same kernel.

Also builders for layouts and placements that put homes where no planner would, and for tiered
states over a late engine.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from infinity.optim.adamw import AdamRule
from swap.kernels import merge_master, split_master, sum_of_squares
from swap.plan.layout import PIECE, Layout, ParameterSpec, Segment, Subgroup, pack
from swap.plan.placement import Placement
from swap.plan.rules import ParameterUpdate
from swap.plan.sizes import components_of, gradient_bytes, state_bytes
from swap.plan.spares import NUM_VISITS
from swap.tiered import TieredState
from swap.tiers import Tier
from tests.support.late_engine import Faults, LateEngine

RULE = AdamRule(threads=1)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def specs_of(
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    frozen: Iterable[int] = (),
    always_on_host: Iterable[int] = (),
) -> list[ParameterSpec]:
    frozen, always_on_host = set(frozen), set(always_on_host)
    return [
        ParameterSpec(
            index=index,
            name=f"p{index}",
            numel=numel,
            dtype=dtype,
            trainable=index not in frozen,
            always_on_host=index in always_on_host,
        )
        for index, numel in enumerate(sizes)
    ]


def placement_of(
    layout: Layout,
    *,
    state_on_nvme: Callable[[int], bool] = lambda unit: True,
    gradient_on_nvme: Callable[[int], bool] = lambda subgroup: True,
    on_device: Callable[[int], bool] = lambda unit: False,
    arena_bytes: int,
    num_slots: int = 3,
    spill_chunk_bytes: int = 4 * PIECE,
    inbox_bytes: int = 0,
    device_bytes: int = 0,
    spared: Callable[[int], bool] = lambda subgroup: False,
) -> Placement:
    """Homes as the functions say (by unit, by subgroup); some are always in HOST. Of what is there,
    subgroups that are ``spared`` have a spare block, and may be updated on the device if it has
    memory.
    """
    groups = layout.subgroups
    there = [not g.always_on_host and on_device(g.unit) for g in groups]
    state = [
        _home(g, is_there, state_on_nvme(g.unit)) for g, is_there in zip(groups, there, strict=True)
    ]
    gradient = [
        _home(g, is_there, g.trainable and gradient_on_nvme(g.index))
        for g, is_there in zip(groups, there, strict=True)
    ]
    moving = [g for g in groups if g.trainable and not g.always_on_host]
    slot_bytes = max((state_bytes(g, RULE) + gradient_bytes(g) for g in moving), default=0)

    has_spare = [
        spared(g.index) and g.trainable and home is Tier.HOST and not g.always_on_host
        for g, home in zip(groups, state, strict=True)
    ]

    def total(cost: Callable[[Any], int], homes: Sequence[Tier], wanted: Tier) -> int:
        return sum(cost(g) for g, home in zip(groups, homes, strict=True) if home is wanted)

    def state_cost(group: Any) -> int:
        return state_bytes(group, RULE)

    return Placement(
        layout=layout,
        state_home=tuple(state),
        gradient_home=tuple(gradient),
        arena_bytes=arena_bytes,
        num_slots=num_slots if slot_bytes else 0,
        slot_bytes=slot_bytes,
        scratch_bytes=0,
        spill_chunk_bytes=spill_chunk_bytes,
        inbox_bytes=inbox_bytes,
        device_bytes=device_bytes,
        state_device_bytes=total(state_cost, state, Tier.DEVICE),
        gradient_device_bytes=total(gradient_bytes, gradient, Tier.DEVICE),
        state_host_bytes=total(state_cost, state, Tier.HOST),
        gradient_host_bytes=total(gradient_bytes, gradient, Tier.HOST),
        state_nvme_bytes=total(state_cost, state, Tier.NVME),
        gradient_nvme_bytes=total(gradient_bytes, gradient, Tier.NVME),
        spared=frozenset(g.index for g, has in zip(groups, has_spare, strict=True) if has),
        spare_bytes=sum(state_cost(g) for g, has in zip(groups, has_spare, strict=True) if has),
        visit_bytes=NUM_VISITS * slot_bytes if device_bytes and any(has_spare) else 0,
    )


def _home(group: Subgroup, is_on_device: bool, is_on_nvme: bool) -> Tier:
    if is_on_device:
        return Tier.DEVICE
    return Tier.NVME if is_on_nvme and not group.always_on_host else Tier.HOST


def padded_bytes(layout: Layout) -> int:
    """Of the weights of all parameters, each in whole pieces."""
    return sum(spec.padded_numel * spec.dtype.itemsize for spec in layout.specs)


@contextmanager
def late_engines(seed: int, faults: Faults | None = None) -> Iterator[list[LateEngine]]:
    """Every ``TieredState`` made inside has a late engine; the list holds them."""
    made: list[LateEngine] = []

    def make(lanes: int, **_: Any) -> LateEngine:
        made.append(LateEngine(lanes, seed=seed, faults=faults))
        return made[-1]

    with patch("swap.storage.opening.Engine", make):
        yield made


class Plain:
    """What the tiers must be indistinguishable from."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self.specs = list(specs)
        self.components: list[dict[str, torch.Tensor]] = []
        self.gradients: dict[int, torch.Tensor] = {}
        self.steps = [0] * len(self.specs)
        layout = pack(self.specs, 1 << 40)
        for spec in self.specs:
            group = layout.subgroups[layout.segments_of[spec.index][0].subgroup]
            self.components.append(
                {p.name: torch.zeros(spec.numel, dtype=p.dtype) for p in components_of(group, RULE)}
            )

    def weight(self, parameter: int) -> torch.Tensor:
        return self.components[parameter]["weight"]

    def values(self, parameter: int) -> torch.Tensor:
        components = self.components[parameter]
        if "master" in components:
            return components["master"]
        if "lo" not in components:
            return components["weight"]
        master = torch.empty(self.specs[parameter].numel)
        merge_master(components["weight"], components["lo"], master, threads=1)
        return master

    def write(self, parameter: int, start: int, values: torch.Tensor) -> None:
        components, stop = self.components[parameter], start + values.numel()
        if "lo" in components:
            part = components["weight"][start:stop], components["lo"][start:stop]
            split_master(values.float().contiguous(), *part, threads=1)
            return
        components["weight"][start:stop] = values.to(components["weight"].dtype)
        if "master" in components:
            components["master"][start:stop] = values.float()

    def add_gradient(self, parameter: int, gradient: torch.Tensor) -> None:
        if parameter in self.gradients:
            self.gradients[parameter].add_(gradient)
        else:
            self.gradients[parameter] = gradient.to(self.specs[parameter].dtype, copy=True)

    def norm(self) -> float:
        squares = (sum_of_squares(self.gradients[p], threads=1) for p in sorted(self.gradients))
        return math.sqrt(sum(squares))  # a power of 0.5 may be off by the last bit

    def updates(self, parameters: Iterable[int], **options: Any) -> dict[int, ParameterUpdate]:
        """A step for ``parameters``, each with its own count of steps."""
        return {
            p: ParameterUpdate(
                parameter=p,
                step=self.steps[p] + 1,
                shape=torch.Size([self.specs[p].numel]),
                options=OPTIONS | options,
            )
            for p in parameters
        }

    def step(self, updates: Mapping[int, ParameterUpdate], scale: float) -> None:
        for p, update in updates.items():
            numel = self.specs[p].numel
            whole = Segment(parameter=p, subgroup=0, start=0, length=numel, offset=0)
            RULE.apply(whole, update, self.components[p], self.gradients[p], scale)
            self.steps[p] += 1
        self.gradients.clear()


def random_values(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit, NaNs and signs of zeros included."""
    if left.dtype != right.dtype:
        return False
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def fill_both(state: TieredState, plain: Plain, seed: int = 0) -> None:
    for spec in plain.specs:
        values = random_values(1000 * seed + spec.index, spec.numel)
        state.fill(spec.index, values)
        plain.write(spec.index, 0, values)


def add_to_both(state: TieredState, plain: Plain, parameter: int, seed: int) -> None:
    spec = plain.specs[parameter]
    gradient = random_values(seed, spec.numel, spec.dtype)
    state.add_gradient(parameter, gradient)
    plain.add_gradient(parameter, gradient)


def step_both(
    state: TieredState, plain: Plain, parameters: Iterable[int], scale: float = 1.0, **options: Any
) -> None:
    updates = plain.updates(parameters, **options)
    state.step(updates, scale)
    plain.step(updates, scale)


class TieredRig:
    """A tiered state with this placement over a late engine that may fail, and its plain twin."""

    def __init__(
        self, stack: ExitStack, folder: Path, placement: Placement, **options: Any
    ) -> None:
        self.faults = Faults()
        self._engines = stack.enter_context(late_engines(0, self.faults))
        self.state = TieredState(placement, RULE, [folder], **options)
        stack.callback(self.state.close)
        self.plain = Plain(placement.layout.specs)

    @property
    def engine(self) -> LateEngine:
        """There is none where nothing is on NVMe."""
        return self._engines[0]


def wait_until_stopped_ahead(state: TieredState, timeout: float = 20.0) -> None:
    """Until the update ahead of a step, which is to fail, has failed and is undone."""
    until = time.monotonic() + timeout
    while state.pipeline.speculation_failure is None:
        assert time.monotonic() < until, "nothing has failed"
        time.sleep(0.001)
    state.pipeline.join()


def assert_same(state: TieredState, plain: Plain) -> None:
    """Every component of every parameter, once all that is under way has ended."""
    state.flush()
    for spec in plain.specs:
        for name, expected in plain.components[spec.index].items():
            out = torch.empty(spec.numel, dtype=expected.dtype)
            state.components.read(spec.index, name, 0, out)
            assert same_bits(out, expected), f"{name} of {spec.name} differs"


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Descriptors of this process and folders under ``roots``: equal before and after."""

    descriptors: frozenset[str]
    folders: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, *roots: Path) -> "Leftovers":
        fds = (p for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
        return cls(
            frozenset(f"{p.name} {p.readlink()}" for p in fds),
            tuple(tuple(sorted(str(p) for p in root.rglob("*"))) for root in roots),
        )
