"""``optimizer.state`` of an optimizer whose state is not in memory: what torch asks it for.

Frameworks move, copy or clear what ``state`` lists, as if it were tensors in memory. So it lists
nothing. It is true where there is state, so that nobody takes a step to make some, and gives that
of a parameter to who asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch

from infinity.adamw import state as offloaded_state
from infinity.adamw.member import Member
from infinity.adamw.store import StateStore


class StateHolder(Protocol):
    """An optimizer that knows its state."""

    def has_state(self) -> bool: ...

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]: ...


class TieredStateView(dict[torch.Tensor, Any]):
    """Empty, but true if ``optimizer`` has state, and by subscript the state of a parameter.

    Raises ``TypeError`` where it is to be changed.
    """

    def __init__(self, optimizer: StateHolder) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.has_state()

    def __missing__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        optimizer = self._optimizer()
        if optimizer is None:
            raise KeyError("the optimizer of this state is gone")
        return optimizer.state_of(parameter)

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> NoReturn:
        raise TypeError(
            "the state of this optimizer is not in memory, and cannot be put there; call "
            "optimizer.load_state_dict(state_dict)"
        )


class ParameterState(Mapping[str, torch.Tensor]):
    """The state of a parameter by name; each look at an entry reads it, as a copy."""

    def __init__(self, member: Member, store: StateStore, settle: Callable[[], None]) -> None:
        self._member = member
        self._store = store
        self._settle = settle
        self._names = ("step", *offloaded_state.plane_dtypes(member))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        self._settle()
        return offloaded_state.tensor_of(self._member, self._store, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
