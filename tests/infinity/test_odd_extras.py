"""`extra`, and what modules give to be saved, of odd kinds: whether a snapshot or a save waits, it
takes and refuses the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net


class _Reads:
    dtype = torch.float32
    shape = (4,)

    def read(self, start: int, out: memoryview) -> None:
        np.frombuffer(out, np.uint8)[:] = 7


def _graph() -> torch.Tensor:
    return torch.ones(4, requires_grad=True) * 2


def _rows() -> list[torch.Tensor]:
    whole = torch.arange(12.0).view(3, 4)
    return [whole[0], whole[2], whole.t()]


def _conjugated() -> list[torch.Tensor]:
    return [torch.full((2,), 1 + 2j).conj(), torch._neg_view(torch.ones(3))]


_KINDS: dict[str, Callable[[Any], Any]] = {
    "of_a_graph": lambda _: _graph(),
    "running_loss": lambda _: _graph().sum(),
    "leaf": lambda _: torch.ones(2, requires_grad=True),
    "parameter": lambda _: nn.Parameter(torch.ones(2)),
    "offloaded": lambda model: next(model.parameters()),
    "zero_tensor": lambda _: torch._efficientzerotensor(3),
    "rows": lambda _: _rows(),
    "conjugated": lambda _: _conjugated(),
    "expanded": lambda _: torch.ones(1).expand(5),
    "float8": lambda _: torch.ones(4).to(torch.float8_e4m3fn),
    "source": lambda _: _Reads(),
    "array": lambda _: np.arange(6).reshape(2, 3).T,
    "state_dict": lambda _: seeded(lambda: nn.Linear(2, 2), 0).state_dict(keep_vars=True),
    "plain": lambda _: OrderedDict(a=(1, {2, None}, b"x", 1j, np.float32(3), torch.Size([1]))),
    "generator": lambda _: (number for number in range(3)),
    "function": lambda _: seeded,
    "object": lambda _: object(),
    "meta": lambda _: torch.ones(2, device="meta"),
    "sparse": lambda _: torch.ones(2).to_sparse(),
}


_EVERYWHERE = ("of_a_graph", "zero_tensor", "generator")


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        facts = (value.dtype, value.requires_grad, value.stride(), value.untyped_storage().nbytes())
        return f"{type(value).__name__} {facts} {value.tolist()}"
    if isinstance(value, dict):
        return f"{type(value)} {[(key, _told(item)) for key, item in value.items()]}"
    return f"[{', '.join(map(_told, value))}]" if type(value) is list else repr(value)


def _outcome(call: Callable[[], Any]) -> str:
    try:
        return _told(call())
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".partition(" object at ")[0]


class _Stateful(Net):
    given: ClassVar[list[Any]] = [None]  # no attribute of the module, which may be a parameter

    def get_extra_state(self) -> Any:
        return self.given[0]

    def set_extra_state(self, state: Any) -> None:
        self.given[0] = state


def test_snapshots_and_saves_that_wait_or_not_take_and_refuse_the_same(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    model = seeded(lambda: _Stateful(3), 0)
    differing = {}
    with infinity.offload(
        model, tmp_path / "nvme", host_memory="1GiB", optimizer=ADAMW
    ) as offloaded:

        def snapshot(extra: Any, block: bool) -> Any:
            if block:
                offloaded.snapshot("a", extra=extra)
            else:
                offloaded.snapshot("a", extra=extra, block=False).result()
            return offloaded.restore("a")

        def save(extra: Any, block: bool) -> Any:
            if block:
                offloaded.save(tmp_path / "saved", extra=extra)
            else:
                offloaded.save(tmp_path / "saved", extra=extra, block=False).result()
            return offloaded.load(tmp_path / "saved")

        def of_module(extra: Any, block: bool) -> Any:
            model.given[0] = extra
            try:
                snapshot(None, block)
                return model.given[0]
            finally:
                model.given[0] = None

        for kind, make in _KINDS.items():
            for way in (snapshot, save, of_module) if kind in _EVERYWHERE else (snapshot,):
                ways = [_outcome(partial(way, make(model), b)) for b in (True, False)]
                if ways[0] != ways[1]:
                    differing[kind, way.__name__] = ways
    assert differing == {}


def test_copy_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    held, array = torch.ones(4), np.ones(3)
    model = seeded(lambda: Net(3), 0)
    with infinity.offload(model, tmp_path, host_memory="1GiB", optimizer=ADAMW) as offloaded:
        pending = offloaded.snapshot("a", extra={"t": held, "l": [held, array]}, block=False)
        held.zero_()
        array[:] = 0
        pending.result()
        extra = offloaded.restore("a")
    assert torch.equal(extra["t"], torch.ones(4))
    assert extra["t"] is extra["l"][0]
    assert np.array_equal(extra["l"][1], np.ones(3))
