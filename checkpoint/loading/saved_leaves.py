"""The leaves of a checkpoint as a live tree asks for them: by their keys, or by their names."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

from checkpoint.format.names import Path, closest, natural_name, render
from checkpoint.format.records import Manifest
from checkpoint.format.tree import DataNode, decode_tree

T = TypeVar("T")
_DATA = object()
"""Stands for a tensor in a tree that is decoded for its other leaves."""


class SavedLeaves:
    """The leaves of a checkpoint by path and by name."""

    def __init__(self, manifest: Manifest) -> None:
        self._data: dict[Path, DataNode] = {}
        tree = decode_tree(manifest.tree, self._note)
        self._values = dict(_plain_leaves((), tree))
        self._tree = tree

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

    def check_empty(self, ends: Iterable[tuple[Path, bool]], wants: Callable[[str], bool]) -> None:
        """Of the leaves of the live tree, and what is empty there (True): raises ValueError for
        leaves of these names that belong there, by their keys or by their names.
        """
        empty, leaves = list[Path](), list[Path]()
        for path, is_empty in ends:
            (empty if is_empty else leaves).append(path)
        by_path = {path: path for path in empty if path in self._places}
        named = {path: natural_name(path) for path in empty}
        by_name = {name: path for path, name in named.items() if self._is_beginning(path, name)}
        if not by_path and not by_name:
            return
        taken = set(map(natural_name, leaves)) if by_name else set[str]()
        for leaf in (*self._data, *self._values):
            name = natural_name(leaf)
            place = _first_in(by_path, (leaf[:end] for end in range(1, len(leaf) + 1)))
            if place is None and name not in taken:
                place = _first_in(by_name, _beginnings_of(name))
            if place is not None and wants(name):
                raise ValueError(
                    f"{render(place, 'into')} is empty, and what the checkpoint has there, as "
                    f"{name!r}, would not be loaded; put places for it there (an optimizer has "
                    "state after a step), or load it without into=; strict=False leaves it empty"
                )

    def _is_beginning(self, path: Path, name: str) -> bool:
        """Whether names of leaves are this one or begin with it, and nothing is saved at the path
        itself.
        """
        return name in self._beginnings and not _is_at(path, self._tree)

    @cached_property
    def _beginnings(self) -> set[str]:
        return {beginning for name in self._names for beginning in _beginnings_of(name)}

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


def _first_in(places: Mapping[T, Path], candidates: Iterable[T]) -> Path | None:
    return next((places[one] for one in candidates if one in places), None)


def _beginnings_of(name: str) -> Iterator[str]:
    """What a name begins with, part by part, the whole of it last."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _is_at(path: Path, tree: Any) -> bool:
    """Whether a decoded tree has anything at a path, be it empty."""
    for key in path:
        if type(tree) in (list, tuple):
            is_there = type(key) is int and 0 <= key < len(tree)
        else:
            is_there = type(tree) in (dict, OrderedDict) and key in tree
        if not is_there:
            return False
        tree = tree[key]
    return True


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
