"""What the parameters of an ``OffloadedAdamW`` are called, from its groups as they are now.

Groups may be edited at any time, so that nobody keeps a name: it is asked for when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def names_of(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Name by ``id`` of the parameter, in the order of ``groups``; no two have the same.

    It is the name that was given with the parameter, or the position, as in ``state_dict``. Where
    two were given the same, as two parts of a model have inside, all have their position before it.
    """
    names: dict[int, str] = {}
    for group in groups:
        given: Sequence[str] = group.get("param_names", ())
        is_named = len(given) == len(group["params"])
        for position, parameter in enumerate(group["params"]):
            name = given[position] if is_named else str(len(names))
            names.setdefault(id(parameter), name)
    if len(set(names.values())) == len(names):
        return names
    return {key: f"{position}:{name}" for position, (key, name) in enumerate(names.items())}


def lengths_of(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many parameters each of ``groups`` has."""
    return [len(group["params"]) for group in groups]


def named_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``groups`` with names for parameters."""
    names = names_of(groups)
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in groups
    ]
