"""Trainers of TRL within a budget: ``OffloadSFTTrainer`` is ``trl.SFTTrainer``, and so on for every
trainer of TRL that derives from ``transformers.Trainer``; ``OffloadSFTConfig`` is
``trl.SFTConfig`` with the options of ``infinity.offload``::

    from infinity.integrations.trl import OffloadSFTTrainer

    trainer = OffloadSFTTrainer("org/model", args, train_dataset=data, nvme="/mnt/nvme0")
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import torch
import transformers
import trl

from infinity.integrations.transformers import OffloadArgumentsMixin, OffloadMixin
from infinity.tiling.weight import TiledWeight

_PREFIX = "Offload"
_KINDS = (transformers.Trainer, transformers.TrainingArguments)


class _OffloadMixin(OffloadMixin):
    """Takes ``OffloadArguments`` where TRL takes plain training arguments, which is in
    ``SFTTrainer``: it makes a class of its own of those, and so does this.
    """

    def _own_arguments(self, arguments: Any) -> Any:
        known: Any = trl  # which makes its names when they are asked for
        converts = isinstance(self, known.SFTTrainer)
        if not converts or isinstance(arguments, known.SFTConfig):
            return super()._own_arguments(arguments)
        if not isinstance(arguments, OffloadArgumentsMixin):
            return arguments
        made = __getattr__("OffloadSFTConfig")
        given = [option.name for option in fields(arguments) if option.init]
        return made(**{name: getattr(arguments, name) for name in given})


def _let_take_tiles(trainer: type) -> None:
    """The losses of TRL compute with the weight of the head itself, by functions of autograd, which
    take no tiles: they get the whole.
    """
    for module in (trainer.__module__, "trl.trainer.utils"):
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


def __getattr__(name: str) -> Any:
    if name in globals():
        return globals()[name]
    base = getattr(trl, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    if not isinstance(base, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(base, transformers.Trainer):
        _let_take_tiles(base)
        made = type(name, (_OffloadMixin, base), {"__module__": __name__, "__doc__": base.__doc__})
    elif issubclass(base, transformers.TrainingArguments):
        made = type(name, (OffloadArgumentsMixin, base), {"__module__": __name__})
    else:
        raise AttributeError(f"trl.{base.__name__} is no trainer and no class of arguments")
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    names = (name for name in dir(trl) if name.endswith(("Trainer", "Config")))
    return [f"{_PREFIX}{name}" for name in names if issubclass(getattr(trl, name), _KINDS)]
