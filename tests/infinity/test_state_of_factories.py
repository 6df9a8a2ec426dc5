"""State of optimizers made by a factory: kept in the dtype that it has, and found by what a
parameter has of its own, as in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from tests.support.own_optimizers import Each
from tests.support.training import least_budget, same_bits

WIDTH = 144


class _Double(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        total = state.setdefault("master", torch.zeros_like(p, dtype=torch.float64))
        total.mul_(0.9).add_(p.grad.double())
        p.sub_(total.float(), alpha=0.1)


class _Counts(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        count = state.setdefault("n", torch.full_like(p, 2**24, dtype=torch.int64))
        count += p.grad > 0
        p.sub_(p.grad * (count - 2**24 + 1), alpha=0.1)


class _Half(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        average = state.setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16))
        average.mul_(0.9).add_(p.grad.bfloat16())
        p.sub_(average.float(), alpha=0.1)


class _Seen(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        seen = state.setdefault("seen", torch.zeros_like(p, dtype=torch.bool))
        p.sub_(torch.where(seen, p.grad, 2 * p.grad), alpha=0.1)
        seen |= p.grad > 0


class _Turning(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        turning = state.setdefault("z", torch.zeros_like(p, dtype=torch.complex64))
        turning.mul_(0.9j).add_(p.grad)
        p.sub_(turning.real, alpha=0.1)


class _Late(Each):
    """Makes its state in its second step, and puts other data in the place of the parameter's."""

    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        if "m" in state:
            state["m"] = p.grad.clone() if state["m"] is None else state["m"].lerp(p.grad, 0.5)
        state.setdefault("m", None)
        p.data = p.data - 0.1 * (p.grad if state["m"] is None else state["m"])


class _Turned(Each):
    """Leaves parameters and state where they are, and lets other values be read from there."""

    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        state["m"] = self._turned(state.get("m", torch.zeros_like(p)).lerp_(p.grad, 0.5))
        p.sub_(state["m"], alpha=0.1)
        p.data = self._turned(p.data)

    @staticmethod
    def _turned(values: torch.Tensor) -> torch.Tensor:
        is_square = values.dim() == 2 and values.shape[0] == values.shape[1]
        return torch._neg_view(values.t() if is_square else values)


class _Attributes(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        p.sub_(p.grad * p.mask, alpha=p.lr_scale)


class _Names(Each):
    def one(self, p: Any, state: dict[str, Any], name: str) -> None:
        p.sub_(p.grad, alpha=0.1 if "weight" in name else 0.9)


def _named(parameters: list[Any]) -> _Names:
    return _Names([("weight" if p.dim() == 2 else "bias", p) for p in parameters])


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for index, parameter in enumerate(model.parameters()):
        mask = (torch.rand_like(parameter) > 0.5).float()
        vars(parameter).update(lr_scale=1 / (index + 1), mask=mask)
    return model


def _backward(model: nn.Module, step: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def _lay_in_rows(model: nn.Module) -> None:
    """As weights lie inside the block: products of others are rounded otherwise, by processor."""
    for parameter in model.parameters():
        rows = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        parameter.data = rows.copy_(parameter.data)


KINDS: list[Any] = [_Double, _Counts, _Half, _Seen, _Turning, _Late, _Turned, _Attributes, _named]


@pytest.mark.parametrize("factory", KINDS)
def test_state_attributes_and_names_are_those_of_memory(
    factory: Any, nvme: Path, tmp_path: Path
) -> None:
    plain = _model()
    optimizer = factory([*plain.parameters()])
    for step in range(4):
        _backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
        _lay_in_rows(plain)
    least = least_budget(_model, nvme, optimizer=factory)
    for resume in (False, True):
        model = _model()
        with infinity.offload(model, nvme, optimizer=factory, host_memory=least) as offloaded:
            if resume:
                offloaded.load(tmp_path / "saved")
            for step in range(2 if resume else 0, 4):
                _backward(model, step)
                offloaded.step()
                if step == 1:
                    offloaded.save(tmp_path / "saved")
        assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_a_checkpoint_with_all_state_in_float32_loads(nvme: Path, tmp_path: Path) -> None:
    """As versions before this one saved it, without the names and dtypes of state components."""
    with infinity.offload(_model(), nvme, optimizer=_Half) as offloaded:
        _backward(offloaded.model, 0)
        offloaded.step()
        offloaded.save(tmp_path / "new")
    tree = checkpoint.load(tmp_path / "new")
    kept = tree["optimizer"]["m"]
    tree["optimizer"]["m"] = {name: values.float() for name, values in kept.items()}
    del tree["infinity"]["plane_dtypes"]
    tree["infinity"]["small_state"] = {name: {} for name in tree["infinity"]["small_state"]}
    checkpoint.save(tree, tmp_path / "old")
    with infinity.offload(_model(), nvme, optimizer=_Half) as offloaded:
        offloaded.load(tmp_path / "old")
        offloaded.save(tmp_path / "again")
    again = checkpoint.load(tmp_path / "again")
    assert all(same_bits(values, again["optimizer"]["m"][name]) for name, values in kept.items())
    assert again["infinity"]["plane_dtypes"]["0.weight"] == {"m": torch.bfloat16}


def test_state_in_another_dtype_is_refused_by_name(nvme: Path, tmp_path: Path) -> None:
    class _Wide(Each):
        def one(self, p: Any, state: dict[str, Any], name: str) -> None:
            state.setdefault("m", torch.zeros_like(p)).add_(p.grad)

    _Wide.__qualname__ = "_Half"  # as an older version of the program has it
    with infinity.offload(_model(), nvme, optimizer=_Wide) as offloaded:
        offloaded.save(tmp_path / "saved")
    with (
        infinity.offload(_model(), nvme, optimizer=_Half) as offloaded,
        pytest.raises(ValueError, match=r"state m of 0\.weight in torch\.float32.*torch\.bfloat16"),
    ):
        offloaded.load(tmp_path / "saved")


def test_state_that_is_no_plain_tensor_is_refused_by_name(nvme: Path) -> None:
    class _Sparse(Each):
        def one(self, p: Any, state: dict[str, Any], name: str) -> None:
            state["packed"] = p.grad.to_sparse()

    with (
        pytest.raises(ValueError, match=r"_Sparse keeps the state 'packed' as Tensor"),
        infinity.offload(_model(), nvme, optimizer=_Sparse),
    ):
        pass
