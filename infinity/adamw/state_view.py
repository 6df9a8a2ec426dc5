"""``optimizer.state`` of an optimizer whose state is not in memory: what torch asks it for.

Frameworks move, copy or clear what ``state`` lists, as if it were tensors in memory. So it lists
nothing. It is true where there is state, so that nobody takes a step to make some, and gives that
of a parameter to who asks for it.

torch's own ``state_dict`` and ``load_state_dict`` are handed over what they need while they run:
state that was read is put where the first looks for it, and what the second is to load is taken out
of its hands, behind all hooks that may change it and before those that may look at what came of it.
Hooks of a program run outside of either's hold, and may wait for another thread.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

StateDict = dict[str, Any]


class StateHolder(Protocol):
    """An optimizer that knows its state."""

    def has_state(self, parameter: object = None) -> bool: ...

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]: ...


def refuse_change(*_: Any, **__: Any) -> NoReturn:
    """Whatever would change the state by way of ``optimizer.state``."""
    raise TypeError(
        "the state of this optimizer is not in memory and cannot be changed through "
        "optimizer.state; call optimizer.load_state_dict(state_dict) of the OffloadedAdamW itself, "
        "with {} as 'state' to begin anew. A wrapper that puts values into the state of the "
        "optimizer inside, as ZeroRedundancyOptimizer does, cannot load it: use optimizer.save and "
        "optimizer.load"
    )


class TieredStateView(dict[torch.Tensor, Any]):
    """Lists nothing, but is true if ``optimizer`` has state, and has that of a parameter by
    subscript, ``get`` and ``in``.

    Raises ``TypeError`` where it is to be changed.
    """

    def __init__(self, optimizer: StateHolder) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.has_state()

    def __contains__(self, parameter: object) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.has_state(parameter)

    def __missing__(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        optimizer = self._optimizer()
        if optimizer is None:
            raise KeyError("the optimizer of this state is gone")
        return optimizer.state_of(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if self.__contains__(parameter) else default

    __setitem__ = __delitem__ = __ior__ = refuse_change
    clear = pop = popitem = setdefault = update = refuse_change


class ParameterState(Mapping[str, torch.Tensor]):
    """The state of a parameter by name; each look at an entry reads it, as a copy.

    Copies are tensors of the inference mode: torch refuses to change them in place, which would
    change nothing here.
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = names
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        with torch.inference_mode():
            return self._read(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class Loading:
    """Of one ``load_state_dict``: ``begin`` gives what of a state dict is left to torch, ``finish``
    comes when torch has taken that.
    """

    begin: Callable[[StateDict], StateDict]
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one ``state_dict``: ``begin`` gives the state as it is from then on, ``finish`` comes when
    torch has made the dict of it, with the groups.
    """

    begin: Callable[[], defaultdict[torch.Tensor, Any]]
    finish: Callable[[], None]


class Hooks(OrderedDict[int, Callable[..., Any]]):
    """Those of a program, as torch keeps them, with ours around them wherever torch goes through
    them: whatever they register and remove meanwhile.
    """

    def __init__(
        self,
        first: Callable[..., Any] | None = None,
        last: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self._first, self._last = first, last

    def values(self) -> Any:
        around = (self._first, *super().values(), self._last)
        return [hook for hook in around if hook is not None]


class Handover(threading.local):
    """Of one optimizer to torch's methods on that thread, no other: that of the innermost call,
    where a hook of one makes another.
    """

    packed: defaultdict[torch.Tensor, Any] | None = None
    """State that ``state_dict`` has read, for torch to find."""
    reading: Reading | None = None
    loading: Loading | None = None

    @staticmethod
    def begin_reading(optimizer: Any) -> None:
        """The last hook before torch makes a state dict. None refers to its optimizer."""
        handover: Handover = optimizer._handover
        if handover.reading is not None:
            handover.packed = handover.reading.begin()

    @staticmethod
    def finish_reading(optimizer: Any, _: StateDict) -> None:
        """The first hook behind that."""
        handover: Handover = optimizer._handover
        if handover.reading is not None:
            handover.reading.finish()

    @staticmethod
    def begin_loading(optimizer: Any, state_dict: StateDict) -> StateDict | None:
        """The last hook before torch copies a state dict."""
        loading: Loading | None = optimizer._handover.loading
        return None if loading is None else loading.begin(state_dict)
