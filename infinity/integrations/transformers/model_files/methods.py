"""Methods of a model that programs call after training, while a trainer has it offloaded: what
saves it is served, what merges adapters into it is refused before it changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import infinity
from infinity.integrations.transformers import folders
from infinity.integrations.transformers.model_files.weights import write_model

_MERGES = ("merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")


def serve_methods(stack: ExitStack, offloaded: infinity.OffloadedModel) -> None:
    """Until ``stack`` is closed."""
    model: Any = offloaded.model
    methods: dict[str, Callable[..., Any]] = {}
    if hasattr(type(model), "save_pretrained"):
        methods["save_pretrained"] = partial(save_pretrained, offloaded)
    if hasattr(model, "peft_config"):
        methods |= {name: partial(_refuse, name) for name in _MERGES if hasattr(model, name)}
    model.__dict__.update(methods)
    for name in methods:
        stack.callback(model.__dict__.pop, name, None)


def save_pretrained(
    offloaded: infinity.OffloadedModel, save_directory: str | os.PathLike[str], **options: Any
) -> None:
    """As that of the model, streamed. Raises ``ValueError`` naming an option that streaming cannot
    honour.
    """
    with folders.replacing(Path(save_directory)) as staged:
        write_model(offloaded, staged, options)


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"{name}() changes the weights in place, which are offloaded: call close() of the trainer "
        "(or end_training() of the accelerator) first, which gives the model its trained values "
        "in memory; save_pretrained(folder) saves the adapters meanwhile"
    )
