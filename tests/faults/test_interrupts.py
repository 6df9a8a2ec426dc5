"""Ctrl-C at any line: nothing leaks, nothing hangs, and the next one works."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import infinity.block
from aio import Engine, sync_directory
from infinity.activations.tiers import ActivationShare, activations_for
from infinity.autograd.refusals import refuse_script
from infinity.parameters.records import records_of
from infinity.tiling.layers import MIN_TILE_BYTES, Tiling
from swap.interruptions.undo import Undo
from swap.timeline import Timeline
from swap.update.pipeline import UpdatePipeline
from tests.support.interrupted_runs import How
from tests.support.interrupts import (
    Lines,
    Remains,
    interrupt,
    interrupt_at_call,
    interrupt_at_instruction,
    sampled,
)
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget, same_bits, values_of

NUM_SAMPLES = 2
NUM_LAST = 100
"""Lines before something is made: from where the last file is opened or the thread begins."""


def io(folder: Path) -> None:
    """An engine's life: open, write, sync, read, close."""
    content = bytes(range(256)) * 48
    with (
        Engine("posix", queue_depth=2, block_bytes=4096) as engine,
        engine.open(folder / "data", "w", size=len(content)) as file,
    ):
        engine.write(file, 0, content).result()
        file.sync()
        found = bytearray(len(content))
        engine.read(file, 0, found).result()
        assert found == content
    sync_directory(folder)


def check_io(folder: Path, numbers: range, how: How = interrupt) -> None:
    io(folder)
    before = Remains.of(folder)
    for number in numbers:
        lines = how(lambda: io(folder), number)
        assert lines.line
        (folder / "data").touch()
        assert Remains.of(folder, wanted=before) == before, lines.line
        io(folder)


def test_interrupt_between_entering_and_a_script_of_a_module_leaves_no_refusal_of_it() -> None:
    """Also the module could not be pickled any more."""
    module = nn.Linear(2, 2)
    before = {*vars(module)}
    undo = Undo()
    for number in range(interrupt(lambda: refuse_script(module, undo), None).seen):
        undo.close()
        assert interrupt(lambda: refuse_script(module, undo), number).line
        undo.close()
        assert {*vars(module)} == before


def _make_files(folder: Path, undo: Undo) -> None:
    share = ActivationShare(mode="nvme", device=torch.device("cpu"), num_directories=1)
    activations_for(share, 1 << 30, [str(folder)], Timeline(), undo=undo)


def _make_thread(_: Path, undo: Undo) -> None:
    nothing: Any = None
    UpdatePipeline(nothing, nothing, undo)


@pytest.mark.parametrize("make", [_make_files, _make_thread])
def test_what_is_interrupted_while_it_is_made_leaves_nothing(
    make: Callable[[Path, Undo], None], tmp_path: Path
) -> None:
    """A file that was never closed would be a ResourceWarning, and so an error here."""

    def attempt(number: int | None) -> Lines:
        with Undo() as undo:
            return interrupt(lambda: make(tmp_path, undo), number)

    total = attempt(None).seen
    before = Remains.of(tmp_path)
    for number in range(max(0, total - NUM_LAST), total):
        line = attempt(number).line
        assert Remains.of(tmp_path, wanted=before) == before, line


def test_interrupt_as_a_block_begins_to_be_left_does_not_keep_it_open(tmp_path: Path) -> None:
    """But for one before the first statement of leaving, where no Python can catch it."""

    def leave(number: int | None) -> tuple[Lines, nn.Module, infinity.block.OffloadBlock]:
        model = nn.Linear(2, 2)
        block = infinity.offload(model, tmp_path, host_memory="64MiB")
        block.__enter__()
        where = (infinity.block.__file__,)
        lines = interrupt_at_call(lambda: block.__exit__(None, None, None), number, where)
        return lines, model, block

    for number in range(leave(None)[0].seen):
        lines, model, block = leave(number)
        is_left = [type(p) for p in model.parameters()] == [nn.Parameter] * 2
        block.__exit__(None, None, None)
        assert lines.line
        assert is_left, lines.line


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
@pytest.mark.timeout(120)
def test_interrupted_engine_leaves_no_descriptor_thread_or_wait(tmp_path: Path) -> None:
    total = interrupt(lambda: io(tmp_path), None).seen
    check_io(tmp_path, sampled(total, NUM_SAMPLES))


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
def test_engine_interrupted_at_instructions_leaves_nothing(
    tmp_path: Path, counted: Callable[..., None]
) -> None:
    total = interrupt_at_instruction(lambda: io(tmp_path), None).seen
    numbers = sampled(total, 100, seed=1)
    check_io(tmp_path, numbers, interrupt_at_instruction)
    counted("interrupts", instructions=len(numbers))


