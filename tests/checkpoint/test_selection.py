"""Which leaves `only` asks for."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.plan.selection import Selection


def test_names_are_looked_up_and_only_patterns_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying every one of a list of names on every leaf takes minutes where there are 20,000."""
    compiled: list[str] = []
    translate = fnmatch.translate

    def count(text: str) -> str:
        compiled.append(text)
        return translate(text)

    monkeypatch.setattr(fnmatch, "translate", count)
    names = [f"layer.{number}" for number in range(50)]
    chosen = Selection([*names, "other.*"])
    assert compiled == ["other.*"]
    assert all(map(chosen.wants, [*names, "other.1"]))
    assert not chosen.wants("layer.50")
    chosen.check_matched()


@pytest.mark.parametrize("text", ["a[0", "a]", "a.b", "A", "[[]x", "a\nb"])
def test_names_with_odd_characters_are_found(text: str) -> None:
    chosen = Selection(text)
    assert chosen.wants("[x" if text == "[[]x" else text)
    assert not chosen.wants("axb")
    chosen.check_matched()


@pytest.mark.parametrize(("only", "value"), [(5, "5"), (["w", 3], "3"), ([None], "None")])
def test_what_is_no_pattern_is_refused_by_name(tmp_path: Path, only: Any, value: str) -> None:
    checkpoint.save({"w": torch.ones(2)}, tmp_path / "step")
    with pytest.raises(TypeError, match=f"only={value} is no pattern"):
        checkpoint.load(tmp_path / "step", only=only)


def test_a_tree_in_the_place_of_patterns_is_refused_and_told_where_it_goes(tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(3)}, tmp_path / "step")
    tree: Any = {"x": torch.zeros(3)}
    with pytest.raises(TypeError, match=r"only is a dict, .*into="):
        checkpoint.load(tmp_path / "step", tree)
    assert tree["x"].sum() == 0
