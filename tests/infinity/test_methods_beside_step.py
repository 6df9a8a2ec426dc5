"""Methods of an optimizer beside ``step``, which nothing calls in a block: said by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.models import seeded
from tests.support.own_optimizers import Own, linears, pass_back
from tests.support.training import WHOLE


class _Sophia(Own):
    rate = 1.0

    def made(self) -> None:
        self.scale = 1.0

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["hessian"] = p.grad.square()

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        state = self.state[p]
        state.setdefault("hessian", torch.zeros_like(p))
        return float(1 / (1 + state["hessian"].sum()))


class _Kept:
    """A factory that keeps what it makes."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.made: Any = None

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        self.made = self.kind(params)
        assert isinstance(self.made, torch.optim.Optimizer)
        return self.made


@pytest.mark.parametrize("kind", [_Sophia, lambda params: torch.optim.AdamW(params, fused=True)])
def test_state_that_is_left_in_the_object_of_the_factory_is_an_error_by_name(
    kind: Any, nvme: Path, tmp_path: Path
) -> None:
    model, factory = seeded(linears), _Kept(kind)
    with infinity.offload(model, nvme, optimizer=factory, host_memory=WHOLE) as offloaded:
        pass_back(model, 0)
        offloaded.step()
        pass_back(model, 1)
        _ = factory.made.state[model[0].weight]  # empty, of whoever looks for some
        offloaded.save(tmp_path / "saved")
        if kind is _Sophia:
            factory.made.update_hessian()
        else:
            with pytest.raises(RuntimeError, match=r"0\.weight, which is offloaded"):
                factory.made.step()
        for act in (
            offloaded.step,
            lambda: offloaded.save(tmp_path / "other"),
            lambda: offloaded.snapshot("one"),
        ):
            with pytest.raises(ValueError, match="that the factory made has state of its own"):
                act()
        factory.made.state.clear()
        offloaded.step()
        offloaded.save(tmp_path / "other")


def test_methods_and_attributes_of_the_class_are_refused_by_name(nvme: Path) -> None:
    model = seeded(linears)
    with infinity.offload(model, nvme, optimizer=_Sophia, host_memory=WHOLE) as offloaded:
        optimizer: Any = offloaded.optimizer
        for name in ("update_hessian", "scale", "rate"):
            assert not hasattr(optimizer, name)
            with pytest.raises(AttributeError, match=rf"no '{name}'; that of _Sophia.*step\(\)"):
                getattr(optimizer, name)
            with pytest.raises(AttributeError, match=f"no '{name}'; that of _Sophia"):
                setattr(optimizer, name, 2.0)
        with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
            _ = optimizer.other
        optimizer.other = 1
        assert optimizer.other == 1


class _Zeroes(Own):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["passes"] = group.get("passes", 0) + 1


def test_zero_grad_of_an_optimizer_s_own_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"_Zeroes has a zero_grad\(\) of its own"):
        TorchRule(_Zeroes(nn.Linear(4, 4).parameters()))
    optimizer: Any = Own(nn.Linear(4, 4).parameters())
    optimizer.zero_grad = lambda set_to_none=True: None
    with pytest.raises(ValueError, match=r"Own has a zero_grad\(\) of its own"):
        TorchRule(optimizer)


class _Loads(Own):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1]["scale"] = 0.5

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        return float(group["scale"])


def test_groups_and_loading_of_an_optimizer_s_own_are_refused_where_they_are_asked_for(
    nvme: Path,
) -> None:
    model = seeded(linears)
    with infinity.offload(model, nvme, optimizer=_Loads, host_memory=WHOLE) as offloaded:
        assert offloaded.optimizer.param_groups[0]["scale"] == 0.5
        saved = offloaded.optimizer.state_dict()
        with pytest.raises(ValueError, match=r"_Loads has a load_state_dict\(\) of its own"):
            offloaded.optimizer.load_state_dict(saved)
        with pytest.raises(ValueError, match=r"_Loads has a add_param_group\(\) of its own"):
            offloaded.optimizer.add_param_group({"params": [model[0].weight]})
        assert len(offloaded.optimizer.param_groups) == 1
