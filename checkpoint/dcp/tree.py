"""Between DCP's flat names and state trees: pure.

A tree that DCP flattened is put together again by the paths that its planner kept, where they give
back the same names; without them it stays a flat dict. A value that no state tree holds is an array
of dtype V1, a kind that next to no other state holds: the bytes that DCP made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from checkpoint.format.names import ROOT_NAME, Path
from checkpoint.format.scalars import Node

BLOB_DTYPE = "|V1"
_OF_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
"""Zip files, and the number that what was saved without one begins with."""


def entry_name(path: Path) -> str:
    """What DCP calls what is at a path: its keys joined by dots. The whole state, which DCP has no
    name for, is `state`.
    """
    return ".".join(str(key) for key in path) if path else ROOT_NAME


def is_blob(node: Node) -> bool:
    """Whether a node stands for bytes that DCP made."""
    return isinstance(node, dict) and "array" in node and node.get("dtype") == BLOB_DTYPE


def may_be_of_torch(data: bytes) -> bool:
    """Whether bytes begin as those do that torch.save makes, of which ever version."""
    return data.startswith(_OF_TORCH)


def build_tree(leaves: Mapping[str, Node], paths: Mapping[str, Any] | None) -> Node:
    """The tree of leaves by name; nested by `paths` if these are known for all and fit."""
    root: dict[Any, Any] = {}
    for name, node in leaves.items():
        path = None if paths is None else paths.get(name)
        if not _is_path(path) or entry_name(path) != name or not _insert(root, path, node):
            return {"dict": dict(leaves)}
    return _encode(root)


def _is_path(path: Any) -> TypeGuard[tuple[Any, ...]]:
    if not isinstance(path, tuple) or not path or type(path[0]) is not str:
        return False
    return all(type(key) in (str, int) for key in path)


class _Leaf:
    def __init__(self, node: Node) -> None:
        self.node = node


def _insert(root: dict[Any, Any], path: tuple[Any, ...], node: Node) -> bool:
    """False if the place is taken: by a leaf on the way, or by another leaf."""
    for key in path[:-1]:
        root = root.setdefault(key, {})
        if isinstance(root, _Leaf):
            return False
    if path[-1] in root:
        return False
    root[path[-1]] = _Leaf(node)
    return True


def _encode(tree: Any) -> Node:
    """DCP's paths have integers for places in lists, and text for every key of a dict."""
    if isinstance(tree, _Leaf):
        return tree.node
    if tree and all(type(key) is int for key in tree):
        # DCP leaves empty dicts out; a list keeps their places.
        return [_encode(tree.get(index, {})) for index in range(max(tree) + 1)]
    if all(type(key) is str for key in tree):
        return {"dict": {key: _encode(item) for key, item in tree.items()}}
    return {"items": [[key, _encode(item)] for key, item in tree.items()]}
