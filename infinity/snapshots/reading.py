"""A snapshot, read as if it were a checkpoint that ``offloaded.save`` wrote.

So ``values.loading`` restores it, with all that it checks and converts. What is cut as it was, and
in the same tier, is neither: extents on NVMe are adopted, host memory is read into where it is.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import checkpoint
from checkpoint.directory.relocation import AS_SAVED
from checkpoint.errors import CorruptCheckpointError
from checkpoint.plan.write_runs import STAGING_BYTES
from infinity.snapshots.entries import Entry, read_sums
from infinity.snapshots.sources import TABLES
from infinity.values.component_bytes import ComponentBytes
from infinity.values.load_targets import check_targets, names_of
from swap.snapshots.contents import Contents
from swap.snapshots.reading import BUFFER_BYTES, RangeReader
from swap.storage.components import as_bytes, page_aligned

_ESCAPED = re.compile(r"\[([*?\[])\]")


class SavedPoint:
    """One snapshot, open for reading; ``paths`` are those of the swap files that it needs.

    ``adopt`` is called when values are about to be read, and gives the parameters that have theirs
    already.
    """

    def __init__(
        self,
        entry: Entry,
        paths: dict[str, Path],
        adopt: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._folder = entry.folder
        self._contents: Contents = entry.contents
        self._numels = dict(self._contents.parameters)
        self._adopt = adopt
        self._turn = threading.Lock()
        self._stack = ExitStack()
        try:
            self._host = self._stack.enter_context(checkpoint.open(entry.folder))
            self._host.opened.keep_little()
            ranges = RangeReader(paths, partial(read_sums, entry), self._contents.owner_of)
            self._ranges = self._stack.enter_context(ranges)
            self._tables = self._read_tables()
            self._leaves: Mapping[str, list[str]] = self._tables.pop("leaves")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SavedPoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._stack.close()

    def read(
        self,
        only: list[str],
        into: Any = None,
        staging_bytes: int = STAGING_BYTES,
        map_location: str = "cpu",
    ) -> Any:
        """As ``checkpoint.load``, of the names that such a checkpoint would have;
        ``map_location`` is that of buffers.
        """
        if only == ["infinity.*"]:
            return {"infinity": self.training()}
        if into is not None:
            self._read_into(into, staging_bytes)
            return into
        names = [_ESCAPED.sub(r"\1", pattern) for pattern in only]
        if not all(self._is_leaf(name) for name in names):
            return checkpoint.load(
                self._folder, only=only, map_location=map_location, staging_bytes=staging_bytes
            )
        tree: dict[str, Any] = {}
        for name in names:
            top, component, leaf = _split(name)
            branch = tree.setdefault(top, {})
            (branch if top == "model" else branch.setdefault(component, {}))[leaf] = self._whole(
                leaf, component
            )
        return tree

    def check(self, same: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` unless everything that is read into what is there fits it."""
        check_targets(self._folder, AS_SAVED, {"model": _buffers(same)})
        for target in _components(same):
            name = target.component.name
            if self.dtype(target.leaf.name, name) != target.dtype:
                raise ValueError(
                    f"the snapshot does not fit the model, which is left as it was: {name} of "
                    f"{target.leaf.name} is {self.dtype(target.leaf.name, name)} in the snapshot "
                    f"and {target.dtype} here; restore it into a model that is offloaded as the "
                    "one of the snapshot was"
                )

    def training(self) -> dict[str, Any]:
        """What a checkpoint has as ``infinity``."""
        found: dict[str, Any] = self.tree("training")
        return found | self._tables

    def tree(self, name: str, default: Any = None) -> Any:
        """One part of what was saved; ``default`` where there is none."""
        found = checkpoint.load(self._folder, only=[f"{name}.*"], strict=default is None)
        return found[name] if default is None else found.get(name, default)

    def shape(self, leaf: str, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of a component of a tensor, which has the shape ``whole``."""
        parts = self._leaves[leaf]
        kinds = [self._contents.component(part, name) for part in parts]
        if kinds[0].per == 1:
            return whole
        counts = zip(kinds, parts, strict=True)
        return (sum(kind.count(self._numels[part]) for kind, part in counts),)

    def dtype(self, leaf: str, name: str) -> torch.dtype:
        """Of a component of a tensor."""
        return self._contents.component(self._leaves[leaf][0], name).dtype

    def _read_tables(self) -> dict[str, Any]:
        """The leaves, and what ``training`` has not. Raises ``CorruptCheckpointError``."""
        text = self.tree("tables", default={}).get("json")
        if text is None:  # of an older version
            return {"leaves": self.tree("leaves")}
        try:
            found: dict[str, Any] = json.loads(text)
            return {name: found[name] for name in (*TABLES, "leaves")}
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise CorruptCheckpointError(f"{self._folder}: its tables: {error!r:.200}") from error

    def _is_leaf(self, name: str) -> bool:
        return name.startswith(("model.", "optimizer.")) and _split(name)[2] in self._leaves

    def _read_into(self, same: Mapping[str, Any], staging_bytes: int) -> None:
        adopted = self._adopt()
        for target in _components(same):
            self._copy(target, adopted)
        buffers = {"model": _buffers(same)}
        if buffers["model"]:
            checkpoint.load(
                self._folder, only=names_of(buffers), into=buffers, staging_bytes=staging_bytes
            )

    def _copy(self, target: ComponentBytes, adopted: Collection[int]) -> None:
        memory = page_aligned(BUFFER_BYTES).view(target.dtype)
        at = 0
        for part in target.leaf.parts:
            count = target.component.count(part.numel)
            if part.index not in adopted:
                for start in range(at, at + count, memory.numel()):
                    piece = memory[: min(memory.numel(), at + count - start)]
                    self.fill(target.leaf.name, target.component.name, start, piece)
                    target.write(start * target.dtype.itemsize, as_bytes(piece).data)
            at += count

    def _whole(self, leaf: str, name: str) -> torch.Tensor:
        shape = self.training()["shapes"][leaf]
        out = torch.empty(shape, dtype=self.dtype(leaf, name), device="cpu")
        self.fill(leaf, name, 0, out.view(-1))
        return out

    def fill(self, leaf: str, name: str, start: int, out: torch.Tensor) -> None:
        """Values from ``start`` on of a component of a tensor. Thread-safe."""
        with self._turn:
            self._fill(leaf, name, start, out)

    def _fill(self, leaf: str, name: str, start: int, out: torch.Tensor) -> None:
        at, stop = 0, start + out.numel()
        for part in self._leaves[leaf]:
            count = self._contents.component(part, name).count(self._numels[part])
            low, high = max(start, at), min(stop, at + count)
            if low < high:
                self._fill_part(part, name, low - at, out[low - start : high - start])
            at += count

    def _fill_part(self, part: str, name: str, start: int, out: torch.Tensor) -> None:
        for segment, low, at, length in self._contents.overlaps(part, name, start, out.numel()):
            values = out[at : at + length]
            ranges = self._contents.ranges.get((segment.subgroup, name))
            if self._contents.groups[segment.subgroup].is_host:
                values.copy_(self._host[f"host.{segment.subgroup}.{name}"][low : low + length])
            elif ranges is None:
                values.zero_()
            else:
                self._ranges.read(ranges, low * out.dtype.itemsize, as_bytes(values))


def _split(name: str) -> tuple[str, str, str]:
    """(first part, component, tensor) of the name of a tensor in a checkpoint."""
    top, _, rest = name.partition(".")
    if top == "model":
        return top, "weight", rest
    component, _, leaf = rest.partition(".")
    return top, component, leaf


def _components(same: Mapping[str, Any]) -> Iterator[ComponentBytes]:
    for value in same.values():
        if isinstance(value, Mapping):
            yield from _components(value)
        elif isinstance(value, ComponentBytes):
            yield value


def _buffers(same: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in same["model"].items() if not isinstance(v, ComponentBytes)}