def life(model: nn.Module, nvme: Path, host_memory: int) -> None:
    """A small offloaded life: enter, two steps, a flush, a look at the weights, leave."""
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(2):
            vector_loss(model, step).backward()
            offloaded.step()
        offloaded.flush()
        with offloaded.gathered():
            pass


class Lives:
    """Interrupted lives of a model, and what it may be after them."""

    def __init__(self, nvme: Path) -> None:
        self.nvme = nvme
        self.host_memory = least_budget(self.make, nvme)
        self.allowed: list[dict[str, torch.Tensor]] = [values_of(self.make())]
        for steps in (1, 2):
            model = self.make()
            with infinity.offload(model, nvme, host_memory=self.host_memory) as offloaded:
                for step in range(steps):
                    vector_loss(model, step).backward()
                    offloaded.step()
            self.allowed.append(values_of(model))
        self.before = Remains.of(nvme)

    @staticmethod
    def make() -> nn.Module:
        return seeded(partial(Stack, depth=3))

    def live(self, number: int | None) -> tuple[Lines, str]:
        """One life; what is wrong after it, if something is."""
        model = self.make()
        lines = interrupt(lambda: life(model, self.nvme, self.host_memory), number)
        return lines, self._wrong_with(model)

    def _wrong_with(self, model: nn.Module) -> str:
        if any(type(p) is not nn.Parameter or p.is_meta for p in model.parameters()):
            return "parameters are not real"
        found = values_of(model)
        matches = [all(same_bits(v, found[k]) for k, v in each.items()) for each in self.allowed]
        if not any(matches):
            return "values are of no step"
        if (remains := Remains.of(self.nvme, wanted=self.before)) != self.before:
            return f"left behind: {remains}"
        return ""


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
@pytest.mark.timeout(300)
def test_interrupted_life_leaves_a_whole_model_and_nothing_else(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lines, wrong = lives.live(None)
    assert wrong == ""
    for number in sampled(lines.seen, NUM_SAMPLES):
        lines, wrong = lives.live(number)
        assert wrong == "", f"interrupted at {lines.line}"
    model = lives.make()
    life(model, tmp_path, lives.host_memory)
    assert same_bits(values_of(model)["norm.weight"], lives.allowed[2]["norm.weight"])


def _tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 512))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(256, 512)), _tied])
def test_interrupt_while_a_tiled_layer_comes_back_costs_no_row(
    make: Callable[[], nn.Sequential],
) -> None:
    def tiled() -> tuple[nn.Sequential, Tiling]:
        model = seeded(make)
        tiling = Tiling(model, records_of(model, None), MIN_TILE_BYTES, None)
        tiling.__enter__()
        for tile in model.parameters():
            tile.data = tile.data.clone()  # memory of its own, as an offload block leaves it
        return model, tiling

    def leave(tiling: Tiling) -> None:
        tiling.__exit__(None, None, None)

    expected, tiling = tiled()
    lines = interrupt(partial(leave, tiling), None).seen
    for number in sampled(lines, 24):
        model, tiling = tiled()
        line = interrupt(partial(leave, tiling), number).line
        assert line
        leave(tiling)
        assert type(model[0]) is type(make()[0])
        assert list(model.state_dict()) == list(make().state_dict())
        assert all(same_bits(v, values_of(model)[k]) for k, v in values_of(expected).items()), line


def test_interrupted_plan_leaves_no_tiles(tmp_path: Path) -> None:
    """The model stayed in them, for good."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 512))

    def plan(model: nn.Module) -> None:
        infinity.plan(model, tmp_path, host_memory="64MiB", max_parameter_bytes=MIN_TILE_BYTES)

    lines = interrupt(partial(plan, make()), None).seen
    for number in sampled(lines, 30):
        model = seeded(make)
        line = interrupt(partial(plan, model), number).line
        assert line or number > lines // 2  # how long it waits for the disk is not always the same
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"], line
        assert all(same_bits(v, values_of(model)[k]) for k, v in values_of(seeded(make)).items())
