"""State trees as JSON: containers by tagged nodes, small values inline, tensors by reference.

JSON's own null, booleans, strings, numbers and arrays stand for themselves (a number with a
fraction or an exponent is a float, any other an int; an array is a list). Everything else is an
object whose first key is a tag. Nothing here touches a file, and no node can name code to run.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any, Final

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.names import Path, kind_of, natural_name, render, shown, unique_names
from checkpoint.format.scalars import (
    Node,
    decode_scalar,
    encode_scalar,
    is_key,
    is_scalar,
    scalar_tags,
)

MAX_DEPTH = 128
"""Containers within containers; bounds how deep a reader has to recurse."""

DATA_TAGS = frozenset({"tensor", "view", "array"})
SCALAR_TAGS = scalar_tags()


@dataclass(slots=True, eq=False)
class Leaf:
    """A tensor, array or byte source found in a tree, at `path` first.

    `node` is its place in the JSON, for the caller to fill. `name` tells it apart from all others.
    """

    path: Path
    value: Any
    name: str = ""
    node: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """A tree's JSON and its leaves: one for an object at several `places`, each with a name."""

    node: Node
    leaves: list[Leaf]
    by_name: dict[str, Leaf]
    places: list[tuple[Path, Leaf]]


def encode_tree(
    state: object, is_data: Callable[[object], bool], refuse: Refuse | None = None
) -> EncodedTree:
    """Encodes `state`; whatever `is_data` accepts becomes a leaf whose node the caller fills.

    Raises TypeError for a value of another type, of which `refuse` says what is wrong, ValueError
    for a container that holds itself or nests deeper than MAX_DEPTH.
    """
    encoder = _Encoder(is_data, refuse or _refusal)
    node = encoder.encode((), state)
    names = unique_names([natural_name(path) for path, _ in encoder.places])
    by_name = {name: leaf for name, (_, leaf) in zip(names, encoder.places, strict=True)}
    for name, leaf in by_name.items():
        leaf.name = leaf.name or name
    return EncodedTree(node, list(encoder.leaf_of.values()), by_name, encoder.places)


Refuse = Callable[[Path, object], str]
"""What is said of a value at a path that a tree does not hold."""


class _Encoder:
    def __init__(
        self, is_data: Callable[[object], bool], refuse: Refuse, open_: set[int] | None = None
    ) -> None:
        self.leaf_of: dict[int, Leaf] = {}
        self.places: list[tuple[Path, Leaf]] = []
        self._is_data = is_data
        self._refuse = refuse
        self._open: set[int] = set() if open_ is None else open_

    def encode(self, path: Path, value: Any) -> Node:
        container = _CONTAINERS.get(type(value))
        if container is not None:
            return self._encode_container(path, value, container)
        if is_scalar(value):
            return self._encode_scalar(path, value)
        if self._is_data(value):
            return self._leaf(path, value).node
        raise TypeError(self._refuse(path, value))

    def _leaf(self, path: Path, value: Any) -> Leaf:
        leaf = self.leaf_of.get(id(value))
        if leaf is None:
            leaf = self.leaf_of[id(value)] = Leaf(path, value)
        self.places.append((path, leaf))
        return leaf

    def _encode_scalar(self, path: Path, value: Any) -> Node:
        try:
            return encode_scalar(value)
        except TypeError as error:
            raise TypeError(f"cannot save {render(path)}: {error}") from error

    def _encode_container(
        self, path: Path, value: Any, encode: Callable[[_Encoder, Path, Any], Node]
    ) -> Node:
        if id(value) in self._open:
            raise ValueError(f"cannot save {render(path)}: the container holds itself")
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"cannot save {render(path)}: nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))
        node = encode(self, path, value)
        self._open.discard(id(value))
        return node

    def encode_list(self, path: Path, value: list[Any]) -> Node:
        return [self.encode((*path, index), item) for index, item in enumerate(value)]

    def encode_tuple(self, path: Path, value: tuple[Any, ...]) -> Node:
        return {"tuple": [self.encode((*path, index), item) for index, item in enumerate(value)]}

    def encode_set(self, path: Path, value: set[Any]) -> Node:
        nodes = [self.encode_key(path, item, "an element of a set") for item in value]
        return {"set": sorted(nodes, key=json.dumps)}

    def encode_dict(self, path: Path, value: dict[Any, Any]) -> Node:
        if all(type(key) is str for key in value):
            for key in value:
                if not key.isascii():
                    self._encode_scalar((*path, key), key)
            return {"dict": {key: self.encode((*path, key), item) for key, item in value.items()}}
        return {"items": self._pairs(path, value)}

    def encode_counter(self, path: Path, value: Counter[Any]) -> Node:
        return {"counter": _Encoder(_is_never_data, self._refuse, self._open)._pairs(path, value)}

    def encode_ordered(self, path: Path, value: OrderedDict[Any, Any]) -> Node:
        node = {"ordereddict": self._pairs(path, value)}
        # torch.nn.Module.state_dict() hangs the versions of its modules on the dict itself.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            encoder = _Encoder(_is_never_data, self._refuse, self._open)
            node["metadata"] = encoder.encode((*path, "_metadata"), metadata)
        return node

    def _pairs(self, path: Path, value: dict[Any, Any]) -> list[Node]:
        return [
            [self.encode_key(path, key, "a key"), self.encode((*path, key), item)]
            for key, item in value.items()
        ]

    def encode_key(self, path: Path, value: Any, role: str) -> Node:
        """Keys and elements of sets: plain values and tuples of them."""
        if is_key(value):
            return self._encode_scalar(path, value)
        if type(value) is tuple and len(path) < MAX_DEPTH:
            inner = (*path, "key")
            return {"tuple": [self.encode_key(inner, item, role) for item in value]}
        raise TypeError(_refusal(path, value) + f"; it is {role}, which may be plain values only")


