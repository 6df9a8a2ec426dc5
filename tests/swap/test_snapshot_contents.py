"""Tables of a snapshot come back as they were; what contradicts itself is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swap.plan.layout import PAGE, Component, Segment
from swap.snapshots.contents import Contents, FileRange, SavedGroup, decode, encode

CONTENTS = Contents(
    parameters=(("a", 500),),
    groups=(
        SavedGroup(
            (Component("weight", torch.bfloat16), Component("scale", torch.float32, True, 256)),
            1024,
            False,
            (Segment(parameter=0, subgroup=0, start=0, length=500, offset=0),),
        ),
    ),
    ranges={(0, "weight"): (FileRange("0123456789ab", PAGE, PAGE),)},
)


def _kind(place: int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["kinds"][0][0][place] = value

    return change


def _table(name: str, column: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree[name][0, column] = value

    return change


def _entry(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree.update({name: value})


def test_contents_come_back_as_they_were() -> None:
    assert decode(encode(CONTENTS)) == CONTENTS


@pytest.mark.parametrize(
    "change",
    [
        *(_kind(0, 7), _kind(1, "bfloat16"), _kind(2, 1), _kind(3, 0), _kind(3, 7), _kind(3, -1)),
        *(_kind(3, True), _entry("kinds", 7), _entry("groups", [[0, 1024, 0]])),
        *(_entry("files", ["../../0123456789ab"]), _entry("files", [7]), _entry("files", [])),
        *(_entry("parameters", [["a", -1]]), _entry("parameters", [["a", "500"]])),
        *(_table("groups", 0, -1), _table("groups", 0, 1), _table("groups", 1, -1)),
        *(_table("segments", 1, -1), _table("segments", 3, 501), _table("segments", 0, 1)),
        *(_table("ranges", 0, -1), _table("ranges", 1, -1), _table("ranges", 2, -1)),
        *(_table("ranges", 3, 7), _table("ranges", 4, 7)),
        _entry("segments", torch.zeros(1, 5)),
    ],
)
def test_contents_that_contradict_themselves_are_refused(
    change: Callable[[dict[str, Any]], None],
) -> None:
    tree = encode(CONTENTS)
    tree["kinds"] = [[[*component] for component in kind] for kind in tree["kinds"]]
    change(tree)
    with pytest.raises(ValueError, match=r"."):
        decode(tree)
