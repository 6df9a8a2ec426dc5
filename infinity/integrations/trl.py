"""Trainers of TRL within a budget: ``OffloadSFTTrainer`` is ``trl.SFTTrainer``, and so on for every
trainer of TRL that derives from ``transformers.Trainer``; ``OffloadSFTConfig`` is
``trl.SFTConfig`` with the options of ``infinity.offload``::

    from infinity.integrations.trl import OffloadSFTTrainer

    trainer = OffloadSFTTrainer("org/model", args, train_dataset=data, nvme="/mnt/nvme0")
"""

from __future__ import annotations

from typing import Any

import transformers
import trl

from infinity.integrations.transformers import OffloadArgumentsMixin, OffloadMixin

_PREFIX = "Offload"
_KINDS = (transformers.Trainer, transformers.TrainingArguments)


def __getattr__(name: str) -> Any:
    base = getattr(trl, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    if not isinstance(base, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(base, transformers.Trainer):
        made = type(name, (OffloadMixin, base), {"__module__": __name__, "__doc__": base.__doc__})
    elif issubclass(base, transformers.TrainingArguments):
        made = type(name, (OffloadArgumentsMixin, base), {"__module__": __name__})
    else:
        raise AttributeError(f"trl.{base.__name__} is no trainer and no class of arguments")
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    names = (name for name in dir(trl) if name.endswith(("Trainer", "Config")))
    return [f"{_PREFIX}{name}" for name in names if issubclass(getattr(trl, name), _KINDS)]
