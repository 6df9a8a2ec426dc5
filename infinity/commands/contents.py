"""The tensors of a checkpoint as a tree of their names, in lines of plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from checkpoint.format.records import TensorRecord
from swap.tiers import format_bytes

_INDENT = "  "


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict)
    tensors: list[TensorRecord] = field(default_factory=list)
    """Those at this very name; several where names hold dots themselves."""
    num_tensors: int = 0
    nbytes: int = 0


def printable(name: str) -> str:
    """``name`` with what a terminal would act upon, or cannot show, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def tree_lines(tensors: Sequence[TensorRecord], depth: int | None = None) -> Iterator[str]:
    """A line for each name, those of a folder of names below it and further to the right, down to
    ``depth`` names. A line has the name, then dtype and shape, or the number of tensors; then the
    bytes.
    """
    rows = list(_rows(_tree(tensors), 0, depth))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, kind, nbytes in rows:
        yield f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {nbytes}"


def _tree(tensors: Sequence[TensorRecord]) -> _Node:
    root = _Node()
    for tensor in tensors:
        node = root
        for key in tensor.name.split("."):
            node.num_tensors += 1
            node.nbytes += tensor.nbytes
            node = node.children.setdefault(key, _Node())
        node.tensors.append(tensor)
    return root


def _rows(node: _Node, level: int, depth: int | None) -> Iterator[tuple[str, str, str]]:
    for name, child in node.children.items():
        label = _INDENT * level + printable(name)
        for tensor in child.tensors:
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            yield label, f"{tensor.dtype} {shape}", format_bytes(tensor.nbytes)
        if child.children:
            count = f"{child.num_tensors} tensor{'s' if child.num_tensors > 1 else ''}"
            yield label, count, format_bytes(child.nbytes)
            if depth is None or level + 1 < depth:
                yield from _rows(child, level + 1, depth)
