"""The least budget that ``plan`` names is the least at which ``offload`` enters, to the byte."""

from __future__ import annotations

import gc
import logging
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from checkpoint.transfer.memory import machine_bytes
from infinity.activations.tiers import ActivationShare
from infinity.optim.adamw import AdamRule
from infinity.parameters.records import records_of
from infinity.planning.placing import demand_of, place_within
from swap.tiers import Budget
from tests.support.examples import examples
from tests.support.models import Stack, vectors
from tests.support.proof import by_turns
from tests.support.tiers import late_engines

MIB = 1 << 20
OPTIMIZERS: dict[str, Any] = {
    "AdamW": infinity.AdamW(),
    "8-bit": infinity.AdamW(state_dtype=torch.uint8),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "none": None,
}


class _Net(nn.Module):
    """Layers of some widths, an embedding, maybe a head tied to it, maybe lists within lists."""

    def __init__(self, widths: list[int], rows: int, *, tied: bool, nested: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, widths[0])
        layers = [nn.Linear(widths[0], width) for width in widths]
        pairs = [nn.Sequential(a, nn.Tanh()) for a in layers]
        self.layers = nn.ModuleList(pairs if nested else layers)
        self.head = nn.Linear(widths[0], rows, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        total = self.head(x).float().square().mean()
        for layer in self.layers:
            total = total + layer(x).float().square().mean()
        return total


@dataclass(frozen=True)
class Case:
    widths: list[int]
    rows: int
    tied: bool
    nested: bool
    frozen: bool
    meta: bool
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> nn.Module:
        with torch.device("meta" if self.meta else "cpu"):
            net = _Net(self.widths, self.rows, tied=self.tied, nested=self.nested)
        if self.frozen:
            net.layers.requires_grad_(False)
        return net


@st.composite
def cases(draw: st.DrawFn) -> Case:
    options: dict[str, Any] = {
        "compute_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
        "optimizer": OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))],
        "activations": draw(st.sampled_from(["keep", "host", "nvme"])),
        "max_parameter_bytes": draw(st.sampled_from([None, 300_000, MIB])),
    }
    return Case(
        widths=draw(st.lists(st.sampled_from([8, 100, 256, 300]), min_size=1, max_size=6)),
        rows=draw(st.sampled_from([10, 1000, 6000])),
        tied=draw(st.booleans()),
        nested=draw(st.booleans()),
        frozen=draw(st.booleans()),
        meta=draw(st.booleans()),
        options=options,
    )


@settings(max_examples=examples(15), deadline=None)
@given(case=cases(), more=st.sampled_from([0, 1, 4097, MIB]))
def test_plan_and_offload_agree_on_the_least_budget(case: Case, more: int) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        model = case.make()
        least = infinity.plan(model, host_memory=1, **case.options).least_host_bytes
        assert infinity.plan(model, host_memory=least, **case.options).fits
        with (
            pytest.raises(infinity.BudgetError, match=f"{least} bytes") as refused,
            infinity.offload(model, nvme, host_memory=least - 1, **case.options),
        ):
            pass
        assert refused.value.least_host_bytes == least
        plan = infinity.plan(model, host_memory=least + more, **case.options)
        with infinity.offload(model, nvme, host_memory=least + more, **case.options) as offloaded:
            model(torch.arange(4)).backward()
            if case.options["optimizer"] is not None:
                offloaded.step()
            offloaded.flush()
            report = offloaded.report()
            assert report.peak_host_bytes <= plan.host_bytes <= least + more
            assert report.resident_bytes["nvme"] <= plan.nvme_wanted_bytes


