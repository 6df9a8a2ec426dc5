"""Arguments of the class that a trainer of TRL reads: each of them has one of its own."""

from __future__ import annotations

import sys
from typing import Any

from infinity.integrations.transformers.arguments import OffloadArgumentsMixin


def check_class_of(arguments: Any, trainer: type) -> None:
    """Raises ``TypeError`` for arguments with the options of ``infinity.offload`` that are not of
    the class that ``trainer`` reads; it names that class.
    """
    if not isinstance(arguments, OffloadArgumentsMixin):
        return
    for base in trainer.__mro__:
        name = f"{base.__name__.removesuffix('Trainer')}Config"
        config = getattr(sys.modules[base.__module__], name, None)
        if base.__module__.partition(".")[0] != "trl" or config is None:
            continue
        if not isinstance(arguments, config):
            raise TypeError(
                f"{base.__name__} reads options of {name} that {type(arguments).__name__} does not "
                f"have; give it an Offload{name} of infinity.integrations.trl, which has those and "
                "the options of infinity.offload"
            )
        return
