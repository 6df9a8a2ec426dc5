"""A directory for swap files that must be empty again after every test, and quiet computing."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from infinity.activations.tiers import NvmeActivations
from swap.timeline import Timeline
from tests.support.activations import CPU, Make
from tests.support.models import Stack, seeded
from tests.support.training import WHOLE, least_budget, same_bits, values_of


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """Where state is offloaded to; whatever a test does, nothing may stay in it."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    yield directory
    assert list(directory.rglob("*")) == []


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def on_nvme(tmp_path: Path, timeline: Timeline) -> Iterator[Make]:
    made = []

    def make(budget_bytes: int) -> NvmeActivations:
        made.append(NvmeActivations(CPU, budget_bytes, [os.fspath(tmp_path)], timeline))
        return made[-1]

    yield make
    for activations in made:
        activations.close()
        activations.close()
        assert list(tmp_path.rglob("*")) == []


@pytest.fixture(params=["whole", "least"])
def host_memory(request: pytest.FixtureRequest, nvme: Path) -> int:
    """Bytes for ``Stack()``."""
    return WHOLE if request.param == "whole" else least_budget(Stack, nvme)


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A model that an offload which fails must leave as it is."""
    model = seeded(Stack)
    before, data = values_of(model), [parameter.data_ptr() for parameter in model.parameters()]
    yield model
    assert [parameter.data_ptr() for parameter in model.parameters()] == data
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())
    assert not model._forward_pre_hooks
