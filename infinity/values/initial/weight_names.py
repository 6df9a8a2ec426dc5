"""What the tensors in files of weights become in a model: the same under another name, or, for
models of Hugging Face whose layout has changed, several made into one or one into several.

Such changes are those that ``from_pretrained`` makes (``transformers.conversion_mapping``), a
parameter at a time.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How one or several tensors of a model are made of stored ones."""

    stored: tuple[str, ...]
    make: Callable[[Read], Mapping[str, torch.Tensor]]
    """By name in the model; memory for the stored ones and for the results is taken at once."""
    is_name_alone: bool = False
    """Whether it makes the one stored tensor, as it is, the one of the model."""


def recipes_for(model: nn.Module, names: set[str], stored: Sequence[str]) -> list[Recipe]:
    """Recipes for those of ``names``, all of ``model``'s, that ``stored`` tensors are for."""
    if _is_hugging_face(model):
        return _converted(model, names, stored)
    return _renamed(names, stored)


def remedy_for(model: nn.Module) -> str:
    """What to do where files do not fit."""
    if _is_hugging_face(model):
        name = type(model).__name__
        return (
            f"load them with {name}.from_pretrained(...), and offload that model without weights=, "
            "or save_pretrained it and pass that folder"
        )
    return "load them into the model yourself and offload it without weights="


def ignored_by(model: nn.Module, name: str) -> bool:
    """Whether the model expects a stored tensor that it does not use."""
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _is_hugging_face(model: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def prefix_of(names: Collection[str], stored: Container[str], prefixes: Sequence[str]) -> str:
    """What stored names have before those of the model: the one of ``prefixes`` under which the
    most of ``names`` are found, the first of several.

    It is the same for all of them, or one stored tensor could become two parameters.
    """
    return max(prefixes, key=lambda prefix: sum(prefix + name in stored for name in names))


def _renamed(names: set[str], stored: Sequence[str]) -> list[Recipe]:
    """With or without a ``model.`` before the name."""
    known = set(stored)
    prefix = prefix_of(names, known, ("", "model."))
    return [_rename(prefix + name, name) for name in sorted(names) if prefix + name in known]


def _rename(stored: str, target: str) -> Recipe:
    return Recipe((stored,), lambda read: {target: read(stored)}, is_name_alone=True)


def _converted(model: Any, names: set[str], stored: Sequence[str]) -> list[Recipe]:
    """As ``transformers.core_model_loading`` brings stored tensors together."""
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 nothing was converted
        return _renamed(names, stored)
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    of_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(names, True)
    collected: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        found = loading.rename_source_key(name, renamings, converters, prefix, known)
        if found[0] not in names and name in names:
            found = loading.rename_source_key(name, [], [], prefix, known)
        if found[0] in names:
            collected.setdefault(found[0], []).append((name, found[1]))
    recipes = []
    for target, parts in collected.items():
        pattern = parts[0][1]
        if pattern is None:
            recipes.append(_rename(parts[0][0], target))
        else:
            recipes.append(_conversion(of_pattern[pattern], model, target, parts))
    return recipes


def _conversion(
    converter: Any, model: Any, target: str, parts: Sequence[tuple[str, str | None]]
) -> Recipe:
    def make(read: Read) -> dict[str, torch.Tensor]:
        work = copy.deepcopy(converter)
        for name, pattern in parts:
            work.add_tensor(target, name, pattern, lambda name=name: read(name))
        made = work.convert(target, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    return Recipe(tuple(name for name, _ in parts), make)
