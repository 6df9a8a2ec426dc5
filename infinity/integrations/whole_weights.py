"""Functions of autograd of frameworks that take the weight of a head itself (fused losses), for a
head that is in tiles: they get the whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from infinity.tiling.weight import TiledWeight

_FRAMEWORK = "trl"
_SHARED = "trl.trainer.utils"
"""Where trainers of ``trl`` have what several of them use."""


def let_take_tiles(trainer: type) -> None:
    """Let the functions that ``trainer`` has of ``trl``, if it derives from that, take weights in
    tiles. Idempotent.
    """
    of_classes = {kind.__module__ for kind in trainer.__mro__}
    modules = {name for name in of_classes if name.partition(".")[0] == _FRAMEWORK}
    for module in {*modules, _SHARED} & sys.modules.keys() if modules else ():
        names = vars(sys.modules[module])
        for name, function in [*names.items()]:
            is_function = isinstance(function, type) and issubclass(
                function, torch.autograd.Function
            )
            if is_function and not hasattr(function, "gets_wholes"):
                names[name] = _of_wholes(function)


def _of_wholes(function: Any) -> type:
    def apply(*args: Any, **kwargs: Any) -> Any:
        wholes = (arg.clone() if isinstance(arg, TiledWeight) else arg for arg in args)
        return function.apply(*wholes, **kwargs)

    own = {"__module__": function.__module__, "apply": staticmethod(apply), "gets_wholes": True}
    return type(function.__name__, (function,), own)
