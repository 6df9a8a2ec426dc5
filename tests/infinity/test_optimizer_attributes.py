"""What optimizers have in their attributes and groups: steps that would need what updates of one
parameter at a time do not have are refused by name, and nothing of the user's is changed.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.models import seeded
from tests.support.own_optimizers import Scaled
from tests.support.training import WHOLE, same_bits


class _Sgd(Scaled):
    def __init__(self, params: Any, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **options})
        self.made(model or nn.Linear(2, 2))

    def made(self, model: nn.Module) -> None:
        """What there is from the beginning on."""


def _ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


class _ByNamesOfTheModel(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.kept = model

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        names = {id(q): name for name, q in self.kept.named_parameters()}
        return 0.1 if "bias" in names.get(id(p), "") else 1.0


class _InAnObject(_ByNamesOfTheModel):
    def made(self, model: nn.Module) -> None:
        self.kept: Any = _Holder(model)

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 0.1 if any(q is p for q in self.kept.model.parameters()) else 1.0


class _Options:
    def __init__(self) -> None:
        self.kinds = [torch.float32, "rows"]


class _Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self) -> Any:
        return self.model.named_parameters()


class _ByMethod(_ByNamesOfTheModel):
    def made(self, model: nn.Module) -> None:
        self.kept: Any = model.named_parameters

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 0.1 if any(q is p for _, q in self.kept()) else 1.0


class _ByPartial(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.kept = functools.partial(lambda ids, p: 0.1 if id(p) in ids else 1.0, {*_ids(self)})

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return self.kept(p)


class _ByClosure(_ByPartial):
    def made(self, model: nn.Module) -> None:
        ids = {*_ids(self)}
        self.kept: Any = lambda p: 0.1 if id(p) in ids else 1.0


class _ByArray(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.kept = np.array(_ids(self))

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 0.1 if id(p) in self.kept else 1.0


class _ByAddress(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.kept = {p.data_ptr(): 0.1 for group in self.param_groups for p in group["params"]}

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return self.kept.get(p.data_ptr(), 1.0)


class _CountsInTheModel(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.kept: Any = model

    def begin(self) -> None:
        self.kept.count += 1


class _CountsByIterator(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.kept = itertools.count(1)

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 1.0 / next(self.kept)


class _CountsInSlots(_Sgd):
    class Count:
        __slots__ = ("n",)
        n: int

    def made(self, model: nn.Module) -> None:
        self.kept: Any = self.Count()
        self.kept.n = 0

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        self.kept.n += 1
        return 1.0 / self.kept.n


class _Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.count: torch.Tensor


REFUSED = {
    **dict.fromkeys(
        (_ByNamesOfTheModel, _InAnObject, _ByMethod, _ByPartial, _ByClosure, _ByArray, _ByAddress),
        "parameters, or what leads to them",
    ),
    _CountsInTheModel: "parameters, or what leads to them",
    _CountsByIterator: "something of which a copy may lack a part",
    _CountsInSlots: "something of which a copy may lack a part",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_steps_that_use_what_leads_to_parameters_are_refused_and_change_nothing(
    kind: type[_Sgd], nvme: Path
) -> None:
    model = seeded(_Counted)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    what = f"{kind.__name__} .*its steps use the attribute 'kept', which has {REFUSED[kind]}"
    options: Any = {"host_memory": WHOLE, "optimizer": lambda params: kind(params, model)}
    with pytest.raises(ValueError, match=what):
        infinity.plan(model, nvme, **options)
    with pytest.raises(ValueError, match=what), infinity.offload(model, nvme, **options):
        pytest.fail("the block began")
    assert all(same_bits(value, before[n]) for n, value in model.state_dict().items())


class _UsesWhatIsPlain(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.lock, self.model = threading.Lock(), model  # which no step uses
        self.table: dict[str, Any] = {"factors": np.linspace(1, 0.5, 4), "it": _Options()}
        self.bound, self.scale = self._scaled, 0.5

    def _scaled(self, p: torch.Tensor) -> float:
        return self.scale * len(self.param_groups[0]["params"][:1])

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return self.bound(p) * float(self.table["factors"][2])


class _CountsInGroup(_Sgd):
    def begin(self) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 1.0 / group["steps"]


@pytest.mark.parametrize("kind", [_UsesWhatIsPlain, _CountsInGroup])
def test_steps_have_the_bits_of_plain_ones_also_where_nothing_has_a_gradient(
    kind: type[_Sgd], nvme: Path
) -> None:
    ours, plain = seeded(_Counted), seeded(_Counted)
    optimizer = kind(plain.parameters(), plain)
    with infinity.offload(
        ours, nvme, optimizer=lambda params: kind(params, ours), host_memory=WHOLE
    ) as offloaded:
        for number in range(6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            for trained in (ours, plain) if number % 3 != 1 else ():
                trained(x).square().sum().backward()
            offloaded.step()
            optimizer.step()
            optimizer.zero_grad()
        steps = [o.param_groups[0].get("steps") for o in (offloaded.optimizer, optimizer)]
        assert steps[0] == steps[1]
    expected = dict(plain.named_parameters())
    assert all(same_bits(p, expected[name]) for name, p in ours.named_parameters())


class _CountsInAHook(_Sgd):
    def made(self, model: nn.Module) -> None:
        self.steps = self.logged = 0
        self.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1
        self.logged += 1

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 1.0 / (1 + self.steps)


class _LogsInAHook(_CountsInAHook):
    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 1.0


@pytest.mark.parametrize("kind", [_CountsInAHook, _LogsInAHook])
def test_attribute_that_a_hook_changes_is_refused_if_steps_need_it(
    kind: type[_CountsInAHook], nvme: Path
) -> None:
    model = seeded(_Counted)
    made: list[_CountsInAHook] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        made.append(kind(params))
        return made[0]

    with infinity.offload(model, nvme, optimizer=factory, host_memory=WHOLE) as offloaded:
        for number in range(3):
            model(torch.ones(2, 8)).sum().backward()
            if number and kind is _CountsInAHook:
                with pytest.raises(ValueError, match="the attribute 'steps' of _CountsInAHook"):
                    offloaded.step()
                break
            offloaded.step()
    assert made[0].logged == (1 if kind is _CountsInAHook else 3)


class _AveragesWithoutGradient(_Sgd):
    def begin(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("average", p.detach().clone())
                with torch.no_grad():
                    p.lerp_(state["average"].lerp_(p, 0.1), 0.01)


class _CountsInASharedTensor(_Sgd):
    def begin(self) -> None:
        for group in self.param_groups:
            group["count"] += 1

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        return 1.0 / float(group["count"])


def test_what_goes_on_without_gradients_couples_parameters() -> None:
    with pytest.raises(ValueError, match="it moves parameters that have no gradient"):
        TorchRule(_AveragesWithoutGradient(nn.Linear(4, 4).parameters()))


def test_value_that_is_one_for_two_groups_and_is_counted_in_is_refused() -> None:
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    with pytest.raises(ValueError, match="two of them together"):
        TorchRule(_CountsInASharedTensor(groups, count=torch.zeros(())))
    TorchRule(_CountsInASharedTensor([model.weight], count=torch.zeros(())))
    TorchRule(_Sgd(groups, rate=torch.ones(())))  # which no step changes


def test_group_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a parameter group has 'lock', which cannot be copied"):
        TorchRule(_Sgd(nn.Linear(4, 4).parameters(), lock=threading.Lock()))


def test_counts_of_groups_begin_anew_with_a_checkpoint_that_has_none(
    nvme: Path, tmp_path: Path
) -> None:
    with infinity.offload(seeded(_Counted), nvme, host_memory=WHOLE, optimizer=None) as offloaded:
        offloaded.save(tmp_path / "weights")
    model = seeded(_Counted)

    def factory(params: Any) -> torch.optim.Optimizer:
        return _CountsInGroup(params, steps=10)

    with infinity.offload(model, nvme, host_memory=WHOLE, optimizer=factory) as offloaded:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            offloaded.step()
            assert offloaded.optimizer.param_groups[0]["steps"] == 11
            offloaded.load(tmp_path / "weights")
            assert offloaded.optimizer.param_groups[0]["steps"] == 10


class _Remembers(Scaled):
    """Keeps what no checkpoint holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    def factor(self, p: torch.Tensor, group: dict[str, Any]) -> float:
        last = self.state[p].setdefault("last", deque(maxlen=2))
        last.append(float(p.abs().mean()))
        return sum(last)


def test_state_that_could_not_be_saved_is_refused_as_the_block_begins(nvme: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"_Remembers keeps 'last' .* collections.deque"),
        infinity.offload(nn.Linear(8, 8), nvme, optimizer=_Remembers, host_memory=WHOLE),
    ):
        pass


class _TimeIsUpError(Exception):
    """What a handler of SIGALRM may raise."""


class _Late:
    """An option that is being copied when a handler runs."""

    is_up = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Late:
        if self.is_up:
            raise _TimeIsUpError
        return self


def test_what_a_handler_raises_in_a_step_is_no_fault_of_an_option(nvme: Path) -> None:
    option = _Late()

    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.param_groups[0]["late"] = option
        return optimizer

    model = nn.Linear(8, 8)
    with infinity.offload(model, nvme, optimizer=factory, host_memory=WHOLE) as offloaded:
        model(torch.ones(2, 8)).sum().backward()
        option.is_up = True
        with pytest.raises(_TimeIsUpError):
            offloaded.step()
        option.is_up = False
        offloaded.step()
