"""The leaves of a checkpoint as a live tree asks for them: by their keys, or by their names."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from checkpoint.format.names import Path, closest, natural_name, render
from checkpoint.format.records import Manifest
from checkpoint.format.tree import DataNode, decode_tree

_DATA = object()
"""Stands for a tensor in a tree that is decoded for its other leaves."""


class SavedLeaves:
    """The leaves of a checkpoint by path and by name."""

    def __init__(self, manifest: Manifest) -> None:
        self._data: dict[Path, DataNode] = {}
        tree = decode_tree(manifest.tree, self._note)
        self._values = dict(_plain_leaves((), tree))

    def lacks(self, path: Path) -> bool:
        """Whether there is nothing for a leaf of the live tree, of whatever kind."""
        is_there = path in self._data or path in self._values
        return not is_there and natural_name(path) not in self._names

    @property
    def is_empty(self) -> bool:
        return not self._data and not self._values

    @cached_property
    def _data_paths(self) -> dict[str, Path]:
        return _by_name(self._data)

    @cached_property
    def _value_paths(self) -> dict[str, Path]:
        return _by_name(self._values)

    @cached_property
    def _names(self) -> set[str]:
        return {natural_name(path) for path in (*self._data, *self._values)}

    @cached_property
    def _places(self) -> set[Path]:
        """Of the leaves, and of the containers that have some."""
        found: set[Path] = set()
        for path in (*self._data, *self._values):
            while path and path not in found:
                found.add(path)
                path = path[:-1]
        return found

    def some_names(self) -> str:
        """For errors: names of a few tensors."""
        names = [repr(natural_name(path)) for path in itertools.islice(self._data, 3)]
        return f"has {', '.join(names)} ..." if names else "has no tensors"

    def _note(self, path: Path, node: DataNode) -> Any:
        self._data[path] = node
        return _DATA

    def data(self, path: Path, name: str) -> tuple[Path, DataNode]:
        found = path if path in self._data else self._data_paths.get(name)
        if found is None:
            raise self._refused(path, is_data=True)
        return found, self._data[found]

    def value(self, path: Path) -> Any:
        name = natural_name(path)
        found = path if path in self._values else self._value_paths.get(name)
        if found is None:
            raise self._refused(path, is_data=False)
        return self._values[found]

    def check_none_in(self, path: Path, wants: Callable[[str], bool]) -> None:
        """Of what is empty in the live tree: raises ValueError for leaves of these names there."""
        if path not in self._places:
            return
        for leaf in (*self._data, *self._values):
            if leaf[: len(path)] == path and wants(name := natural_name(leaf)):
                raise ValueError(
                    f"{render(path, 'into')} is empty, and what the checkpoint has there, as "
                    f"{name!r}, would not be loaded; put places for it there (an optimizer has "
                    "state after a step), or load it without into=; strict=False leaves it empty"
                )

    def _refused(self, path: Path, is_data: bool) -> ValueError:
        """Why a leaf of the live tree, a tensor or another one, finds none in the checkpoint."""
        where, name = render(path, "into"), natural_name(path)
        mine, others = (self._data, self._values)[:: 1 if is_data else -1]
        kinds = ("a tensor", "a plain value")[:: 1 if is_data else -1]
        if _has(others, path, name):
            return ValueError(
                f"{where} is {kinds[0]}, the checkpoint holds {kinds[1]} there; put {kinds[1]} "
                "there too (which load writes to or replaces), or load this leaf without into="
            )
        if _has(mine, path, name):
            return ValueError(
                f"{where} could be several leaves of the checkpoint, which are all called {name!r};"
                " load them without into="
            )
        similar = closest(name, map(natural_name, mine))
        hint = f"; it has {', '.join(map(repr, similar))}" if similar else ""
        return ValueError(f"{where} is not in the checkpoint{hint}")


def _has(leaves: Mapping[Path, Any], path: Path, name: str) -> bool:
    return path in leaves or name in map(natural_name, leaves)


def _by_name(paths: dict[Path, Any]) -> dict[str, Path]:
    """Paths by natural name, where only one has it."""
    names: dict[str, Path | None] = {}
    for path in paths:
        name = natural_name(path)
        names[name] = None if name in names else path
    return {name: path for name, path in names.items() if path is not None}


def _plain_leaves(path: Path, tree: Any) -> Iterator[tuple[Path, Any]]:
    """Leaves of a decoded tree that are not tensor data."""
    kind = type(tree)
    if kind in (dict, OrderedDict):
        for key, item in tree.items():
            yield from _plain_leaves((*path, key), item)
    elif kind in (list, tuple):
        for index, item in enumerate(tree):
            yield from _plain_leaves((*path, index), item)
    elif tree is not _DATA:
        yield path, tree
