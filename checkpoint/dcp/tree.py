"""Between DCP's flat names and state trees: pure.

A tree that DCP flattened is put together again by the paths that its planner kept, where they give
back the same names; without them it stays a flat dict. A value that no state tree holds is an array
of dtype V1, a kind that no other state holds: the bytes that DCP made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from checkpoint.format.names import ROOT_NAME, Path, unique_names
from checkpoint.format.scalars import Node

BLOB_DTYPE = "|V1"
_ESCAPED = "escaped~"


def entry_node(index: int, array: Node | None) -> Node:
    """The node of stored tensor `index`: a tensor, or an array of that dtype."""
    return {"tensor": index} if array is None else {"array": index, "dtype": array}


def entry_name(path: Path) -> str:
    """What DCP calls what is at a path: its keys joined by dots. The whole state, which DCP has no
    name for, is `state`.
    """
    return ".".join(str(key) for key in path) if path else ROOT_NAME


def data_name(fqn: str) -> str:
    """What an entry is called in data files: its name, unless these keep that for themselves.

    No two entries get the same name, and none of them has to be known for that of another. Names
    that are no valid UTF-8 have one beginning of their own: `~escaped~`.
    """
    if not _is_utf8(fqn):
        doubled = fqn.replace("\\", "\\\\")
        return f"~{_ESCAPED}{doubled.encode('utf-8', 'backslashreplace').decode()}"
    bare = fqn.lstrip("~")
    is_taken = not bare or unique_names([bare]) != [bare]
    is_taken = is_taken or (bare != fqn and bare.startswith(_ESCAPED))
    return f"~{fqn}" if is_taken else fqn


def _is_utf8(text: str) -> bool:
    """Half of a surrogate pair is a legal Python string and no legal UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def is_blob(node: Node) -> bool:
    """Whether a node stands for bytes that DCP made."""
    return isinstance(node, dict) and "array" in node and node.get("dtype") == BLOB_DTYPE


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