def _is_never_data(_: object) -> bool:
    return False


_CONTAINERS: dict[type, Callable[[_Encoder, Path, Any], Node]] = {
    list: _Encoder.encode_list,
    tuple: _Encoder.encode_tuple,
    set: _Encoder.encode_set,
    dict: _Encoder.encode_dict,
    OrderedDict: _Encoder.encode_ordered,
    Counter: _Encoder.encode_counter,
}


def _refusal(path: Path, value: object) -> str:
    return (
        f"cannot save {render(path)}: {kind_of(value)} is not a type that checkpoints hold; "
        f"{remedy_for(value)}"
    )


def has_state_dict(value: object) -> bool:
    """Whether it is a module, an optimizer, a scheduler or another such object."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


def remedy_for(value: object) -> str:
    """What to give instead of a value. What stands for values elsewhere says so itself."""
    if isinstance(instead := getattr(type(value), "instead_of_itself", None), str):
        return instead
    if has_state_dict(value):
        return "give what its state_dict() returns"
    if isinstance(value, Mapping):
        return "give dict(...) of it"
    if isinstance(value, os.PathLike):
        return "give str(...) of it"
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
        return "give list(...) of it"
    return "convert it to plain containers, numbers, strings, arrays or tensors"


class _Missing:
    """Type of MISSING, a node of which nothing was asked for."""


MISSING: Final = _Missing()


DataNode = dict[str, Node]


def data_nodes(node: Node) -> dict[str, tuple[Path, DataNode]]:
    """Where a tree has tensors: their paths and nodes, by name.

    Raises CorruptCheckpointError for what `encode_tree` does not make.
    """
    places: list[tuple[Path, DataNode]] = []
    decode_tree(node, lambda path, data: places.append((path, data)), lambda _: False)
    names = unique_names([natural_name(path) for path, _ in places])
    return dict(zip(names, places, strict=True))


def decode_tree(
    node: Node,
    data: Callable[[Path, DataNode], Any],
    wanted: Callable[[str], bool] | None = None,
) -> Any:
    """Builds the tree of a node; `data` gives the value of a tensor's node, or MISSING.

    With `wanted`, plain values whose natural name it refuses are left out, and so are containers
    of which nothing is left. Raises CorruptCheckpointError for what `encode_tree` does not make.
    """
    decoder = _Decoder(data, wanted)
    try:
        return decoder.decode((), node)
    except RecursionError as error:
        raise CorruptCheckpointError("the state tree is nested too deep") from error


def empty_tree(node: Node) -> Any:
    """What is left of a tree of which nothing was asked for: its outermost container, or None."""
    if isinstance(node, list):
        return []
    tag = next(iter(node), None) if isinstance(node, dict) else None
    empty = {"tuple": tuple, "set": set, "ordereddict": OrderedDict, "counter": Counter}
    return empty.get(tag, dict)() if tag in _DECODERS else None


class _Decoder:
    def __init__(
        self,
        data: Callable[[Path, DataNode], Any],
        wanted: Callable[[str], bool] | None,
    ) -> None:
        self._data = data
        self._wanted = wanted

    def decode(self, path: Path, node: Node) -> Any:
        if len(path) > MAX_DEPTH:
            raise CorruptCheckpointError(f"the state tree is deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            return self._decode_list(path, node)
        if not isinstance(node, dict):
            return self._decode_scalar(path, node)
        tag = next(iter(node), None)
        if tag in DATA_TAGS:
            return self._data(path, node)
        if tag in SCALAR_TAGS:
            return self._decode_scalar(path, node)
        decode = None if tag is None else _DECODERS.get(tag)
        if decode is None or len(node) > 1 + (tag == "ordereddict"):
            raise _unknown(path)
        return decode(self, path, node)

    def _decode_scalar(self, path: Path, node: Node) -> Any:
        if not self._is_wanted(path):
            return MISSING
        return _scalar(path, node)

    def _is_wanted(self, path: Path) -> bool:
        return self._wanted is None or self._wanted(natural_name(path))

    def _decode_list(self, path: Path, node: list[Node]) -> Any:
        values = [self.decode((*path, index), item) for index, item in enumerate(node)]
        return self._kept(path, [value for value in values if value is not MISSING], not node)

    def _kept(self, path: Path, container: Any, empty_by_nature: bool) -> Any:
        """Drops a container that a selection emptied; one that was empty counts as a leaf."""
        if container or self._wanted is None:
            return container
        return container if empty_by_nature and self._is_wanted(path) else MISSING

    def decode_tuple(self, path: Path, node: dict[str, Node]) -> Any:
        values = self._decode_list(path, _list(path, node["tuple"]))
        return values if values is MISSING else tuple(values)

    def decode_set(self, path: Path, node: dict[str, Node]) -> Any:
        if not self._is_wanted(path):
            return MISSING
        nodes = _list(path, node["set"])
        values = {_key(path, item) for item in nodes}
        # NaNs are equal to nothing, so that several may share a set; anything else is unique.
        if len(values) != len(nodes):
            raise CorruptCheckpointError(f"{render(path)}: a set holds an element twice")
        return values

    def decode_dict(self, path: Path, node: dict[str, Node]) -> Any:
        content = node["dict"]
        if not isinstance(content, dict):
            raise _unknown(path)
        return self._fill(path, {}, list(content.items()))

    def decode_items(self, path: Path, node: dict[str, Node]) -> Any:
        return self._fill(path, {}, _pairs(path, node["items"]))

    def decode_counter(self, path: Path, node: dict[str, Node]) -> Any:
        wanted = None if self._is_wanted(path) else self._wanted
        pairs = _pairs(path, node["counter"])
        return _Decoder(_no_data(path), wanted)._fill(path, Counter(), pairs)

    def decode_ordered(self, path: Path, node: dict[str, Node]) -> Any:
        ordered: OrderedDict[Any, Any] = OrderedDict()
        if "metadata" in node:
            metadata_path = (*path, "_metadata")
            ordered._metadata = decode_tree(node["metadata"], _no_data(metadata_path))  # type: ignore[attr-defined]
        elif len(node) != 1:
            raise _unknown(path)
        return self._fill(path, ordered, _pairs(path, node["ordereddict"]))

    def _fill(self, path: Path, target: dict[Any, Any], pairs: list[tuple[Any, Node]]) -> Any:
        for key, item in pairs:
            value = self.decode((*path, key), item)
            if key in target:
                raise CorruptCheckpointError(
                    f"{render(path)}: the key {shown(key):.200} is there twice"
                )
            if value is not MISSING:
                target[key] = value
        return self._kept(path, target, not pairs)


_DECODERS: dict[str, Callable[[_Decoder, Path, dict[str, Node]], Any]] = {
    "tuple": _Decoder.decode_tuple,
    "set": _Decoder.decode_set,
    "dict": _Decoder.decode_dict,
    "items": _Decoder.decode_items,
    "ordereddict": _Decoder.decode_ordered,
    "counter": _Decoder.decode_counter,
}


def _scalar(path: Path, node: Node) -> Any:
    try:
        return decode_scalar(node)
    except ValueError as error:
        raise CorruptCheckpointError(f"{render(path)}: {error}") from error


def _key(path: Path, node: Node, depth: int = 0) -> Any:
    if isinstance(node, dict) and list(node) == ["tuple"] and depth < MAX_DEPTH:
        items = _list(path, node["tuple"])
        return tuple(_key(path, item, depth + 1) for item in items)
    value = _scalar(path, node)
    if not is_key(value):
        raise CorruptCheckpointError(f"{render(path)}: a {type(value).__name__} cannot be a key")
    return value


def _list(path: Path, content: Node) -> list[Node]:
    if not isinstance(content, list):
        raise _unknown(path)
    return content


def _pairs(path: Path, content: Node) -> list[tuple[Any, Node]]:
    pairs = _list(path, content)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise _unknown(path)
    return [(_key(path, key), item) for key, item in pairs]


def _no_data(path: Path) -> Callable[[Path, DataNode], Any]:
    def refuse(_: Path, __: dict[str, Node]) -> Any:
        raise CorruptCheckpointError(f"{render(path)}: a tensor where none can be")

    return refuse


def _unknown(path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{render(path)}: not a node that this version knows")