@settings(max_examples=examples(60), deadline=None)
@given(
    width=st.sampled_from([100, 256, 300]),
    depth=st.integers(1, 6),
    world_size=st.integers(2, 7),
    kind=st.sampled_from(["cpu", "cuda"]),
    mode=st.sampled_from(["keep", "nvme"]),
)
def test_every_rank_enters_at_the_budget_of_the_plan_and_none_below(
    width: int, depth: int, world_size: int, kind: str, mode: Any
) -> None:
    with torch.device("meta"):
        model = Stack(width, depth)
    plan = infinity.plan(model, host_memory=1, world_size=world_size, device=kind, activations=mode)
    share = ActivationShare(mode=mode, device=torch.device(kind), num_directories=1)
    for rank in range(world_size):
        records = records_of(model, None, rank=rank, world_size=world_size)
        demand = demand_of(model, records, AdamRule(), share, is_partitioned=True)
        budget = Budget(host_bytes=plan.least_host_bytes)
        assert place_within(demand, budget).host_bytes <= plan.least_host_bytes
        with pytest.raises(infinity.BudgetError) as refused:
            place_within(demand, Budget(host_bytes=plan.least_host_bytes - 1))
        assert refused.value.least_host_bytes == plan.least_host_bytes


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 3 * width)
        inner = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.inner = nn.Sequential(*inner)
        self.last = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x) + self.last(self.first(x))
        return result


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Mlp(256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def test_a_checkpointed_block_with_containers_inside_fits_the_least_budget(tmp_path: Path) -> None:
    model = _Checkpointed()
    least = infinity.plan(model, host_memory=1).least_host_bytes
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        for step in range(2):
            model(vectors(step)).square().mean().backward()
            offloaded.step()


class _Gated(nn.Module):
    """Wide layers in a list, which tiles are made of, beside others that are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(256, 512) for _ in range(2))
        self.small = nn.ModuleDict({f"of {i}": nn.Linear(256, 256) for i in range(9)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.wide:
            x = x + layer(x)[..., :256]
        for layer in self.small.values():
            x = x + torch.tanh(layer(x))
        return x


def test_layers_in_tiles_make_no_stack_of_blocks_of_the_list_that_they_are_in(
    tmp_path: Path,
) -> None:
    model = _Checkpointed()
    model.blocks = nn.ModuleList(_Gated() for _ in range(3))
    options: dict[str, Any] = {"max_parameter_bytes": MIB // 4}
    least = infinity.plan(model, host_memory=1, **options).least_host_bytes
    with infinity.offload(model, tmp_path, host_memory=least, **options) as offloaded:
        for step in range(2):
            model(vectors(step)).square().mean().backward()
            offloaded.step()


class _Within(nn.Module):
    """A weight of its own, around another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(256, 256) / 16)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x @ self.own)
        return result


