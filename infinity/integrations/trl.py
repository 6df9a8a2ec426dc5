"""Trainers of TRL within a budget: ``OffloadSFTTrainer`` is ``trl.SFTTrainer``, and so on for every
trainer of TRL that derives from ``transformers.Trainer``; ``OffloadSFTConfig`` is
``trl.SFTConfig`` with the options of ``infinity.offload``::

    from infinity.integrations.trl import OffloadSFTTrainer

    trainer = OffloadSFTTrainer("org/model", args, train_dataset=data, nvme="/mnt/nvme0")
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import transformers
import trl

from infinity.integrations.transformers import OffloadArgumentsMixin, OffloadMixin

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


def __getattr__(name: str) -> Any:
    if name in globals():
        return globals()[name]
    base = getattr(trl, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    if not isinstance(base, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(base, transformers.Trainer):
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
