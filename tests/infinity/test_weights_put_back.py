"""Weights that a program changed and that cannot be written are put back, or refused by name."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import infinity
from aio import AioError
from swap.storage.components import ComponentStore
from tests.support.training import least_budget, same_bits

WIDTH = 320
"""Of weights that are in several subgroups on NVMe each."""


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@contextmanager
def failing_writes(after: int, times: int) -> Iterator[None]:
    """The disk is full behind so many writes of components, for so many of them."""
    transfer = ComponentStore._transfer
    writes = 0

    def fail(self: ComponentStore, kind: str, *arguments: Any) -> Any:
        nonlocal writes
        writes += kind == "write"
        if kind == "write" and after < writes <= after + times:
            raise AioError("the disk is full", errno=errno.ENOSPC, filename="state.swap")
        return transfer(self, kind, *arguments)

    with mock.patch.object(ComponentStore, "_transfer", fail):
        yield
    assert writes > after, "nothing has failed"


def values(model: nn.Module, offloaded: infinity.OffloadedModel) -> dict[str, torch.Tensor]:
    with offloaded.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def write_ones(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
    with offloaded.gathered(modify=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_parameter_that_cannot_be_written_keeps_what_it_held(nvme: Path, after: int) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with infinity.offload(model, nvme, host_memory=least_budget(make, nvme)) as offloaded:
        with failing_writes(after, times=1), pytest.raises(AioError, match="the disk is full"):
            write_ones(model, offloaded)
        found = values(model, offloaded)
        changed = [name for name, value in found.items() if not same_bits(value, before[name])]
        assert all(bool((found[name] == 1).all()) for name in changed)
        assert len(changed) < len(before)
        write_ones(model, offloaded)
    assert all(bool((p == 1).all()) for p in model.parameters())


def test_parameter_that_cannot_be_put_back_either_is_refused_until_a_load(
    nvme: Path, tmp_path: Path
) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with infinity.offload(model, nvme, host_memory=least_budget(make, nvme)) as offloaded:
        offloaded.save(tmp_path / "saved")
        with failing_writes(1, times=1000), pytest.raises(AioError, match="the disk is full"):
            write_ones(model, offloaded)
        for use in (lambda: model(torch.ones(2, WIDTH)), lambda: values(model, offloaded)):
            with pytest.raises(infinity.MixedStateError, match=r"gathered\(\) changed of"):
                use()
        offloaded.load(tmp_path / "saved")
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.detach(), before[name])
