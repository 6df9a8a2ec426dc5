"""Weights change through steps and ``gathered(modify=True)`` alone: anything else is an error that
names the parameter, under every budget, at the latest when values are asked for or the block ends.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, seeded, vector_loss, vectors
from tests.support.training import same_bits, values_of

OPTIMIZERS: dict[str, Any] = {"trained": infinity.AdamW(), "inference": None}


def _change(model: Stack) -> None:
    with torch.no_grad():
        model.layer(3).weight.mul_(2)


def _change_two(model: Stack) -> None:
    nn.init.zeros_(model.layer(0).weight)
    _change(model)


def _gather(offloaded: infinity.OffloadedModel) -> None:
    with offloaded.gathered():
        pytest.fail("values were given out after one was changed")


ASKS: dict[str, Callable[[infinity.OffloadedModel, Path], Any]] = {
    "gathered": lambda offloaded, _: _gather(offloaded),
    "save": lambda offloaded, path: offloaded.save(path / "checkpoint"),
    "export": lambda offloaded, path: offloaded.export(path / "exported"),
    "step": lambda offloaded, _: offloaded.step(),
    "forward": lambda offloaded, _: offloaded.model(vectors(0)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_changed_weight_is_named_by_whatever_asks_next(
    optimizer: str, host_memory: int, nvme: Path, tmp_path: Path
) -> None:
    model = Stack()
    with infinity.offload(
        model, nvme, optimizer=OPTIMIZERS[optimizer], host_memory=host_memory
    ) as offloaded:
        for name, ask in ASKS.items():
            _change(model)
            with pytest.raises(RuntimeError, match=r"^layers\.3\.weight was changed in place"):
                ask(offloaded, tmp_path)
            assert not (tmp_path / "checkpoint").exists(), name
            assert not (tmp_path / "exported").exists(), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_changed_weight_is_named_as_the_block_ends(
    optimizer: str, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with (
        pytest.raises(RuntimeError, match=r"^layers\.3\.weight was changed in place"),
        infinity.offload(model, nvme, optimizer=OPTIMIZERS[optimizer], host_memory=host_memory),
    ):
        _change(model)
    assert type(model.layer(0).weight) is nn.Parameter
    for name, value in values_of(model).items():
        assert name == "layers.3.weight" or same_bits(value, before[name])


def test_an_error_on_its_way_out_of_the_block_goes_first(nvme: Path) -> None:
    model = Stack()

    def work() -> None:
        _change(model)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), infinity.offload(model, nvme):
        work()


def test_changes_beside_what_is_gathered_are_not_forgiven(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    kept = model.layer(0).weight.detach().clone()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        with (
            pytest.raises(RuntimeError, match=r"^layers\.3\.weight was changed in place"),
            offloaded.gathered([model.layer(0).weight], modify=True),
        ):
            _change_two(model)
        with offloaded.gathered([model.layer(0).weight]):
            assert same_bits(model.layer(0).weight.detach(), kept)


def test_what_is_changed_in_gathered_tensors_is_kept_or_lost_as_asked(
    host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    before = model.layer(3).weight.detach().clone()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        with offloaded.gathered():
            _change(model)
            changed = model(vectors(0)).detach()
        assert not same_bits(changed, model(vectors(0)).detach())
        with offloaded.gathered(modify=True):
            _change(model)
        assert same_bits(changed, model(vectors(0)).detach())
        vector_loss(model, 0).backward()
    assert same_bits(model.layer(3).weight.detach(), 2 * before)


def test_loading_makes_good_what_was_changed(host_memory: int, nvme: Path, tmp_path: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        offloaded.save(tmp_path / "checkpoint")
        loss = vector_loss(model, 0)
        _change(model)
        offloaded.load(tmp_path / "checkpoint")
        with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
            loss.backward()
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


# Other parameters than those that were offloaded.


def _resize_in_place(model: Stack) -> None:
    model.layer(0).weight.data = torch.zeros(264, 256)


def _resize_by_replacing_a_parameter(model: Stack) -> None:
    model.layer(0).weight = nn.Parameter(torch.zeros(264, 256))


def _resize_by_replacing_a_module(model: Stack) -> None:
    model.layers[0] = nn.Linear(256, 264)


def _add_a_module(model: Stack) -> None:
    model.layer(0).add_module("adapter", nn.Linear(4, 4))


def _add_a_parameter(model: Stack) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))


ALIENS: dict[str, tuple[Callable[[Stack], None], str]] = {
    "resized": (_resize_in_place, r"^layers\.0\.weight has shape .* before the block"),
    "parameter": (_resize_by_replacing_a_parameter, r"^layers\.0\.weight cannot be replaced"),
    "module": (_resize_by_replacing_a_module, r"^layers\.0\.weight was put into the model"),
    "added module": (_add_a_module, r"^layers\.0\.adapter\.weight was put into the model"),
    "added parameter": (_add_a_parameter, r"^scale was put into the model"),
}


@pytest.mark.parametrize("name", ALIENS)
@pytest.mark.parametrize("modify", [True, False])
def test_parameters_put_in_while_gathered_are_named(
    name: str, modify: bool, host_memory: int, nvme: Path
) -> None:
    put_in, match = ALIENS[name]
    model = seeded(Stack)
    before = values_of(model)
    with (
        pytest.raises(RuntimeError, match=match),
        infinity.offload(model, nvme, host_memory=host_memory) as offloaded,
        offloaded.gathered(modify=modify),
    ):
        put_in(model)
    after = values_of(model)
    assert all(same_bits(after[key], before[key]) for key in before if key.startswith("layers.4"))


@pytest.mark.parametrize("name", ["module", "added module", "added parameter"])
def test_parameters_put_in_are_named_as_the_block_ends(name: str, nvme: Path) -> None:
    put_in, match = ALIENS[name]
    model = Stack()
    with (
        pytest.raises(RuntimeError, match=match),
        infinity.offload(model, nvme) as offloaded,
    ):
        _put_in_and_step(model, offloaded, put_in, match)


def _put_in_and_step(
    model: Stack, offloaded: infinity.OffloadedModel, put_in: Callable[[Stack], None], match: str
) -> None:
    put_in(model)
    with pytest.raises(RuntimeError, match=match):
        offloaded.step()


def test_modules_without_parameters_may_come_and_go(nvme: Path) -> None:
    model = Stack()
    with infinity.offload(model, nvme) as offloaded:
        model.add_module("metric", nn.Identity())
        vector_loss(model, 0).backward()
        offloaded.step()
