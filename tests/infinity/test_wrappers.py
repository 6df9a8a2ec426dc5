"""Wrappers of other libraries around or inside an offloaded model are refused by name."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import infinity
from tests.support.models import seeded
from tests.support.training import same_bits, values_of


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _traced(model: nn.Module) -> nn.Module:
    traced = torch.jit.trace(model, torch.ones(2, 8))
    assert isinstance(traced, nn.Module)
    return traced


def _scripted(model: nn.Module) -> nn.Module:
    scripted = torch.jit.script(model)
    assert isinstance(scripted, nn.Module)
    return scripted


WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (lambda: DistributedDataParallel(_make()), r"DistributedDataParallel.*process_group="),
    "DDP inside": (
        lambda: nn.Sequential(DistributedDataParallel(_make())),
        r"^0 \(DistributedDataParallel\).*process_group=",
    ),
    "traced": (lambda: _traced(_make()), r"TopLevelTracedModule cannot.*was traced or scripted"),
    "a scripted layer": (
        lambda: nn.Sequential(_scripted(nn.Linear(8, 8))),
        r"^0 \(RecursiveScriptModule\)",
    ),
    "DataParallel": (lambda: nn.DataParallel(_make()), r"DataParallel.*process_group="),
    "device_map": (
        lambda: accelerate.dispatch_model(_make(), {"0": "cpu", "1": "cpu"}, force_hooks=True),
        r"hook of accelerate.*device_map",
    ),
    "cpu_offload": (
        lambda: accelerate.cpu_offload(_make(), torch.device("cpu")),
        r"hook of accelerate.*remove_hook_from_submodules",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_is_refused_by_name(name: str, nvme: Path) -> None:
    make, match = WRAPPED[name]
    model = make()
    with pytest.raises(ValueError, match=match):
        infinity.offload(model, nvme).__enter__()
    assert not any(hasattr(parameter, "offload_index") for parameter in model.parameters())


@pytest.mark.usefixtures("world")
def test_ddp_around_an_offloaded_model_is_refused_when_called(nvme: Path) -> None:
    model = seeded(_make)
    with (
        pytest.raises(RuntimeError, match="was changed in place"),  # DDP sends weights when made
        infinity.offload(model, nvme),
        pytest.raises(RuntimeError, match=r"called by Dist.*process_group="),
    ):
        _call_with_ddp(model)


def _call_with_ddp(model: nn.Module) -> None:
    try:
        DistributedDataParallel(model)(torch.ones(2, 8))
    finally:
        DistributedDataParallel._active_ddp_module = None


def _weighted(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    weight: Any = model[0].weight
    return lambda x: x @ weight


JIT: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "trace": (_traced, r"used in torch\.jit\.trace: .* outside of the block"),
    "trace of a layer": (lambda model: _traced(model[1]), r"used in torch\.jit\.trace"),
    "trace of a function": (
        lambda model: torch.jit.trace(lambda x: model(x) * 2, torch.ones(2, 8)),
        r"used in torch\.jit\.trace",
    ),
    "trace of a weight": (
        lambda model: torch.jit.trace(_weighted(model), torch.ones(2, 8)),
        r"used in torch\.jit\.trace",
    ),
    "script": (_scripted, r"an offloaded Sequential was given to torch\.jit\.script: .* outside"),
    "script of what it is in": (
        lambda model: _scripted(nn.Sequential(nn.ReLU(), model)),
        r"an offloaded Sequential was given",
    ),
    "script of a layer": (lambda model: _scripted(model[0]), "an offloaded Linear was given"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", JIT)
def test_an_offloaded_model_is_refused_to_torch_jit(name: str, nvme: Path) -> None:
    make, match = JIT[name]
    model = seeded(_make)
    before = values_of(model)
    with infinity.offload(model, nvme):
        with pytest.raises(RuntimeError, match=match):
            make(model)
        model(torch.ones(2, 8)).sum().backward()
    assert all(same_bits(value, before[key]) for key, value in values_of(model).items())
    for make_jit in (_traced, _scripted):
        assert torch.equal(make_jit(model)(torch.ones(2, 8)), model(torch.ones(2, 8)))


class _Odd(nn.Module):
    """Has whatever is asked for, as modules do that let ``__getattr__`` stand for a default, and
    another hash each time.
    """

    hashes = count()

    def __init__(self, what: object) -> None:
        self.__dict__["what"] = [what]  # torch itself asks while it makes one
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def __hash__(self) -> int:
        return next(self.hashes)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return self.__dict__["what"][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


@pytest.mark.parametrize("what", [None, print, {}])
def test_a_module_that_gives_whatever_is_asked_for_trains_as_another(
    what: object, nvme: Path
) -> None:
    odd = seeded(lambda: _Odd(what))
    plain = seeded(lambda: nn.Sequential(*_Odd(what).children()))
    for model in (odd, plain):
        with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
            model(torch.ones(2, 8)).sum().backward()
            offloaded.step()
    assert all(map(torch.equal, odd.parameters(), plain.parameters()))


def test_a_norm_without_weights_is_copied_while_others_are_refused(nvme: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False))
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        model(torch.ones(2, 8)).sum().backward()
        offloaded.step()
        norm = copy.deepcopy(model[1])
        model(torch.ones(2, 8))
        for each in (model, model[0]):
            with pytest.raises(RuntimeError, match="cannot be copied"):
                copy.deepcopy(each)
            with offloaded.gathered(), pytest.raises(RuntimeError, match="cannot be copied"):
                copy.deepcopy(each)
    assert norm.num_batches_tracked == 1
    assert type(norm._parameters) is dict
    assert norm(torch.ones(2, 8)).shape == (2, 8)
    assert not norm._forward_hooks
    pickle.dumps(norm)


class _Locked(nn.Module):
    """Cannot be copied, whether it is offloaded or not."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_copy_that_fails_half_made_does_not_stop_the_end_of_the_block(nvme: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Locked(), nn.ReLU())
    with infinity.offload(model, nvme):
        with pytest.raises(TypeError, match="cannot pickle") as raised:
            copy.deepcopy(model[1])
        copied = copy.deepcopy(model[2])
    assert raised.traceback  # which keeps what there is of the copy
    assert not any(module._forward_hooks for module in (*model, copied))
    pickle.dumps(copied)