class _Reaching(nn.Module):
    """Takes the weight of a table before what holds others runs, and after it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.table.weight
        result: torch.Tensor = self.inner(x @ weight) @ weight
        return result


@pytest.mark.parametrize(("depth", "reaching"), by_turns([2, 3, 4], [False, True]))
def test_modules_within_modules_fit_the_least_budget(
    depth: int, reaching: bool, tmp_path: Path
) -> None:
    inner: nn.Module = nn.Linear(256, 256)
    for _ in range(depth - 1):
        inner = _Within(inner)
    first = _Reaching(inner) if reaching else inner
    model = nn.Sequential(first, *(nn.Linear(256, 256) for _ in range(8)))
    least = infinity.plan(model, host_memory=1).least_host_bytes
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        for step in range(2):
            model(vectors(step)).square().mean().backward()
            offloaded.step()


class _Uneven(nn.Module):
    """A block of layers of any widths, some of them used twice."""

    def __init__(self, features: int, widths: list[int], again: list[int]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(features, 64 * width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(64 * width, features) for width in widths)
        self.order = [*range(len(widths)), *again]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + torch.tanh(self.down[index](torch.tanh(self.up[index](x))))
        return x


class _Blocks(nn.Module):
    def __init__(self, blocks: list[_Uneven], features: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, features)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(features, rows, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        result: torch.Tensor = self.head(x)
        return result


@st.composite
def uneven_blocks(draw: st.DrawFn) -> _Blocks:
    features = draw(st.sampled_from([128, 256]))
    blocks = []
    for _ in range(3):
        widths = draw(st.lists(st.sampled_from([1, 3, 4, 6, 8]), min_size=1, max_size=3))
        again = draw(st.lists(st.integers(0, len(widths) - 1), max_size=3))
        blocks.append(_Uneven(features, widths, again))
    return _Blocks(blocks, features, draw(st.sampled_from([10, 400, 1000])))


@settings(max_examples=examples(10), deadline=None)
@given(
    model=uneven_blocks(),
    max_parameter_bytes=st.sampled_from([None, MIB // 4, 3 * MIB // 8]),
    seed=st.integers(0, 9),
    overlap=st.booleans(),
)
def test_any_blocks_that_are_recomputed_fit_the_least_budget_in_whatever_order_transfers_end(
    model: _Blocks, max_parameter_bytes: int | None, seed: int, overlap: bool
) -> None:
    options: dict[str, Any] = {"max_parameter_bytes": max_parameter_bytes}
    least = infinity.plan(model, host_memory=1, **options).least_host_bytes
    gc.disable()  # what needed the collector would need it by chance
    try:
        with (
            tempfile.TemporaryDirectory() as nvme,
            late_engines(seed),
            infinity.offload(
                model, nvme, host_memory=least, overlap=overlap, **options
            ) as offloaded,
        ):
            for step in range(2):
                model(torch.arange(step, 8)).square().mean().backward()
                offloaded.step()
            assert offloaded.report().peak_host_bytes <= least
    finally:
        gc.enable()


def test_a_number_needs_what_a_model_of_that_size_needs() -> None:
    """Seven billion parameters as Llama 2 has them, with half-precision weights."""
    with torch.device("meta"):
        layers = [
            nn.ModuleDict(
                {
                    "attention": nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in "qkvo"),
                    "mlp": nn.ModuleList(nn.Linear(4096, 11008, bias=False) for _ in range(3)),
                }
            )
            for _ in range(2)
        ]
        model = nn.ModuleDict({"table": nn.Embedding(32000, 4096), "layers": nn.ModuleList(layers)})
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "device": device}
        real = infinity.plan(model, host_memory=1, **options).least_host_bytes
        assert infinity.plan(7 * 10**9, host_memory=1, **options).least_host_bytes >= real


def test_accumulated_gradients_are_in_the_plan() -> None:
    model = Stack(depth=16)
    least = infinity.plan(model, host_memory=1).least_host_bytes
    plans = [infinity.plan(model, host_memory=least, passes=passes) for passes in (1, 4)]
    assert plans[1].read_bytes_per_step > 1.8 * plans[0].read_bytes_per_step
    with pytest.raises(ValueError, match="passes=0"):
        infinity.plan(model, passes=0)


def test_a_budget_beyond_the_machine_and_one_disk_for_two_directories_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    total = machine_bytes()
    with caplog.at_level(logging.WARNING):
        for host_memory in (total + 1, total):
            with infinity.offload(Stack(), directories, host_memory=host_memory):
                pass
    texts = [record.getMessage() for record in caplog.records]
    assert sum("is more than the" in text for text in texts) == 1
    same = [text for text in texts if "are on the same disk" in text]
    assert len(same) == 2
    assert all(str(directory) in same[0] for directory in directories)


@pytest.mark.parametrize("mode", ["keep", "nvme"])
def test_what_is_said_to_hold_everything_is_more_than_the_least(mode: str, nvme: Path) -> None:
    with pytest.raises(infinity.BudgetError) as caught:
        infinity.offload(Stack(), nvme, host_memory=1, activations=mode).__enter__()
    assert ("would hold everything" in str(caught.value)) == (mode == "keep")


@pytest.mark.parametrize(("optimizer", "warned"), [(infinity.AdamW(), True), (None, False)])
def test_ranks_that_train_apart_are_warned_of(
    optimizer: Any,
    warned: bool,
    nvme: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with (
        caplog.at_level(logging.WARNING),
        infinity.offload(Stack(), nvme, optimizer=optimizer),
    ):
        pass
    assert ("there are 3 ranks, and each trains a model of its own" in caplog.text) == warned
