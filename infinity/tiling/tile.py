"""A tile: some rows of a parameter, as a parameter of a module of its own, so that hooks on modules
have one tile at a time in memory.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn

RowRange = tuple[int, int]
"""First row, and the row after the last."""

Owner = tuple[str, nn.Module, str]
"""What the model calls a module, the module, and what that calls a parameter."""

CHILD = "tiles"
"""What a module calls the ``TileList`` of its parameters."""

_OF_TILE = re.compile(r"(^|\.)tiles\.\d+\.(\w+)$")


class _Walk(threading.local):
    """How this thread sees the parameters of modules that it walks over."""

    sees_wholes = False


_walk = _Walk()


def sees_wholes() -> bool:
    """Whether modules have their parameters as without tiles for this thread now."""
    return _walk.sees_wholes


@contextmanager
def seeing(*, wholes: bool) -> Iterator[None]:
    """Modules have their parameters as without tiles inside, or have tiles, for this thread."""
    before, _walk.sees_wholes = _walk.sees_wholes, wholes
    try:
        yield
    finally:
        _walk.sees_wholes = before


def whole_name(name: str) -> str:
    """The name of the weight or bias that a tile is of; other names as they are."""
    return _OF_TILE.sub(r"\1\2", name)


class Tile(nn.Module):
    """Rows [``start``, ``stop``) of the parameter ``name`` of the module that it belongs to."""

    def __init__(self, name: str, parameter: nn.Parameter, rows: RowRange) -> None:
        super().__init__()
        self.name = name
        self.start, self.stop = rows
        self.register_parameter(name, parameter)

    def forward(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """``function`` of the weights, which are in memory for as long as it runs, and ``args``."""
        return function(getattr(self, self.name), *args)

    @property
    def parameter(self) -> nn.Parameter:
        """Itself; its weights need not be in memory."""
        found = dict.get(self._parameters, self.name)
        assert found is not None
        return found

    @property
    def rows(self) -> RowRange:
        """Which it has."""
        return self.start, self.stop

    def extra_repr(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    def _load_from_state_dict(self, *args: Any) -> None:
        """What is loaded was cut for it, also by a function that is applied to modules."""
        with seeing(wholes=False):
            super()._load_from_state_dict(*args)


def rows_of_parameter(parameter: torch.Tensor, rows: RowRange) -> nn.Parameter:
    """A tile: those rows, where they lie if that is contiguous, and what programs gave them."""
    start, stop = rows
    # Not detach(): a change of one tile would count as one of all.
    tile = nn.Parameter(parameter.data[start:stop].contiguous(), parameter.requires_grad)
    for name, value in vars(parameter).items():
        is_cut = isinstance(value, torch.Tensor) and _has_rows_of(value, parameter)
        vars(tile)[name] = value[start:stop] if is_cut else value
    return tile


def _has_rows_of(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an attribute (a mask, say) is of each element of ``parameter``, or of each row."""
    return value.dim() == parameter.dim() and value.shape[:1] == parameter.shape[:1]


def cut_gradient(parameter: torch.Tensor, tiles: Sequence[tuple[Any, RowRange]]) -> None:
    """Give the tiles of a ``parameter``, with their rows, the gradient that it has."""
    gradient: Any = parameter.grad
    for tile, (start, stop) in tiles:
        tile.grad = gradient[start:stop]
    parameter.grad = None


class TileList(nn.ModuleList):
    """The tiles of one parameter or several, as a child of the module that had them.

    What computes with a tile keeps no weights for the backward pass, so that a block which is
    checkpointed never has all of them in memory.
    """

    has_fleeting_weights = True

    def __init__(self, tiles: Iterable[Tile] = (), order: Iterable[str] = ()) -> None:
        """``order``: all parameters that the module had, in tiles or not."""
        super().__init__(tiles)
        self.order = list(order)

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Nothing: ``fn`` is given the module that has the tiles, with all of the parameter."""
        return self

    def of(self, name: str) -> list[Tile]:
        """Those of the parameter ``name``, in the order of their rows."""
        return [tile for tile in self if isinstance(tile, Tile) and tile.name == name]

    @property
    def names(self) -> list[str]:
        """The parameters that there are tiles of."""
        return list(dict.fromkeys(tile.name for tile in self if isinstance(tile, Tile)))


_WALKING = ("apply", "reset_parameters", "_reset_parameters")
"""Methods of modules that walk over parameters of their own and of their children."""


def _seeing_wholes(module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """In the place of a ``method`` of a module that has tiles, or whose children have."""
    kind = type(module)
    own = inspect.getattr_static(kind, method)  # a function, or a static or a class method
    with seeing(wholes=True):
        return own.__get__(module, kind)(*args, **kwargs)


def _is_method(kind: type, name: str) -> bool:
    """Whether instances have what ``kind`` calls ``name`` as what can be called."""
    own = inspect.getattr_static(kind, name, None)
    return hasattr(own, "__get__") and callable(getattr(kind, name))


class WalksOverWholes:
    """Context manager: what initialises modules of ``model`` that have tiles inside, or whose
    children have, walks over parameters as without tiles, unless an instance has its own method.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._put: dict[tuple[nn.Module, str], object] = {}

    def __enter__(self) -> None:
        for module in self._model.modules():
            has_tiles = any(isinstance(inner, TileList) for inner in module.modules())
            if not has_tiles or isinstance(module, TileList):
                continue
            for name in _WALKING:
                if _is_method(type(module), name) and name not in vars(module):
                    self._put[module, name] = method = partial(_seeing_wholes, module, name)
                    vars(module)[name] = method

    def __exit__(self, *_: object) -> None:
        for (module, name), method in self._put.items():
            if vars(module).get(name) is method:
                del vars(module)[name]


def refused_as_whole(whole: Any, shape: torch.Size, key: str, errors: list[str]) -> bool:
    """Whether what is loaded as ``key`` cannot be cut; ``errors`` get what torch says of it then,
    which is an error also where loading is not strict.
    """
    if not isinstance(whole, torch.Tensor):
        errors.append(
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
            f"object from checkpoint but received {type(whole)}"
        )
    elif whole.shape != shape:
        errors.append(
            f"size mismatch for {key}: copying a param with shape {whole.shape} from checkpoint, "
            f"the shape in current model is {shape}."
        )
    else:
        return False
    return True
